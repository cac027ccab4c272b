"""Whether batches are the same, and an epoch of torch's loader beside one of ours."""

from __future__ import annotations

import random
import warnings
from multiprocessing import resource_sharer
from typing import Any

import numpy as np
import torch
import torch.utils.data as tud
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import fastload


def assert_same_batches(theirs: Any, ours: Any) -> None:
    """Equal in value and in kind, down to dtypes and strides; errors are compared by their texts."""
    _assert_same(theirs, ours, in_memory=True)


def assert_same_samples(one: Any, other: Any) -> None:
    """Equal in type, dtype, shape and value, through all nests; NaN equals NaN."""
    _assert_same(one, other, in_memory=False)


def _assert_same(one: Any, other: Any, *, in_memory: bool) -> None:
    """Compare two nests, with the strides of tensors and arrays if `in_memory`."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            _assert_same(one[key], other[key], in_memory=in_memory)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            _assert_same(left, right, in_memory=in_memory)
    elif isinstance(one, torch.Tensor):
        assert type(one) is torch.Tensor or vars(one) == vars(other)
        _assert_same_tensors(one, other, in_memory=in_memory)
    elif isinstance(one, (np.ndarray, np.generic)):
        _assert_same_arrays(one, other, in_memory=in_memory)
    elif isinstance(one, AssertionError) and not str(one):
        pass  # torch 2.6 asserts without a word; ours has the words of later releases
    elif isinstance(one, BaseException):
        # Tracebacks name files of either loader; what comes before them is the error's own text.
        assert str(one).split("\nOriginal Traceback")[0] == str(other).split("\nOriginal Traceback")[0]
        assert str(one).rstrip().rsplit("\n", 1)[-1] == str(other).rstrip().rsplit("\n", 1)[-1]
    else:
        assert one == other or (one != one and other != other)


def _assert_same_tensors(one: torch.Tensor, other: torch.Tensor, *, in_memory: bool) -> None:
    assert (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
    assert one.requires_grad == other.requires_grad
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if in_memory:
        assert one.stride() == other.stride()
    assert _bytes_of(one) == _bytes_of(other)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    alone = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return torch.empty(0, dtype=torch.uint8).set_(alone.untyped_storage()).numpy().tobytes()


def _assert_same_arrays(one: Any, other: Any, *, in_memory: bool) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    if in_memory and isinstance(one, np.ndarray):
        assert one.strides == other.strides
        assert other.flags.writeable
    if one.dtype.hasobject:
        np.testing.assert_array_equal(one, other)
    else:
        assert one.tobytes() == other.tobytes()


def read_epoch(loader: Any) -> list[Any]:
    """All batches, with errors where they came; iteration goes on after them, as it does in torch."""
    got: list[Any] = []
    try:
        iterator = iter(loader)
    except Exception as error:  # noqa: BLE001  # what iter() refuses is compared too
        return [error.with_traceback(None)]
    while len(got) < 200:
        try:
            got.append(next(iterator))
        except StopIteration:
            break
        except Exception as error:  # noqa: BLE001  # errors are compared too
            got.append(error.with_traceback(None))
    if not getattr(loader, "persistent_workers", False):
        stop_workers(iterator)
    return got


def stop_workers(iterator: Any) -> None:
    """End the workers of an iterator of torch's, for which the garbage collector would wait five seconds.

    torch 2.9 and earlier do not join them then, so that two pipes of each worker stay open.
    """
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        iterator._shutdown_workers()


def _run(loader_class: Any, make: Any, epochs: int) -> tuple[list[Any], list[Any]]:
    """Some epochs from known seeds: what came, and the generators' states afterwards."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # arrays that are not writable, numbers of workers, lengths
        try:
            loader, generator = make(loader_class)
        except Exception as error:  # noqa: BLE001  # a refusal is compared too
            return [error.with_traceback(None)], []
        got = [read_epoch(loader) for _ in range(epochs)]
    states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()]
    if generator is not None:
        states.append(generator.get_state())
    loader._iterator = None
    resource_sharer.stop(timeout=5)  # the thread through which torch's loader sends tensors to its workers
    return got, states


def compare_with_torch(make: Any, epochs: int = 2) -> list[Any]:
    """Read the same epochs through both loaders, and compare batches, errors and the generators' states.

    `make` takes a class of loader, and gives a loader and the generator that it draws from, or None.
    """
    theirs, their_states = _run(tud.DataLoader, make, epochs)
    ours, our_states = _run(fastload.DataLoader, make, epochs)
    assert_same_batches(theirs, ours)
    assert_same_batches(their_states, our_states)
    return ours
