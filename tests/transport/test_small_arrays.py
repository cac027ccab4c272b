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
