"""Small arrays, which one call stacks, are collated as torch does it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

import fastload
from tests.kit import datasets

DTYPES = ["uint8", "int64", "float32", "float64", "bool", "uint16", "complex64"]
NO_TENSORS = [">i4", "U3", "M8[s]", "object"]  # torch refuses these


def arrays_like(shape: tuple[int, ...], dtype: str, order: str, count: int) -> list[np.ndarray[Any, Any]]:
    """Some arrays of different values."""
    made = []
    for number in range(count):
        array = (np.arange(np.prod(shape, dtype=int)) % 7 + number).reshape(shape).astype(dtype)
        if order == "F":
            array = np.asfortranarray(array)
        elif order == "reversed" and array.ndim and len(array) > 1:  # torch refuses negative strides
            array = array[::-1]
        elif order == "read-only":
            array.flags.writeable = False
        made.append(array)
    return made


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
orders = st.sampled_from(["C", "C", "C", "F", "reversed", "read-only"])


@pytest.mark.slow
@given(
    st.lists(st.tuples(shapes, st.sampled_from(DTYPES + NO_TENSORS), orders), min_size=1, max_size=2),
    st.sampled_from(["whole", "tuple", "dict"]),
)
@settings(max_examples=150)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_any_arrays_give_torchs_batch_or_torchs_error(
    kinds: list[tuple[tuple[int, ...], str, str]], form: str
) -> None:
    """Values, dtype, strides, and the type of an error, whether samples are alike or not."""
    samples: list[Any] = [array for kind in kinds for array in arrays_like(*kind, count=3)]
    if form != "whole":
        samples = [(array, 3) if form == "tuple" else {"a": array} for array in samples]
    loader = fastload.DataLoader(datasets.Made(samples.__getitem__, len(samples)), len(samples))
    try:
        expected = default_collate(samples)
    except Exception as error:  # noqa: BLE001  # compared below
        with pytest.raises(type(error)):
            next(iter(loader))
        return
    batch = next(iter(loader))

    for got, wanted in zip(_tensors(batch), _tensors(expected), strict=True):
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert got.stride() == wanted.stride()
        assert torch.equal(got, wanted)


def _tensors(batch: Any) -> list[torch.Tensor]:
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list) else [batch]
    return [value for value in values if isinstance(value, torch.Tensor)]


def test_a_sample_that_the_dataset_collates_lies_outside_the_batch() -> None:
    """default_collate within `__getitem__` of a worker gives memory that no later batch changes."""
    kept: list[torch.Tensor] = []

    def collated(index: int) -> torch.Tensor:
        kept.append(default_collate([np.full(4, index), np.full(4, index)]))
        assert all((tensor == number).all() for number, tensor in enumerate(kept))
        return kept[-1]

    batches = list(fastload.DataLoader(datasets.Made(collated, 12), 3, num_workers=1))

    assert [batch[:, 0, 0].tolist() for batch in batches] == np.arange(12).reshape(4, 3).tolist()


def test_channels_last_images_are_written_to_rows() -> None:
    """A batch of small `(C, H, W)` arrays has channels-last strides without another copy."""
    dataset = datasets.Made(lambda index: np.full((3, 8, 8), index, np.uint8), 4)
    loader = fastload.DataLoader(dataset, 4, memory_format=torch.channels_last)

    batch = next(iter(loader))

    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert batch[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
