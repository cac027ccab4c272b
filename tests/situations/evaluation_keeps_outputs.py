"""Batches that are kept to the end of an epoch never change, whatever is read after them."""

import torch

import fastload

dataset = fastload.CachedDataset(fastload.ImageFolder("photos", size=(200, 200)))
for num_workers, worker_type in ((0, "process"), (2, "process"), (2, "thread")):
    loader = fastload.DataLoader(dataset, batch_size=4, num_workers=num_workers, worker_type=worker_type)
    kept, rows = [], []
    for epoch in range(3):
        for images, labels in loader:
            kept.append(images)
            rows.append(images[1])  # one of four
    expected = torch.arange(0, 240, 6).repeat(3)
    assert torch.equal(torch.cat(kept)[:, 100, 100, 0], expected)
    assert torch.equal(torch.stack(rows)[:, 0, 0, 0], expected[1::4])
