"""A cache on disk: decoded once into an LMDB file, opened again by every later run, with or without RAM.

    python examples/lmdb_cache.py [PHOTOS]

Claim: once the file is there no epoch reads the pictures again, and what RAM lacks comes from the file.
"""

import tempfile
from pathlib import Path

import albumentations as A
import torch
from pictures import CountedFolder, photo_folder

import fastload
from fastload import CachedDataset

TRANSFORM = A.Compose([A.RandomCrop(80, 80), A.HorizontalFlip(p=0.5)])


def run_epoch(dataset: CachedDataset) -> list[torch.Tensor]:
    """One epoch in order and always with the same crops; the sum of each batch stands for its pixels."""
    seed = torch.Generator().manual_seed(0)
    with fastload.DataLoader(dataset, batch_size=32, num_workers=2, generator=seed) as loader:
        return [images.sum() for images, _ in loader]


def main() -> None:
    with photo_folder() as folder, tempfile.TemporaryDirectory() as directory:
        photos = CountedFolder(folder, Path(directory) / "decoded")
        file = f"lmdb:{directory}/photos.lmdb"

        # Two processes decode, this one writes. An interrupted build is gone on with by the next run.
        built = CachedDataset(photos, TRANSFORM, cache=file, num_workers=2)
        print(f"built: {built.cache_info().num_cached} pictures, {len(photos.decoded())} read")

        reads = {}
        epochs = {}
        for name, cache in (
            ("built", built),
            ("opened again", CachedDataset(photos, TRANSFORM, cache=file)),
            ("RAM before the file", CachedDataset(photos, TRANSFORM, cache=["ram", file])),
        ):
            before = len(photos.decoded())
            epochs[name] = run_epoch(cache)
            reads[name] = len(photos.decoded()) - before
            print(f"{name}: {reads[name]} pictures read in an epoch; {cache.cache.explain().splitlines()[0]}")

        # What passed through RAM stays there: the next epoch needs neither the file nor the pictures.
        info = cache.cache_info()
        print(f"now in RAM: {info.num_cached} of {info.num_samples} ({info.layout})")

        if any(reads.values()) or info.num_cached != len(photos):
            raise SystemExit(f"pictures were read again: {reads}, {info.num_cached} in RAM")
        if not all(epoch == epochs["built"] for epoch in epochs.values()):
            raise SystemExit("the caches gave different batches")
        print(f"{len(photos)} pictures decoded once, for three ways to read them")


if __name__ == "__main__":
    main()
