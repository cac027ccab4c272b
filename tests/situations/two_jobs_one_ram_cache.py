"""A second process that reads the same folder finds the first one's images in RAM, and decodes none of them."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import fastload


def job():
    dataset = fastload.CachedDataset(fastload.ImageFolder("photos", size=(16, 16)), cache="ram")
    was_cached = dataset.cache_info().num_cached
    loader = fastload.DataLoader(dataset, batch_size=10)
    values = [value for images, labels in loader for value in images[:, 0, 0, 0].tolist()]
    return was_cached, values


if __name__ == "__main__":
    dataset = fastload.CachedDataset(fastload.ImageFolder("photos", size=(16, 16)), cache="ram")
    dataset.fill(num_workers=0, progress=False)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(job).result() == (40, list(range(0, 240, 6)))
