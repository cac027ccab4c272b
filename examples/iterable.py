"""A stream: an IterableDataset that shares its pictures out between the workers by get_worker_info().

    python examples/iterable.py [PHOTOS]

Claim: every picture comes exactly once an epoch, with any number of workers.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import albumentations as A
import numpy as np
from pictures import SIZE, photo_folder
from torch.utils.data import IterableDataset, get_worker_info

import fastload


class Stream(IterableDataset):
    """Reads files one after the other, as one would read shards or a socket; has no index and no length.

    A stream cannot be cached: a cache finds a sample by its index. Where there is one, a map-style dataset
    behind `fastload.CachedDataset` is the better choice.
    """

    def __init__(self, folder: Path) -> None:
        self.files = fastload.ImageFolder(folder).samples
        self.transform = A.Compose([A.RandomCrop(80, 80), A.HorizontalFlip(p=0.5)])

    def __iter__(self) -> Iterator[tuple[np.ndarray, int, int]]:
        # Each worker has a copy of this dataset. Without the next lines each would give every picture.
        worker = get_worker_info()  # None in the main process
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in range(first, len(self.files), step):
            path, label = self.files[number]
            image = fastload.read_image(path, size=SIZE)
            yield self.transform(image=image)["image"], label, number


def main() -> None:
    with photo_folder() as folder:
        stream = Stream(folder)
        for num_workers in (0, 1, 2):
            with fastload.DataLoader(stream, batch_size=5, num_workers=num_workers) as loader:
                seen: Counter[int] = Counter()
                batches = []
                for images, _, numbers in loader:
                    seen.update(numbers.tolist())
                    batches.append(len(images))
            # Each worker ends with what is left of its share, so more than one batch may be short.
            short = sum(length < 5 for length in batches)
            print(f"{num_workers} workers: {len(batches)} batches, {short} of them short")

            if seen != Counter(range(len(stream.files))):
                raise SystemExit(f"{num_workers} workers: some of {len(stream.files)} came twice or never")
        print(f"{len(stream.files)} pictures came once each, with 0, 1 and 2 workers")


if __name__ == "__main__":
    main()
