"""A stream: an IterableDataset that shares its samples out between the workers by get_worker_info().

    python examples/iterable.py [FOLDER]

FOLDER holds a folder of images for each class.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import albumentations as A
import numpy as np
import torch
from pictures import SIZE, photo_folder, small_network
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

import fastload


class Stream(IterableDataset):
    """Reads files one after the other, as one would read shards or a socket; it has no index and no length.

    A cache finds a sample by its index, so a stream cannot be cached. Where your samples have an index,
    a map-style dataset in a `fastload.CachedDataset` is the better choice.
    """

    def __init__(self, folder: Path) -> None:
        self.photos = fastload.ImageFolder(folder)
        self.transform = A.Compose([A.RandomCrop(80, 80), A.HorizontalFlip(p=0.5)])

    def __iter__(self) -> Iterator[tuple[np.ndarray, int, int]]:
        # Each worker has a copy of this dataset. Without the next lines each would give every image.
        worker = get_worker_info()  # None in the main process
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in range(first, len(self.photos), step):
            path, label = self.photos.samples[number]
            image = fastload.read_image(path, size=SIZE)
            yield self.transform(image=image)["image"], label, number


def train(stream: Stream) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = fastload.DataLoader(stream, batch_size=5, num_workers=2, memory_format=torch.channels_last)
    model = small_network(len(stream.photos.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for images, labels, _ in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device) / 255), labels.to(device))
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


# --- The template ends here. The rest runs it, and counts the images with 0, 1 and 2 workers. ---------------


def main() -> None:
    with photo_folder() as folder:
        stream = Stream(folder)
        train(stream)
        total = len(stream.photos)
        for num_workers in (0, 1, 2):
            seen: Counter[int] = Counter()
            short = 0
            for _, _, numbers in fastload.DataLoader(stream, batch_size=5, num_workers=num_workers):
                seen.update(numbers.tolist())
                short += len(numbers) < 5
            # Each worker ends with the rest of its share, so more than one batch can be short.
            once = sum(count == 1 for count in seen.values())
            print(f"{num_workers} workers: {once} of {total} images came once, short batches: {short}")


if __name__ == "__main__":
    main()
