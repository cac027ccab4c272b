"""namedtuples, dataclasses, storages, enums and custom pin_memory batches come through workers as with torch's loader."""

import dataclasses
import enum
import typing

import numpy as np
import torch
import torch.utils.data as tud

import fastload


class Kind(enum.IntEnum):
    CAT = 1


class Pair(typing.NamedTuple):
    image: torch.Tensor
    kind: int


@dataclasses.dataclass
class Record:
    values: np.ndarray
    name: str


class Samples:
    def __init__(self, form):
        self.form = form

    def __len__(self):
        return 6

    def __getitem__(self, index):
        storage = torch.full((9,), index, dtype=torch.uint8).untyped_storage()
        forms = {"pair": Pair(torch.ones(99) * index, Kind.CAT), "record": Record(np.ones(9) * index, "a")}
        return (forms | {"storage": (storage, np.datetime64("2024-01-01") + index)})[self.form]


for form, collate in (("pair", None), ("record", list), ("storage", list)):
    options = {"batch_size": 3, "collate_fn": collate, "num_workers": 1}
    results = [str(list(kind(Samples(form), **options))) for kind in (fastload.DataLoader, tud.DataLoader)]
    assert results[0] == results[1]
