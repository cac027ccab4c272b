"""An iterable dataset over several workers, a generator that ends early and one that raises behave as torch's do."""

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
    return [batch["number"].tolist() for batch in kind(Stream(ends), batch_size=3, num_workers=workers)]


for ends in ("late", "early"):
    for workers in (0, 1, 2):
        assert read(fastload.DataLoader, ends, workers) == read(tud.DataLoader, ends, workers), (
            ends,
            workers,
        )
for workers in (0, 1, 2):
    numbers = []
    try:
        for batch in fastload.DataLoader(Stream("raises"), batch_size=1, num_workers=workers):
            numbers += batch["number"].tolist()
    except KeyError as error:
        assert "thirteen" in str(error)
    assert numbers == list(range(13))
