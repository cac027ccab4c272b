"""A cache in RAM: one copy of the decoded images for all workers, and for your other processes too.

    python examples/ram_cache.py [FOLDER]

FOLDER holds a folder of images for each class.
"""

import subprocess
import sys
from pathlib import Path

import albumentations as A
import torch
from pictures import SIZE, photo_folder, small_network
from torch import nn

import fastload


def open_dataset(folder: Path) -> fastload.CachedDataset:
    """Every process that calls this with the same folder finds the same cache: the files identify it."""
    photos = fastload.ImageFolder(folder, size=SIZE)  # the deterministic part: it is cached
    transform = A.Compose([A.RandomCrop(80, 80), A.HorizontalFlip(p=0.5)])  # the random part: it is not
    return fastload.CachedDataset(photos, transform=transform, cache="ram")


def train(folder: Path) -> fastload.CachedDataset:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dataset = open_dataset(folder)
    info = dataset.fill(num_workers=2)  # optional: without it, the first epoch fills the cache as it reads
    print(f"{info.num_cached} of {info.num_samples} images take {info.nbytes / 1e6:.1f} MB")
    loader = fastload.DataLoader(
        dataset, batch_size=8, shuffle=True, num_workers=2, memory_format=torch.channels_last
    )
    model = small_network(len(dataset.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for images, labels in loader:
            optimizer.zero_grad()
            logits = model(images.to(device) / 255)
            nn.functional.cross_entropy(logits, labels.to(device)).backward()
            optimizer.step()
    return dataset


# --- The template ends here. The rest runs it, and looks at the cache from a second process. ----------------


def main() -> None:
    if sys.argv[2:] == ["second"]:
        dataset = open_dataset(Path(sys.argv[1]))
        print(dataset.cache.explain())
        info = dataset.cache_info()
        print(f"the second process found {info.num_cached} of {info.num_samples} images in memory")
        return
    with photo_folder() as folder:
        dataset = train(folder)
        print(dataset.cache.explain(), flush=True)
        # The memory is freed when the last process that uses it ends, so the first one must still run.
        subprocess.run([sys.executable, __file__, str(folder), "second"], check=True)


if __name__ == "__main__":
    main()
