"""An iterable dataset over several workers, a generator that ends early and one that raises behave as torch's do."""

import gc

import torch.utils.data as tud

import fastload


class Stream(tud.IterableDataset):
    def __init__(self, ends):
        self.ends = ends

    def __iter__(self):
        info = tud.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for number in range(worker, 20, workers):
            if number == 13 and self.ends == "raises":
                raise KeyError("thirteen")
            if worker == 1 and number > 5 and self.ends == "early":
                return
            yield {"number": number}


def read(kind, ends, workers):
    numbers = []
    try:
        for batch in kind(Stream(ends), batch_size=3, num_workers=workers):
            numbers += batch["number"].tolist()
    except KeyError as error:
        numbers.append("thirteen" in str(error))
    gc.collect()  # torch's iterator complains on stderr if a process that was forked meanwhile frees it
    return numbers


for ends in ("late", "early", "raises"):
    for workers in (0, 1, 2):
        assert read(fastload.DataLoader, ends, workers) == read(tud.DataLoader, ends, workers), (
            ends,
            workers,
        )
