"""random_split, Subset and ConcatDataset over one cached dataset share its cache and read with workers."""

import torch
from torch.utils.data import ConcatDataset, Subset, random_split

import fastload

dataset = fastload.CachedDataset(fastload.ImageFolder("photos"))
train, val = random_split(dataset, [30, 10], generator=torch.Generator().manual_seed(0))
cats = Subset(dataset, range(20))
parts = [train, val, ConcatDataset([val, cats]), Subset(Subset(train, range(0, 30, 2)), [3, 3, 1])]
for part in parts:
    expected = [int(part[number][0][0, 0, 0]) for number in range(len(part))]
    for options in ({"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}, {}):
        loader = fastload.DataLoader(part, batch_size=7, **options)
        assert [value for images, labels in loader for value in images[:, 0, 0, 0].tolist()] == expected
assert dataset.cache_info().num_cached == 40
inner = fastload.CachedDataset(Subset(fastload.ImageFolder("photos"), range(30, 40)))
assert [int(image[0, 0, 0]) for image, label in (inner[number] for number in range(10))] == list(
    range(180, 240, 6)
)
