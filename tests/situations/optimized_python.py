"""`python -O -X dev -W error` changes nothing: no assertion does work, and nothing is left to be warned of.

$ python -O -X dev -W error optimized_python.py
"""

import fastload


def main():
    with fastload.DataLoader(
        fastload.CachedDataset(fastload.ImageFolder("photos")),
        batch_size=10,
        num_workers=2,
        persistent_workers=True,
    ) as loader:
        for _ in range(2):
            if [images[0, 0, 0, 0].item() for images, labels in loader] != [0, 60, 120, 180]:
                raise SystemExit("other images")
    if len(fastload.CachedDataset(fastload.ImageFolder("photos"), cache="lmdb:photos.lmdb")) != 40:
        raise SystemExit("no cache")


if __name__ == "__main__":
    main()
