"""What a training loop or a transform writes into its batch, in place, reaches neither the cache nor a later batch."""

import torch

import fastload


def darken(sample):
    sample[0][:] //= 2
    return sample


for transform, factor in ((None, 1), (darken, 2)):
    dataset = fastload.CachedDataset(fastload.ImageFolder("photos"), transform)
    for options in ({}, {"num_workers": 2}, {"num_workers": 1, "worker_type": "thread"}):
        loader = fastload.DataLoader(dataset, batch_size=8, **options)
        for epoch in range(3):
            for step, (images, labels) in enumerate(loader):
                expected = torch.arange(48 * step, 48 * step + 48, 6) // factor
                assert torch.equal(images[:, 9, 9, 1], expected.to(torch.uint8))
                images.fill_(255)
                labels += 7
                images.numpy()[0, 0] = 3
    assert dataset.cache.get(39)[0].max() == 234
