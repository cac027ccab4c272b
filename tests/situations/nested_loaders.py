"""A dataset that makes a loader of its own in each worker reads as without workers."""

import torch

import fastload


class Shard:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((128, 128), index)


class Summed(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        loader = fastload.DataLoader(Shard(), batch_size=8, num_workers=index % 2)
        return torch.stack([batch[:, 0, 0].sum() + index for batch in loader])


expected = torch.tensor([[28, 92, 156, 220, 284]]) + torch.arange(6)[:, None]
assert torch.equal(torch.cat(list(fastload.DataLoader(Summed(), batch_size=2))), expected)
loader = fastload.DataLoader([0, 2, 4], batch_size=None, num_workers=1, collate_fn=Summed().__getitem__)
assert torch.equal(torch.stack(list(loader)), expected[::2])
