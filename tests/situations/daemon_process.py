"""A training in a daemonic process reads without workers and with threads, and shares its parent's cache."""

import multiprocessing

import fastload


def train(dataset, results):
    for options in ({}, {"num_workers": 2, "worker_type": "thread"}):
        loader = fastload.DataLoader(dataset, batch_size=10, **options)
        results.put([images[0, 0, 0, 0].item() for images, labels in loader])
    try:
        next(iter(fastload.DataLoader(dataset, num_workers=1)))
    except AssertionError as error:  # Python forbids it, as with torch's loader
        results.put(str(error))


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    dataset = fastload.CachedDataset(fastload.ImageFolder("photos"))
    results = context.Queue()
    process = context.Process(target=train, args=(dataset, results), daemon=True)
    process.start()
    assert [results.get(timeout=30) for _ in range(2)] == [[0, 60, 120, 180]] * 2
    assert "daemonic processes" in results.get(timeout=30)
    process.join()
    assert dataset.cache_info().num_cached == 40
