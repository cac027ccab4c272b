"""A script that is piped into Python runs under fork, and under spawn is told why workers cannot start.

$ cat script_from_standard_input.py | python -
"""

import fastload


class Piped:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


assert len(list(fastload.DataLoader(Piped(), num_workers=1, multiprocessing_context="fork"))) == 4
try:
    list(fastload.DataLoader(Piped(), num_workers=1, multiprocessing_context="spawn"))
except fastload.errors.WorkerStartError as error:
    assert "multiprocessing_context='fork'" in str(error)
else:
    raise AssertionError("no error")
