"""Damaged and forged LMDB files: a clear error or the written samples, never a wrong one, never a crash.

Where false content with right checksums could crash its reader, a child process reads it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastload
from fastload.cache.build import build_lmdb
from fastload.cache.finished import LMDBCache
from fastload.cache.lmdb_file import meta_value
from fastload.cache.store import index_key
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError
from tests.cache.build_zoo import BrokenImages
from tests.cache.zoo import Images, Made
from tests.kit.batches import assert_same_samples
from tests.kit.faults import leave_address_space
from tests.kit.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Draw = Callable[[st.SearchStrategy[Any]], Any]

Caches: TypeAlias = "dict[str, tuple[Path, list[Any]]]"  # and the samples that were written
PAGE_BYTES = 4096
SPARE_BYTES = 1 << 30  # that a child may take beyond what it has when it starts
SOURCES: dict[str, tuple[Images, dict[str, Any]]] = {
    "big": (Images(20), {}),  # each in pages of its own
    "small": (Made(lambda index: (np.full(7, index % 251, np.uint8), index), 600), {}),  # in LMDB's tree
    "left out": (
        BrokenImages(30, bad=[3, 4, 10, 28]),
        {"on_error": "skip", "max_errors": 1.0},
    ),
}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Caches:
    """Finished caches, and the samples that were written."""
    directory, found = tmp_path_factory.mktemp("caches"), {}
    for name, (dataset, options) in SOURCES.items():
        build_lmdb(dataset, directory / name, num_workers=0, **options).close()
        bad = getattr(dataset, "bad", [])
        stored = [None if index in bad else dataset.sample(index) for index in range(len(dataset))]
        found[name] = directory / name, stored
    return found


@pytest.fixture
def path(caches: Caches, tmp_path: Path) -> Path:
    """A file of 20 images."""
    return Path(shutil.copy(caches["big"][0], tmp_path / "cache"))


@contextlib.contextmanager
def opened_by_lmdb(path: Path) -> Iterator[Any]:
    """A transaction of LMDB itself that changes a file."""
    with (
        lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 30) as environment,
        environment.begin(write=True) as transaction,
    ):
        yield transaction


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what a file says of itself; its checksum is right."""
    with opened_by_lmdb(path) as transaction:
        meta = json.loads(transaction.get(b"meta").splitlines()[0])
        text = change(meta)
        value = meta_value(text if isinstance(text, dict) else meta)
        transaction.put(b"meta", text if isinstance(text, bytes) else value)


# --- descriptions ----------------------------------------------------------------------------------------

HUGE = 10**30
_IS_LEAF = b"\x02\0"  # flags of a page
LIES: dict[str, dict[str, Any]] = {
    "num_samples": {
        "huge": HUGE, "more": 21, "fewer": 19, "none": 0, "negative": -1, "text": "x", "float": 20.0,
        "bool": True, "billions": 4 * 10**9,
    },
    "left_out": {"number": 5, "one": [5], "outside": [20], "texts": ["a"], "twice": [3, 3], "dict": {}},
    "parts": {"list": [], "numbers": {"a": 1}, "text": "x"},
    "classes": {"number": 5, "numbers": [1], "dict": {}},
}  # fmt: skip
CHANGES: dict[str, list[Callable[[Any], Any]]] = {
    name: [lambda meta, name=name, lie=lie: meta["samples"].update({name: lie}) for lie in lies.values()]
    for name, lies in LIES.items()
} | {
    "a field too few": [lambda meta: meta["samples"].pop("parts"), lambda meta: meta.pop("samples")],
    "one too many": [lambda meta: meta["samples"].update(plans=1)],
    "another file": [lambda meta: meta.update(uuid="x"), lambda meta: meta.update(uuid=5)],
    "a time": [lambda meta, time=time: meta.update(created_s=time) for time in ("x", 1e300, None, [])],
    "no description": [
        lambda _, text=text: text
        for text in (
            b"[" * 200_000,
            b"[1]",
            b"null",
            b"{zz",
            b'"\xff\xfe"',
            b"{}",
            b'{"version": 5}',
            b"1" * 9999,
        )
    ],
    "a wrong checksum": [lambda meta: meta_value(meta).replace(b"samples", b"semples")],
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_false_description_is_refused(name: str, path: Path) -> None:
    """A field of another type, or outside what the file can hold, raises with the path."""
    good = path.read_bytes()
    for change in CHANGES[name]:
        path.write_bytes(good)
        forge(path, change)
        with pytest.raises((CacheCorruptError, CacheMismatchError), match=f"^{path}"):
            LMDBCache(path)
    for version in (1, 0, -1, HUGE):  # not damaged, whatever else it says
        path.write_bytes(good)
        forge(path, lambda meta, version=version: meta.update(version=version))
        with pytest.raises(CacheMismatchError, match=f"{path} is a cache of format"):
            LMDBCache(path)


@contextlib.contextmanager
def little_memory(nbytes: int) -> Iterator[None]:
    """What is done here takes no more."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def test_a_lie_takes_no_memory(path: Path) -> None:
    """Memory is never taken for what a file only states."""
    content = path.read_bytes()
    for number in (4 * 10**9, 10**12):
        path.write_bytes(content)
        forge(path, lambda meta, number=number: meta["samples"].update(num_samples=number))
        with little_memory(1 << 20), pytest.raises(CacheCorruptError):
            LMDBCache(path)


@pytest.mark.parametrize(
    ("name", "byte", "bit"),
    [
        ("big", 138, 2),  # the number of pages: more than the address space has room for
        ("small", 23, 7),  # of leaves, a record's place in the page: behind the end of the file
    ],
)
def test_a_flipped_bit_in_the_tree_is_refused(
    name: str, byte: int, bit: int, caches: Caches, readers: dict[str, Reader], tmp_path: Path
) -> None:
    """What would lead LMDB out of the file, or out of memory, is found before LMDB reads it."""
    content = bytearray(caches[name][0].read_bytes())
    pages = range(0, len(content), PAGE_BYTES)
    leaves = [at for at in pages if content[at + 10 : at + 12] == _IS_LEAF]  # also of earlier commits
    for at in leaves if name == "small" else [0, PAGE_BYTES]:  # commits take turns in the first two
        content[at + byte] ^= 1 << bit
    (tmp_path / "mutated").write_bytes(content)
    assert readers[name].read(tmp_path / "mutated") == "refused"


def test_a_file_that_this_process_cannot_read_raises(path: Path) -> None:
    """A file that is open through LMDB itself raises with the path, and can be read afterwards."""
    with (
        lmdb.open(str(path), subdir=False, lock=False, readonly=True),
        pytest.raises(CacheError, match=f"cannot read the cache {path}: it is open in this process"),
    ):
        LMDBCache(path)
    assert_same_samples(LMDBCache(path).get(0), Images(20).sample(0))


# --- records ---------------------------------------------------------------------------------------------


class Reader:
    """A child process that opens caches and compares all samples: what ends it ends no test run."""

    def __init__(self, expected: list[Any]) -> None:
        self._expected = expected
        self._start()

    def _start(self) -> None:
        self._job = Job(limited, self._expected)
        self._job.answer()

    def read(self, path: Path) -> str:
        """`"right"`, `"refused"`, or `"damaged"` if samples raised; AssertionError for anything else."""
        try:
            answer: str = self._job.ask(read_all, str(path))
        except EOFError:
            answer = "the child ended, or raised what it has printed"
            self.close()
            self._start()  # hypothesis goes on, to find a simpler case
        assert answer in ("right", "refused", "damaged"), answer
        return answer

    def close(self) -> None:
        self._job.end()


def limited(expected: list[Any]) -> tuple[list[Any], None]:
    """Limits the memory of a child."""
    leave_address_space(SPARE_BYTES)
    return expected, None


def read_all(expected: list[Any], path: str) -> str:
    """What comes of reading a file in a child."""
    try:
        cache = LMDBCache(path)
    except (CacheCorruptError, CacheMismatchError) as error:
        return if_named(path, error, "refused")
    answers = {"right"}
    for start in range(0, len(expected), 5):
        indices = np.arange(start, min(start + 5, len(expected)))
        try:
            batch = cache.gather(indices, np.empty)
        except CacheCorruptError as error:
            answers.add(if_named(path, error, "damaged"))
            continue
        if batch is not None:
            assert_same_samples(batch[0].numpy(), np.stack([expected[index][0] for index in indices]))
            assert batch[1].tolist() == indices.tolist()
    for index, sample in enumerate(expected):
        try:
            assert_same_samples(cache.get(index), sample)
        except CacheCorruptError as error:
            answers.add(if_named(path, error, "damaged"))
    assert cache.num_samples == len(expected)
    cache.close()
    return max(answers, key=("right", "damaged", "an error that does not name the file").index)


def if_named(path: str, error: Exception, answer: str) -> str:
    return answer if path in str(error) else "an error that does not name the file"


@pytest.fixture(scope="module")
def readers(caches: Caches) -> Iterator[dict[str, Reader]]:
    """A child for each cache, which reads its copies."""
    found = {name: Reader(expected) for name, (_, expected) in caches.items()}
    yield found
    for reader in found.values():
        reader.close()


def test_records_at_each_other_s_place_raise(path: Path) -> None:
    """A record in the place of another raises when it is read, with the path, the index and what to do."""
    with opened_by_lmdb(path) as transaction:
        transaction.put(index_key(5), transaction.get(index_key(6)))
    cache = LMDBCache(path)
    assert_same_samples(cache.get(0), Images(20).sample(0))
    said = f"{path}: sample 5: its checksum is wrong. The file is damaged: delete the file, and build"
    with pytest.raises(CacheCorruptError, match=said):
        cache.get(5)
    with pytest.raises(CacheCorruptError, match=said):
        cache.gather(np.arange(20), np.empty)
    assert cache.verify() == [5]


def test_a_record_of_another_build_raises(path: Path, tmp_path: Path) -> None:
    """It has the same key, and the right checksum in its own file."""
    build_lmdb(BrokenImages(20, shift=1), tmp_path / "other", num_workers=0).close()
    with opened_by_lmdb(tmp_path / "other") as other, opened_by_lmdb(path) as transaction:
        transaction.put(index_key(0), other.get(index_key(0)))
    with pytest.raises(CacheCorruptError, match="sample 0: its checksum is wrong"):
        LMDBCache(path).get(0)


def test_a_record_that_is_missing_raises(path: Path) -> None:
    """Also where a record of no sample makes the number right; it is not read from the dataset instead."""
    with opened_by_lmdb(path) as transaction:
        transaction.delete(index_key(5))
    with pytest.raises(CacheCorruptError, match="should have 20 records, but has 19"):
        LMDBCache(path)
    with opened_by_lmdb(path) as transaction:
        transaction.put(b"foreign", b"value")
    dataset = fastload.CachedDataset(Images(20), cache=f"lmdb:{path}")
    with pytest.raises(CacheCorruptError, match="sample 5: its record is missing"):
        dataset[5]


# --- mutations -------------------------------------------------------------------------------------------


def flip(draw: Draw, content: bytes) -> bytes:
    """Flip single bits, half of the times in the first pages, or in what pages begin with."""
    mutated = bytearray(content)
    bits = 8 * len(mutated)
    heads = st.integers(0, len(mutated) // PAGE_BYTES - 1).flatmap(
        lambda page: st.integers(8 * PAGE_BYTES * page, 8 * PAGE_BYTES * page + 8 * 64)
    )
    places = st.one_of(st.integers(0, bits - 1), st.integers(0, min(bits, 8 * 3 * PAGE_BYTES) - 1), heads)
    for place in draw(st.lists(places, min_size=1, max_size=6)):
        mutated[place // 8] ^= 1 << place % 8
    return bytes(mutated)


def zero(draw: Draw, content: bytes) -> bytes:
    """Lose pages, as a disk does that has not written them."""
    mutated = bytearray(content)
    for page in draw(st.lists(st.integers(0, len(content) // PAGE_BYTES), min_size=1, max_size=6)):
        lost = slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES)
        mutated[lost] = bytes(len(mutated[lost]))
    return bytes(mutated)


def cut(draw: Draw, content: bytes) -> bytes:
    """Cut the file off, half of the times between two pages."""
    if draw(st.booleans()):
        return content[: PAGE_BYTES * draw(st.integers(0, len(content) // PAGE_BYTES))]
    return content[: draw(st.integers(0, len(content) - 1))]


def splice(draw: Draw, content: bytes) -> bytes:
    """Take bytes out, and put some of the same file in, in whole pages or not."""
    unit = draw(st.sampled_from([1, 512, PAGE_BYTES]))
    start, at = (unit * draw(st.integers(0, len(content) // unit)) for _ in range(2))
    taken, put = (unit * draw(st.integers(0, 8)) for _ in range(2))
    return content[:at] + content[start : start + put] + content[at + taken :]


MUTATIONS = {mutate.__name__: mutate for mutate in (flip, zero, cut, splice)}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("way", MUTATIONS)
def test_the_written_samples_or_an_error(
    way: str, name: str, caches: Caches, readers: dict[str, Reader], tmp_path: Path, request: Any
) -> None:
    """A mutated file gives exactly the samples that were written, or errors of the cache that name it."""
    source, path, seen = caches[name][0], tmp_path / "mutated", set()

    @given(st.data())
    @settings(
        max_examples=300 if request.config.getoption("--thorough") else 40,
        derandomize=True, database=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def read(data: st.DataObject) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
        file = data.draw(st.sampled_from(sorted(path.iterdir()))) if path.is_dir() else path
        mutated = MUTATIONS[way](data.draw, file.read_bytes())
        file.unlink()  # a file of its own, as a copy from elsewhere would be
        file.write_bytes(mutated)
        seen.add(readers[name].read(path))

    read()
    assert seen - {"right"}
