"""A checkpoint that holds a cached dataset, a SharedList and a loader opens in a process of another day.

$ python dataset_in_a_checkpoint.py save
$ python dataset_in_a_checkpoint.py load
"""

import sys

import torch

import fastload

if sys.argv[1] == "save":
    photos = fastload.ImageFolder("photos")
    train = fastload.CachedDataset(photos, cache="ram")
    train.fill(num_workers=0, progress=False)
    val = fastload.CachedDataset(photos, cache="lmdb:photos.lmdb")
    loader = fastload.DataLoader(train, batch_size=8)
    names = fastload.SharedList([f"name {number}" for number in range(40)])
    hyperparameters = {"train": train, "nested": [{"val": val}], "names": names, "loader": loader}
    torch.save({"weights": torch.ones(3), "hyper_parameters": hyperparameters}, "checkpoint.pt")
else:
    checkpoint = torch.load("checkpoint.pt", weights_only=False)
    loaded = checkpoint["hyper_parameters"]
    assert checkpoint["weights"].sum() == 3
    assert loaded["names"][39] == "name 39"
    for dataset in (loaded["train"], loaded["nested"][0]["val"]):
        for epoch in range(2):
            assert [int(dataset[number][0][0, 0, 0]) for number in range(40)] == list(range(0, 240, 6))
    assert loaded["train"].cache_info().num_cached == 40
    assert sum(len(labels) for images, labels in loaded["loader"]) == 40
