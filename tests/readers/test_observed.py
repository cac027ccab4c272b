"""Functions of libraries that other code has wrapped by functools.wraps: counters, timers, tracers."""

from __future__ import annotations

import functools
import random
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest
import tifffile
import torch

from fastload.readers import npz, opencv
from fastload.readers.decode_cache import DecodeCache
from fastload.readers.observed import Observed
from fastload.readers.patch import Patch, innermost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.kit.decoding import DictStore

REAL: Any = object.__getattribute__(cv2.imread, "original")
calls: list[str] = []
OFFSET = 1


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """What profilers and tests do."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(str(args))
        return function(*args, **kwargs)

    return call


@functools.wraps(REAL)
def brighter(*args: Any) -> Any:
    """Changes the result, by a constant of this module."""
    return REAL(*args) + np.uint8(OFFSET)


def noisy(draw: Callable[[], float]) -> Callable[..., Any]:
    """Changes the result at random."""
    return functools.wraps(REAL)(lambda *args: REAL(*args) + np.uint8(1 + 9 * draw()))


@pytest.fixture
def path(tmp_path: Path) -> str:
    """An image."""
    path = str(tmp_path / "image.png")
    cv2.imwrite(path, np.arange(60, dtype=np.uint8).reshape(4, 5, 3))
    return path


@pytest.fixture
def active(store: DictStore, settled: None) -> Iterator[DictStore]:
    """A store whose hits are not decoded again."""
    calls.clear()
    with DecodeCache(store, verify_share=0).active():
        yield store


def met(function: Any) -> Any:
    """What takes the place of `cv2.imread` if this is there when it is met."""
    module = ModuleType("cv2")
    vars(module)["imread"] = function
    patch = Patch(module, "imread", opencv._imread, Observed)
    return patch.wrapper if patch.is_genuine else function


def test_a_counter_counts_decodes(active: DictStore, path: str) -> None:
    """A wrapper of a wrapper, too; both run when the file is decoded, and not when its pixels are found."""
    imread = met(counted(counted(REAL)))
    for _ in range(3):
        assert np.array_equal(imread(path), REAL(path))
    assert len(calls) == 2
    assert len(active.values) == 1


def test_a_wrapper_shares_nothing_with_others(
    active: DictStore, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs with and without it get what they would decode, also after an edit of what it names."""
    expected = REAL(path)
    for _ in range(2):
        assert np.array_equal(met(REAL)(path), expected)
        assert np.array_equal(met(brighter)(path), expected + 1)
        with monkeypatch.context() as edit:
            edit.setitem(globals(), "OFFSET", 7)
            assert np.array_equal(met(brighter)(path), expected + 7)
    assert len(active.values) == 3


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.rand(()).item()])
def test_a_wrapper_that_draws_is_not_remembered(
    draw: Callable[[], float], active: DictStore, path: str
) -> None:
    """Each access has numbers of its own."""
    imread = met(noisy(draw))
    assert len({imread(path).tobytes() for _ in range(40)}) > 1
    assert not active.values


@pytest.mark.parametrize("replacement", [lambda *args: REAL(*args), functools.wraps(calls)(lambda: None)])
def test_other_replacements_are_left_alone(replacement: Any) -> None:
    """Without `__wrapped__`, or with one that is no function of the library, it is the user's own."""
    assert met(replacement) is replacement


def test_a_wrapper_that_cannot_be_described_is_left_alone() -> None:
    """Such as one that uses a value whose class no description can name."""

    class Odd:
        __slots__ = ()

    wrapper = counted(REAL)
    wrapper.__defaults__ = (Odd(),)
    assert met(wrapper) is not wrapper  # an object counts by its class
    wrapper.__defaults__ = (10**5000,)
    assert met(wrapper) is wrapper


def test_a_counted_method_is_bound(
    active: DictStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The members of archives are read by a method."""
    np.savez_compressed(tmp_path / "arrays.npz", a=np.arange(50))
    owner = np.lib.npyio.NpzFile
    monkeypatch.setattr(owner, "__getitem__", counted(innermost(vars(owner)["__getitem__"])))
    patch = Patch(owner, "__getitem__", npz._getitem, Observed)
    patch.put()
    try:
        for _ in range(3):
            with np.load(tmp_path / "arrays.npz") as archive:
                assert np.array_equal(archive["a"], np.arange(50))
    finally:
        patch.take_away()
    assert len(calls) == 1
    assert len(active.values) == 1


def test_a_tiff_is_found_without_parsing_its_pages(
    cache: DecodeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tifffile.imread` of a path opens no file whose pixels are remembered."""
    path = tmp_path / "bands.tif"
    pixels = np.arange(720, dtype=np.uint16).reshape(5, 12, 12)
    tifffile.imwrite(path, pixels, compression="zlib")
    monkeypatch.setattr(cache, "_verify_share", 0)
    assert np.array_equal(tifffile.imread(path), pixels)
    monkeypatch.delattr(tifffile.TiffFile, "_fromfile", raising=False)
    monkeypatch.setattr("tifffile.tifffile.FileHandle.open", lambda *_: pytest.fail("it was opened"))
    assert np.array_equal(tifffile.imread(path), pixels)
