"""Pipelines that a config module holds draw anew for each worker, and the same for any number of them."""

import pathlib
import sys

import torch

import fastload

pathlib.Path("config.py").write_text("""
import albumentations as A
TRAIN = A.Compose([A.RandomCrop(24, 24), A.RandomBrightnessContrast(p=1)])
LIGHT = {"val": A.Compose([A.CenterCrop(24, 24)])}
""")
sys.path.insert(0, "")
import config  # noqa: E402


class Photos:
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return config.LIGHT["val"](image=config.TRAIN(image=self.folder[0][0] + 99)["image"])["image"]


def epoch(num_workers, seeding):
    generator = torch.Generator().manual_seed(1)
    options = {"num_workers": num_workers, "seeding": seeding, "generator": generator}
    return torch.cat(
        list(fastload.DataLoader(Photos(fastload.ImageFolder("photos")), batch_size=10, **options))
    )


assert torch.equal(epoch(0, "sample"), epoch(2, "sample"))
first, second = epoch(2, "worker")[:20].split(10)
assert not torch.equal(first, second)
