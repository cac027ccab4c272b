"""DecodeCache: private memory, nothing that changed meanwhile, no error that the decoder would not raise."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fastload.errors import DecodeMismatchError
from fastload.readers.decode_cache import (
    VERIFY_VARIABLE,
    DecodeCache,
    current,
    inactive,
    verify_share_of_environment,
)
from fastload.readers.identity import Identity, identify_path
from fastload.readers.reasons import FULL, NOT_A_FILE, TOO_LARGE, TOO_NEW, UNSTEADY
from fastload.system.cache_counts import cache_counts
from fastload.system.logs import say_once
from tests.kit.decoding import DictStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
ONE = Identity((b"1",))


def read(cache: DecodeCache, result: Any = PIXELS, identity: Any = ONE, arguments: Any = ()) -> Any:
    """What the cache returns for a decoder that returns copies of a result."""
    decode = partial(np.copy, result, order="K") if type(result) is np.ndarray else lambda: result
    return cache.array("kind", lambda: identity, arguments, "a file", decode)


def _by_torch(array: Any) -> None:
    pixels = torch.from_numpy(array)
    pixels[pixels > 3] = 0


def _by_dlpack(array: Any) -> None:
    torch.from_dlpack(array).zero_()


def _by_address(array: Any) -> None:
    ctypes.memset(array.ctypes.data, 0, array.nbytes)


def _by_base(array: Any) -> None:
    while array is not None:
        array[...] = 0
        array = array.base


WRITERS = [_by_torch, _by_dlpack, _by_address, _by_base, lambda array: array.sort(axis=0)]


@pytest.mark.parametrize("write", WRITERS, ids=["torch", "dlpack", "address", "base", "in place"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_writes_never_reach_the_store(
    cache: DecodeCache, store: DictStore, write: Callable[[Any], None], order: Any
) -> None:
    """Whatever writes to a result, stored or found, changes no memory of the store."""
    pixels = np.array(PIXELS[::-1], order=order)
    write(read(cache, pixels))
    before = store.checksum()
    for _ in range(3):
        result = read(cache, pixels)
        assert np.array_equal(result, pixels)
        write(result)
        assert not np.array_equal(result, pixels)
    assert store.checksum() == before


@pytest.mark.parametrize("reason", [NOT_A_FILE, TOO_LARGE, TOO_NEW])
def test_what_has_no_identity_is_decoded(cache: DecodeCache, store: DictStore, reason: str) -> None:
    """The reason why a file has no identity is counted."""
    cache_counts.take_reasons()
    assert np.array_equal(read(cache, identity=reason), PIXELS)
    assert cache_counts.take_reasons() == {reason: 1}
    assert not store.values


def test_a_full_store_is_no_error(settled: None, counts: Any) -> None:
    """Files that do not fit are decoded each time, and counted as such."""
    cache = DecodeCache(DictStore(is_full=True), verify_share=1)
    cache_counts.take_reasons()
    for _ in range(2):
        assert np.array_equal(read(cache), PIXELS)
    assert cache_counts.take_reasons() == {FULL: 2}
    assert counts() == (0, 2)


def _switch(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("other"))


def _rewrite(path: Path) -> None:
    target = path.resolve()
    times = target.stat()
    target.write_bytes(b"others")
    os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))


CHANGES = pytest.mark.parametrize(
    "change", [_switch, _rewrite, os.unlink], ids=["switched", "rewritten", "deleted"]
)


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """A link to one of two files."""
    (tmp_path / "one").write_bytes(b"things")
    (tmp_path / "other").write_bytes(b"others")
    link = tmp_path / "link"
    link.symlink_to("one")
    return link


@CHANGES
def test_a_file_that_changes_while_it_is_decoded_is_not_stored(
    cache: DecodeCache, store: DictStore, tmp_path: Path, link: Path, change: Callable[[Path], None]
) -> None:
    """A link that is switched, or a file that is rewritten with its old time, between stat and open."""

    def decode() -> Any:
        before = (tmp_path / "one").stat().st_ctime_ns
        while (tmp_path / "one").exists() and (tmp_path / "one").stat().st_ctime_ns == before:
            change(link)  # again, until the clock of the file system has ticked
            if not link.exists() or link.resolve() != tmp_path / "one":
                break
        return np.frombuffer(b"others", np.uint8).copy()

    result = cache.array("kind", partial(identify_path, link), (), link, decode)
    assert result.tobytes() == b"others"
    assert not store.values


@CHANGES
def test_a_file_that_changes_while_it_is_verified_is_no_mismatch(
    cache: DecodeCache, store: DictStore, link: Path, change: Callable[[Path], None]
) -> None:
    """The new content is returned, as without a cache, and what is stored of the old one stays."""
    identify = partial(identify_path, link)

    def read_as(content: bytes, *, changes: bool = False) -> Any:
        def decode() -> Any:
            identity = identify()
            while changes and identify() == identity:  # until the clock has ticked
                change(link)
            return np.frombuffer(content, np.uint8).copy()

        return cache.array("kind", identify, (), link, decode).tobytes()

    assert read_as(b"things") == b"things"
    before = store.checksum()
    assert read_as(b"others", changes=True) == b"others"
    assert store.checksum() == before


def test_verification_finds_a_difference(settled: None) -> None:
    """A hit that differs from what its decoder returns now raises an error with the name of the file."""
    cache = DecodeCache(DictStore(), verify_share=1)
    read(cache)
    for different in (PIXELS + 1, PIXELS.astype(np.int8), PIXELS[:1], np.asfortranarray(PIXELS), None):
        with pytest.raises(DecodeMismatchError, match="a file"):
            read(cache, different)


def test_a_share_of_the_hits_is_verified(settled: None) -> None:
    """With a share of a quarter, every fourth hit is decoded again, and no random number is drawn."""
    cache, num_decodes = DecodeCache(DictStore(), verify_share=0.25), [0]

    def decode() -> Any:
        num_decodes[0] += 1
        return PIXELS.copy()

    state = random.getstate()
    decodes = []
    for _ in range(9):
        cache.array("kind", lambda: ONE, (), None, decode)
        decodes.append(num_decodes[0])
    assert decodes == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert random.getstate() == state


@pytest.mark.parametrize(("text", "share"), [("", 0.01), ("0", 0), ("1", 1), ("0.5", 0.5)])
def test_the_share_is_in_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, share: float) -> None:
    """FASTLOAD_VERIFY is a number from 0 to 1."""
    monkeypatch.setenv(VERIFY_VARIABLE, text)
    assert verify_share_of_environment() == share


@pytest.mark.parametrize("text", ["2", "-1", "nan", "often"])
def test_other_shares_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Anything else in FASTLOAD_VERIFY is an error that says what to set."""
    monkeypatch.setenv(VERIFY_VARIABLE, text)
    with pytest.raises(ValueError, match="FASTLOAD_VERIFY"):
        verify_share_of_environment()


def test_a_cache_is_active_in_one_thread(cache: DecodeCache) -> None:
    """Other threads, also those that the reading thread starts, have no cache."""
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(current()))
    thread.start()
    thread.join()
    assert seen == [None]
    assert current() is cache


def test_caches_nest(cache: DecodeCache) -> None:
    """The inner cache is active, then the outer one again, after an error, too."""
    inner = DecodeCache(DictStore(), verify_share=1)
    with contextlib.suppress(KeyError), inner.active():
        assert current() is inner
        with inactive():
            assert current() is None
        assert current() is inner
        raise KeyError
    assert current() is cache


def test_a_decoder_that_does_not_repeat_itself_is_not_remembered(
    settled: None, counts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """From then on each access decodes, in each process that has the store; one warning names the file."""
    store = DictStore()
    caches = [DecodeCache(store, verify_share=0.5) for _ in range(2)]
    say_once.cache_clear()

    def access(cache: DecodeCache, number: int) -> int:
        return int(read(cache, np.full(3, number))[0])

    assert [access(caches[0], number) for number in range(6)] == [0, 0, 2, 3, 4, 5]
    assert [access(caches[1], number) for number in range(6)] == [0, 1, 2, 3, 4, 5]
    assert [access(DecodeCache(store, verify_share=0), number) for number in range(2)] == [0, 1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a file" in caplog.text
    assert cache_counts.reasons[UNSTEADY] > 0


def test_what_a_full_store_holds_wrongly_is_decoded_from_then_on(settled: None) -> None:
    """As a finished file, it cannot be told; this process and its forks know it."""
    store = DictStore()
    read(DecodeCache(store, verify_share=0), np.zeros(3))
    store.is_full = True
    cache = DecodeCache(store, verify_share=0.5)
    assert [int(read(cache, np.full(3, number))[0]) for number in range(5)] == [0, 1, 2, 3, 4]
    assert len(store.values) == 1


def test_nothing_is_imported_while_files_are_read(settled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork would hang that needs a module that a thread was importing."""
    cache = DecodeCache(DictStore(), verify_share=1)
    with monkeypatch.context() as patch:
        patch.setattr("builtins.__import__", None)
        result = read(cache, np.zeros(3))
    assert result.tolist() == [0, 0, 0]
