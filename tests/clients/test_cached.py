"""`CachedDataset` over the datasets of clients, as they are: tv_tensors, MetaTensors and graphs."""

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
# PIL images and rows are in tests/cache/test_foreign_samples.py.
TORCHVISION = """
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

folder, steps = photos(20, 24, grey=5), [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
refused(ImageFolder(folder, transform=v2.Compose(steps)), "as_subclass")
images = ImageFolder(folder, transform=v2.Compose([*steps, v2.ToPureTensor()]))
check(images, list(images))
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
check(scans, [without_meta(sample) for sample in scans], pre_transform=without_meta, cache_key="scans")
"""
GRAPHS = """
from torch_geometric.data import Batch, Data

graphs = [
    Data(x=torch.rand(2 + n % 3, 4), edge_index=torch.randint(0, 2, (2, 3 + n)), y=torch.tensor([n]))
    for n in range(12)
]
refused(graphs, "Data", "pre_transform")


def to_dict(graph):
    return graph.to_dict()


dataset = fastload.CachedDataset(graphs, pre_transform=to_dict, transform=Data.from_dict, cache="ram")
loader = fastload.DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=Batch.from_data_list)
for _ in range(2):
    got = [digest(batch.to_dict()) for batch in loader]
    assert got == [digest(Batch.from_data_list(graphs[first : first + 4]).to_dict()) for first in (0, 4, 8)]
record("cached", dataset.cache_info().num_cached)
"""


# By script: what it records.
CLIENTS = {
    "torchvision": (TORCHVISION, [("refused", 1), ("cached", 12)]),
    "MONAI": (MONAI, [("refused", 1), ("cached", 4)]),
    "PyG": (GRAPHS, [("refused", 2), ("cached", 12)]),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_samples_that_are_not_arrays(client: str, tmp_path: Path) -> None:
    """Are cached as they are, or refused with advice, and cached with the `pre_transform` that it names."""
    script, expected = CLIENTS[client]

    assert run(COMMON + script, tmp_path, "torch").check().named() == [expected]
