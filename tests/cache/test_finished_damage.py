"""Damaged and forged LMDB files: a clear error or the written samples, never a wrong one, never a crash.

Where false content with right checksums could crash its reader, a child process reads it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastload.cache.build import build_lmdb
from fastload.cache.finished import LMDBCache
from fastload.errors import CacheCorruptError, CacheMismatchError
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
TRAILER = struct.Struct("<IQ8s")
SPARE_BYTES = 1 << 30  # that a child may take beyond what it has when it starts
COLUMNS = {"starts": "<i8", "sizes": "<u4", "crcs": "<u4"}
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


class Forgery:
    """A finished file, taken apart: LMDB's environment, table, and fields of the description; change them."""

    def __init__(self, content: bytes) -> None:
        _, length, self._magic = TRAILER.unpack(content[-TRAILER.size :])
        text_at = len(content) - TRAILER.size - length
        self.fields: dict[str, Any] = json.loads(content[text_at : -TRAILER.size])
        rows = self.fields["plan"]["num_samples"]
        self.table: dict[str, Any] = {}
        at = text_at - 16 * rows
        self.body = bytearray(content[:at])
        for name, kind in COLUMNS.items():
            self.table[name] = np.frombuffer(content, kind, rows, at).copy()
            at += self.table[name].nbytes

    def sealed(self, text: bytes | None = None) -> bytes:
        """The file with a right checksum of its description, which is `text`, or else the fields."""
        if text is None:
            text = json.dumps(self.fields).encode()
        rows = b"".join(column.tobytes() for column in self.table.values())
        return bytes(self.body) + rows + text + TRAILER.pack(zlib.crc32(text), len(text), self._magic)

    def seal_table(self) -> None:
        """Let the description state the right checksum of the table."""
        self.fields["table_crc32"] = zlib.crc32(b"".join(one.tobytes() for one in self.table.values()))


def forge(path: Path, change: Callable[[Forgery], Any], *, table: bool = False) -> None:
    """Replace a file by a changed one with right checksums, of the `table` too; a new file, as a copy is."""
    forgery = Forgery(path.read_bytes())
    text = change(forgery)
    if table:
        forgery.seal_table()
    path.unlink()
    path.write_bytes(forgery.sealed(text if isinstance(text, bytes) else None))


# --- descriptions ----------------------------------------------------------------------------------------

HUGE = 10**30
LIES: dict[str, dict[str, Any]] = {
    "num_samples": {
        "huge": HUGE, "more": 21, "fewer": 19, "none": 0, "negative": -1, "text": "x", "float": 20.0,
        "bool": True, "billions": 4 * 10**9,
    },
    "table_crc32": {"negative": -1, "wide": 1 << 32, "text": "x", "other": 5},
    "spec": {"number": 5, "list": []},
    "crc32": {"wide": 1 << 32, "text": "x"},
    "parts": {"list": [], "numbers": {"a": 1}, "text": "x"},
    "classes": {"number": 5, "numbers": [1], "dict": {}},
    "libraries": {"null": None, "numbers": {"a": 1}},
    "created_s": {"text": "x", "negative": -1, "huge": 1e300, "not a number": float("nan"), "bool": True},
    "build_id": {"null": None, "number": 5},
    "version": {"text": "1", "null": None, "float": 1.0, "bool": True, "list": [1]},
}  # fmt: skip


TEXTS = [
    *(b"[" * 200_000 + b"]" * 200_000, b"[1]", b"null", b"{zz", b'"\xff\xfe"', b"{}", b'{"version": 4}'),
    b"1" * 9999,
]
CHANGES: dict[str, list[Callable[[Any], Any]]] = {
    name: [lambda it, name=name, lie=lie: fields_with(it, name).update({name: lie}) for lie in lies.values()]
    for name, lies in LIES.items()
} | {
    "a field too few": [
        lambda it: it.fields.pop("plan"),
        lambda it: it.fields["plan"].pop("parts"),
    ],
    "one too many": [lambda it: it.fields.update(plans=1), lambda it: it.fields["plan"].update(plans=1)],
    "no description": [lambda _, text=text: text for text in TEXTS],
}


def fields_with(forgery: Forgery, name: str) -> dict[str, Any]:
    """The part of the description that has a field."""
    return forgery.fields if name in forgery.fields else forgery.fields["plan"]


@pytest.mark.parametrize("name", CHANGES)
def test_a_false_description_is_refused(name: str, path: Path) -> None:
    """A field of another type, or outside what the file can hold, raises with the path."""
    good = path.read_bytes()
    for change in CHANGES[name]:
        path.write_bytes(good)
        forge(path, change)
        with pytest.raises(CacheCorruptError, match=f"^{path}: "):
            LMDBCache(path)
    for version in (1, 0, -1, HUGE):  # not damaged, whatever else it says
        path.write_bytes(good)
        forge(path, lambda _, version=version: json.dumps({"version": version, "new": []}).encode())
        with pytest.raises(CacheMismatchError, match=f"{path} is a cache of format"):
            LMDBCache(path)


def stating(plan: dict[str, Any]) -> Callable[[Forgery], Any]:
    """A change of the plan in the description."""
    return lambda it: it.fields["plan"].update(plan)


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
    path.write_bytes(content[:-16] + (1 << 40).to_bytes(8, "little") + content[-8:])  # a long description
    with little_memory(1 << 20), pytest.raises(CacheCorruptError):
        LMDBCache(path)
    for lie in ({"num_samples": 4 * 10**9}, {"num_samples": 10**12}):
        path.write_bytes(content)
        forge(path, stating(lie))
        with little_memory(1 << 20), pytest.raises(CacheCorruptError):
            LMDBCache(path)


# --- tables ----------------------------------------------------------------------------------------------


def _put(column: str, value: int, row: int = 5) -> Callable[[Forgery], None]:
    def change(forgery: Forgery) -> None:
        forgery.table[column][row] = value

    return change


def _overlap(forgery: Forgery) -> None:
    forgery.table["starts"][:] = 0
    forgery.table["sizes"][:] = len(forgery.body)


def _last_byte_outside(forgery: Forgery) -> None:
    forgery.table["starts"][-1] = len(forgery.body) - int(forgery.table["sizes"][-1]) + 1


TABLES: dict[str, Callable[[Forgery], Any]] = {
    "start before the file": _put("starts", -1),
    "start far before the file": _put("starts", -(1 << 63)),
    "start behind the file": _put("starts", 10**12),
    "start at the end of all numbers": _put("starts", (1 << 63) - 1),
    "last byte outside": _last_byte_outside,
    "record of four gigabytes": _put("sizes", (1 << 32) - 1),
    "records over each other": _overlap,
}


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


@pytest.mark.parametrize("name", ["big", "small"])
@pytest.mark.parametrize("lie", TABLES)
def test_a_false_table_is_refused(name: str, lie: str, caches: Caches, tmp_path: Path, readers: Any) -> None:
    """A table with the right checksum that leads out of the file raises with the path."""
    path = Path(shutil.copy(caches[name][0], tmp_path / name))
    forge(path, TABLES[lie], table=True)
    assert readers[name].read(path) == "refused"


def test_a_table_with_a_wrong_checksum_is_refused(path: Path) -> None:
    """Also if each of its numbers is possible."""
    forge(path, _put("starts", 0))
    with pytest.raises(CacheCorruptError, match=f"{path}: its index is damaged"):
        LMDBCache(path)


def test_records_at_each_other_s_place_raise(path: Path) -> None:
    """A record in the place of another raises when it is read, with the index."""
    forge(path, lambda it: it.table["starts"].fill(it.table["starts"][0]), table=True)
    cache = LMDBCache(path)
    assert_same_samples(cache.get(0), Images(20).sample(0))
    with pytest.raises(CacheCorruptError, match="sample 5: its checksum is wrong"):
        cache.get(5)
    with pytest.raises(CacheCorruptError, match="sample 1: its checksum is wrong"):
        cache.gather(np.arange(20), np.empty)


def test_records_of_another_build_raise(path: Path, tmp_path: Path) -> None:
    """As a download leaves it that began before the file was built again, and was continued after that."""
    build_lmdb(BrokenImages(20, shift=1), tmp_path / "other", num_workers=0).close()
    content, other = path.read_bytes(), (tmp_path / "other").read_bytes()
    half = len(Forgery(content).body) // 2
    path.write_bytes(other[:half] + content[half:])
    assert len(LMDBCache(path).verify()) >= 9
    with pytest.raises(CacheCorruptError, match="sample 0: its checksum is wrong"):
        LMDBCache(path).get(0)


def test_the_tree_of_lmdb_does_not_matter(path: Path) -> None:
    """It is not read: a file in which it is lost still gives every sample."""
    forge(path, lambda it: it.body.__setitem__(slice(2 * PAGE_BYTES), bytes(2 * PAGE_BYTES)))
    cache = LMDBCache(path)
    assert cache.verify() == []
    assert_same_samples(cache.get(7), Images(20).sample(7))


# --- mutations -------------------------------------------------------------------------------------------


def flip(draw: Draw, content: bytes) -> bytes:
    """Flip single bits, half of the times behind LMDB's environment."""
    mutated = bytearray(content)
    first = len(Forgery(content).body) if draw(st.booleans()) else 0
    for place in draw(st.lists(st.integers(8 * first, 8 * len(mutated) - 1), min_size=1, max_size=6)):
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


NUMBERS = st.one_of(
    st.integers(-3, 700),
    st.integers(),
    st.sampled_from([2**n + d for n in (8, 12, 16, 31, 32, 47, 48, 63, 64) for d in (-1, 0, 1)]),
)
JSON = st.recursive(
    st.one_of(NUMBERS, st.booleans(), st.none(), st.floats(), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def describe(draw: Draw, content: bytes) -> bytes:
    """Change, add or delete one or two fields of the description, with its right checksum."""
    forgery = Forgery(content)
    parts = forgery.fields, forgery.fields["plan"]
    for _ in range(draw(st.integers(1, 2))):
        fields = draw(st.sampled_from(parts))
        name = draw(st.sampled_from(["new", *sorted(fields)]))
        fields[name] = draw(NUMBERS | JSON)
        if draw(st.integers(0, 5)) == 5:
            del fields[name]
    return forgery.sealed()


def retable(draw: Draw, content: bytes) -> bytes:
    """Change numbers in the table, with its right checksum."""
    forgery = Forgery(content)
    for _ in range(draw(st.integers(1, 4))):
        column = forgery.table[draw(st.sampled_from(sorted(forgery.table)))]
        row = draw(st.integers(0, len(column) - 1))
        size = 8 * column.itemsize
        number = draw(NUMBERS) % (1 << size) or 1  # a size of 0 is a sample that was left out
        column[row] = number - (1 << size) if column.dtype.kind == "i" and number >> size - 1 else number
    forgery.seal_table()
    return forgery.sealed()


MUTATIONS = {mutate.__name__: mutate for mutate in (flip, zero, cut, splice, describe, retable)}


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
    assert "refused" in seen
