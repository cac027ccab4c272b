"""`python -c` with workers needs no script file: under fork they have the classes that were typed.

$ python -c "$(cat command_of_python.py)"
"""

import torch

import fastload


class Typed:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.full((70, 70), index)


loader = fastload.DataLoader(
    fastload.CachedDataset(Typed()), 5, num_workers=2, multiprocessing_context="fork"
)
for epoch in range(2):
    assert [batch[:, 0, 0].tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
