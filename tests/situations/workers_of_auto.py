"""`num_workers="auto"`, `prefetch_factor` and a loader made with keyword arguments of a config dict give all batches."""

import json

import fastload

config = json.loads('{"batch_size": 10, "num_workers": "auto", "drop_last": false}')
dataset = fastload.CachedDataset(fastload.ImageFolder("photos"))
for more in ({}, {"persistent_workers": True, "prefetch_factor": 4}, {"timeout": 30}):
    loader = fastload.DataLoader(dataset, **config, **more)
    for epoch in range(4):
        assert [images[0, 0, 0, 0].item() for images, labels in loader] == [0, 60, 120, 180]
    assert isinstance(loader.num_workers, int)
    str(loader), loader.stats(), str(fastload.memory_report())
