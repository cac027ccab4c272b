"""`CachedDataset` over the datasets of clients, as they are: PIL images, bytes, MetaTensors and graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.clients.harness import run

if TYPE_CHECKING:
    from pathlib import Path

COMMON = """
import numpy as np
import fastload


def check(dataset, expected, **options):
    '''Two epochs over a cached dataset give the expected samples, the second from the cache.'''
    for num_workers in (0, 2):
        cached = fastload.CachedDataset(dataset, cache="ram", **options)
        loader = fastload.DataLoader(cached, batch_size=1, num_workers=num_workers, collate_fn=list)
        for epoch in range(2):
            got = [digest(batch[0]) for batch in loader]
            assert got == [digest(sample) for sample in expected], (num_workers, epoch)
        assert cached.cache_info().num_cached == len(dataset), cached.cache_info()
    record("cached", len(dataset))


def refused(dataset, *words):
    try:
        fastload.CachedDataset(dataset, cache="ram")[0]
    except TypeError as error:
        text = str(error) + " ".join(getattr(error, "__notes__", []))
        assert all(word in text for word in words), text
        record("refused", len(words))
    else:
        raise AssertionError("it was not refused")
"""
ROWS = """
import datasets

folder = photos(20, 24, grey=5)
rows = datasets.load_dataset("imagefolder", data_dir=str(folder), split="train")
refused(rows, "PIL", "prepare")


def to_arrays(row):
    return np.asarray(row["image"].convert("RGB")), row["label"]


check(rows, [to_arrays(row) for row in rows], prepare=to_arrays, cache_key="rows")
encoded = rows.cast_column("image", datasets.Image(decode=False))
check(encoded, list(encoded), cache_key="bytes")
arrays = rows.select(range(5)).with_format("numpy")
check(arrays, list(arrays), cache_key="arrays")
"""
TORCHVISION = """
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

folder = photos(20, 24, grey=5)
refused(ImageFolder(folder), "PIL", "prepare")


def to_arrays(sample):
    return np.asarray(sample[0]), sample[1]


images = ImageFolder(folder)
check(images, [to_arrays(sample) for sample in images], prepare=to_arrays, cache_key="pil")
tensors = ImageFolder(folder, transform=v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]))
refused(tensors, "tv_tensors")


def plain(sample):
    return sample[0].as_subclass(torch.Tensor), sample[1]


check(tensors, [plain(sample) for sample in tensors], prepare=plain, cache_key="tensors")
"""
MONAI = """
from monai.data import Dataset, MetaTensor
from monai.transforms import Compose, EnsureChannelFirstd, EnsureTyped, LoadImaged, ScaleIntensityd

keys = ["image", "label"]
paths = sorted(photos(20, 24).glob("a/*.png"))[:4]
files = [{"image": str(path), "label": str(path)} for path in paths]
scans = Dataset(files, Compose([LoadImaged(keys), EnsureChannelFirstd(keys), ScaleIntensityd("image")]))
assert isinstance(scans[0]["image"], MetaTensor)
refused(scans, "MetaTensor")
without_meta = EnsureTyped(keys, track_meta=False)
check(scans, [without_meta(sample) for sample in scans], prepare=without_meta, cache_key="scans")
"""
GRAPHS = """
from torch_geometric.data import Batch, Data

graphs = [
    Data(x=torch.rand(2 + n % 3, 4), edge_index=torch.randint(0, 2, (2, 3 + n)), y=torch.tensor([n]))
    for n in range(12)
]
refused(graphs, "Data", "prepare")


def to_dict(graph):
    return graph.to_dict()


dataset = fastload.CachedDataset(graphs, prepare=to_dict, transform=Data.from_dict, cache="ram")
loader = fastload.DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=Batch.from_data_list)
for _ in range(2):
    got = [digest(batch.to_dict()) for batch in loader]
    assert got == [digest(Batch.from_data_list(graphs[first : first + 4]).to_dict()) for first in (0, 4, 8)]
record("cached", dataset.cache_info().num_cached)
"""


# By script: what it records.
CLIENTS = {
    "rows of datasets": (ROWS, [("refused", 2), ("cached", 12), ("cached", 12), ("cached", 5)]),
    "torchvision": (TORCHVISION, [("refused", 2), ("cached", 12), ("refused", 1), ("cached", 12)]),
    "MONAI": (MONAI, [("refused", 1), ("cached", 4)]),
    "PyG": (GRAPHS, [("refused", 2), ("cached", 12)]),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_samples_that_are_not_arrays(client: str, tmp_path: Path) -> None:
    """Are refused with advice, and cached with the `prepare` that it names; bytes and arrays as they are."""
    script, expected = CLIENTS[client]

    assert run(COMMON + script, tmp_path, "torch").check_end().named() == [expected]
