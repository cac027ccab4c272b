"""Damaged and forged LMDB files: a clear error or the written samples, never a wrong one, never a crash.

Where false content with right checksums could crash its reader, a child process reads it.
"""

from __future__ import annotations

import contextlib
import json
import resource
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

from fastload.cache.build.build import build_lmdb
from fastload.cache.dataset import CachedDataset
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheCorruptError, CacheMismatchError
from tests.cache.build_zoo import BrokenImages
from tests.cache.zoo import Images, Made
from tests.kit.batches import assert_same_samples
from tests.kit.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Draw = Callable[[st.SearchStrategy[Any]], Any]

Caches: TypeAlias = "dict[str, tuple[Path, list[Any]]]"  # and the samples that were written
PAGE_BYTES = 4096
BRANCH, LEAF, BIG = 0x01, 0x02, 0x01  # LMDB's flags of pages, and of a node whose value lies elsewhere
ROOT_AT = 128  # in a meta page
TRAILER = struct.Struct("<IQ8s")
SPARE_BYTES = 1 << 30  # that a child may take beyond what it has when it starts
NUM_SMALL = 600  # enough for a branch page over the leaves
SOURCES: dict[str, tuple[Images, dict[str, Any]]] = {
    "big": (Images(20), {}),  # in overflow pages
    "small": (Made(lambda index: (np.full(7, index % 251, np.uint8), index), NUM_SMALL), {}),  # in the tree
    "shards": (
        BrokenImages(30, bad=[3, 4, 10, 28]),
        {"shards": 3, "codec": "png", "on_error": "skip", "max_errors": 1.0},
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
    """A finished file, taken apart: `body` is LMDB's environment, `fields` the description; change them."""

    def __init__(self, content: bytes) -> None:
        _, length, self._magic = TRAILER.unpack(content[-TRAILER.size :])
        end = len(content) - TRAILER.size - length
        self.body = bytearray(content[:end])
        self.fields: dict[str, Any] = json.loads(content[end : -TRAILER.size])

    def sealed(self, text: bytes | None = None) -> bytes:
        """The file with right checksums; `text` is the description, in place of the fields."""
        if text is None:
            text = json.dumps(self.fields).encode()
        return bytes(self.body) + text + TRAILER.pack(zlib.crc32(text), len(text), self._magic)

    def seal_tree(self) -> None:
        """Let the description state the right checksum of the tree."""
        crc = 0
        for first, count in self.fields["tree_runs"]:
            crc = zlib.crc32(self.body[first * PAGE_BYTES : (first + count) * PAGE_BYTES], crc)
        self.fields["tree_crc32"] = crc

    def pages(self, flags: int) -> list[int]:
        """Offsets of the live pages of one kind that the newest state refers to."""
        level = [self.root * PAGE_BYTES]
        for at in level:
            if self.u16(at + 10) == BRANCH:
                level += [self.u32(node) * PAGE_BYTES for node in self.nodes(at)]
        return [at for at in level if self.u16(at + 10) == flags]

    @property
    def meta(self) -> int:
        """Offset of the meta page of the newest state."""
        return max((struct.unpack_from("=Q", self.body, at + 144)[0], at) for at in (0, PAGE_BYTES))[1]

    @property
    def root(self) -> int:
        """Number of the root page."""
        return int(struct.unpack_from("=Q", self.body, self.meta + ROOT_AT)[0])

    @property
    def first_overflow(self) -> int:
        """Number of the page at which the first record lies that is not in the tree."""
        return self.u32(self.nodes(self.pages(LEAF)[0])[0] + 16)

    def nodes(self, page_at: int) -> list[int]:
        """Offsets of the nodes on a page."""
        count = (self.u16(page_at + 12) - 16) // 2
        return [page_at + self.u16(page_at + 16 + 2 * number) for number in range(count)]

    def u16(self, at: int) -> int:
        return int(struct.unpack_from("=H", self.body, at)[0])

    def u32(self, at: int) -> int:
        return int(struct.unpack_from("=I", self.body, at)[0])

    def put(self, form: str, at: int, *values: int) -> None:
        """Write numbers as struct does, in native order."""
        struct.pack_into(f"={form}", self.body, at, *values)


def forge(path: Path, change: Callable[[Forgery], Any], *, tree: bool = False) -> None:
    """Replace a file by a changed one with right checksums, of the `tree` too; a new file, as a copy is."""
    forgery = Forgery(path.read_bytes())
    text = change(forgery)
    if tree:
        forgery.seal_tree()
    path.unlink()
    path.write_bytes(forgery.sealed(text if isinstance(text, bytes) else None))


# --- descriptions ----------------------------------------------------------------------------------------

HUGE = 10**30
LIES: dict[str, dict[str, Any]] = {
    "num_samples": {
        "huge": HUGE, "more": 21, "fewer": 19, "none": 0, "negative": -1, "text": "x", "float": 20.0,
        "bool": True, "billions": 4 * 10**9,
    },
    "num_shards": {"none": 0, "huge": HUGE, "negative": -1, "null": None},
    "shard": {"negative": -1, "beyond": 1, "float": 0.0, "huge": HUGE},
    "missing": {
        "negative": [[-5, 3]], "text": "ab", "beyond": [[19, 2]], "stored": [[3, 1]], "all": [[0, 20]],
        "empty run": [[3, 0]], "backwards": [[5, 1], [3, 1]], "twice": [[3, 1]] * 2, "triple": [[1, 2, 3]],
        "floats": [[0.5, 1.5]], "huge": [[0, HUGE]], "null": None, "dict": {}, "nested": [[[1], 2]],
    },
    "page_bytes": {"odd": 4095, "double": 8192, "half": 2048, "zero": 0, "huge": HUGE, "text": "4096"},
    "tree_runs": {
        "negative": [[-5, 1]], "huge": [[0, 10**12]], "none": [], "other": [[0, 2]], "null": None,
        "repeated": [[0, 3]] * 1000, "backwards": [[3, 1], [0, 1]], "beyond": [[10**9, 1]],
    },
    "tree_crc32": {"negative": -1, "wide": 1 << 32, "text": "x", "other": 5},
    "codec": {"unknown": "bmp", "list": [1], "null": None},
    "quality": {"none": 0, "high": 101, "text": "x"},
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
    *(b"[" * 200_000 + b"]" * 200_000, b"[1]", b"null", b"{zz", b'"\xff\xfe"', b"{}", b'{"version": 1}'),
    b"1" * 9999,
]
CHANGES: dict[str, list[Callable[[Any], Any]]] = {
    name: [lambda it, name=name, lie=lie: fields_with(it, name).update({name: lie}) for lie in lies.values()]
    for name, lies in LIES.items()
} | {
    "a field too few": [
        *(lambda it: it.fields.pop("plan"), lambda it: it.fields.pop("shard")),
        lambda it: it.fields["plan"].pop("codec"),
    ],
    "one too many": [lambda it: it.fields.update(plans=1), lambda it: it.fields["plan"].update(codecs=1)],
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
    for version in (2, 0, -1, HUGE):  # not damaged, whatever else it says
        path.write_bytes(good)
        forge(path, lambda _, version=version: json.dumps({"version": version, "new": []}).encode())
        with pytest.raises(CacheMismatchError, match=f"{path} is a cache of format"):
            LMDBCache(path)


def stating(plan: dict[str, Any], **fields: Any) -> Callable[[Forgery], Any]:
    """A change of the description."""
    return lambda it: (it.fields["plan"].update(plan), it.fields.update(fields))


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
    for lie in (
        stating({"num_samples": 4 * 10**9}),
        stating({"num_samples": 4 * 10**9}, missing=[[20, 10**9]]),
        stating({}, tree_runs=[[0, 10**12]]),
    ):
        path.write_bytes(content)
        forge(path, lie)
        with little_memory(1 << 20), pytest.raises(CacheCorruptError):
            LMDBCache(path)
    path.write_bytes(content)
    forge(path, stating({"num_samples": 20 * 10**9, "num_shards": 10**9}))
    path.with_name("shards").mkdir()
    path.rename(path.with_name("shards") / "x.lmdb")
    with little_memory(1 << 20), pytest.raises(CacheMismatchError, match="has 1 of the 1,000,000,000 shards"):
        LMDBCache(path.with_name("shards"))


def test_left_out_samples_take_no_memory_and_no_time(path: Path) -> None:
    """A cache that left out nearly all of a trillion samples opens, and every look at it is as cheap."""
    forge(path, stating({"num_samples": 10**12}, missing=[[20, 10**12 - 20]]))
    with little_memory(4 << 20):
        cache, dataset = LMDBCache(path), CachedDataset.from_cache(path)
        assert (cache.num_samples, cache.num_cached, len(dataset)) == (10**12, 20, 20)
        assert cache.stored_indices is not None
        assert cache.stored_indices.tolist() == list(range(20))
        assert (19 in cache, 20 in cache, 10**12 - 1 in cache) == (True, False, False)
        assert cache.get(10**11) is None
        assert cache.gather(np.array([3, 10**11]), np.empty) is None
        assert cache.verify() == []
        assert_same_samples(dataset[19], Images(20).sample(19))


# --- trees -----------------------------------------------------------------------------------------------


def _set_root(forgery: Forgery, page: int) -> None:
    for meta in (0, PAGE_BYTES):
        forgery.put("QQ", meta + ROOT_AT, page, 10**9)


def _swap_children(forgery: Forgery, *, is_repeated: bool = False) -> None:
    one, other = (slice(node, node + 6) for node in forgery.nodes(forgery.pages(BRANCH)[0])[:2])
    page = forgery.body[other]
    forgery.body[other] = forgery.body[one]
    if not is_repeated:
        forgery.body[one] = page


def _child(page: int) -> Callable[[Forgery], None]:
    parts = page & 0xFFFFFFFF, page >> 32
    return lambda forgery: forgery.put("IH", forgery.nodes(forgery.pages(BRANCH)[0])[0], *parts)


def _of_page(flags: int, form: str, offset: int, *values: int) -> Callable[[Forgery], None]:
    return lambda forgery: forgery.put(form, forgery.pages(flags)[0] + offset, *values)


def _of_leaves(form: str, offset: int, *values: int) -> Callable[[Forgery], None]:
    def change(forgery: Forgery) -> None:
        for node in (node for page in forgery.pages(LEAF) for node in forgery.nodes(page)):
            forgery.put(form, node + offset, *values)

    return change


TREES: dict[str, Callable[[Forgery], Any]] = {
    "root out of the file": lambda forgery: _set_root(forgery, 10**7),
    "root nowhere": lambda forgery: _set_root(forgery, (1 << 64) - 1),
    "root is a meta page": lambda forgery: _set_root(forgery, 0),
    "no magic": lambda forgery: forgery.put("I", 16, 1),
    "version of LMDB": lambda forgery: forgery.put("I", PAGE_BYTES + 20, 2),
    "meta page of no kind": lambda forgery: forgery.put("H", 10, 0),
    "child out of the file": _child(10**7),
    "child is its own parent": lambda forgery: _child(forgery.root)(forgery),
    "child twice": lambda forgery: _swap_children(forgery, is_repeated=True),
    "children swapped": _swap_children,
    "branch says leaf": _of_page(BRANCH, "H", 10, LEAF),
    "branch says overflow": _of_page(BRANCH, "H", 10, 4),
    "leaf says branch": _of_page(LEAF, "H", 10, BRANCH),
    "leaf is of fixed size": _of_page(LEAF, "H", 10, 0x22),
    "leaf of no entries": _of_page(LEAF, "H", 12, 16),
    "leaf of negative entries": _of_page(LEAF, "H", 12, 0),
    "leaf of too many entries": _of_page(LEAF, "H", 12, 4096),
    "branch of endless entries": _of_page(BRANCH, "HH", 12, 0xFFFF, 0xFFFF),
    "entry outside its page": _of_page(LEAF, "H", 16, 0xFFFF),
    "entry of a branch outside its page": _of_page(BRANCH, "H", 16, 0xFFFE),
    "value reaches beyond": _of_leaves("HH", 0, 0xFFFF, 0x3FFF),
    "value of four gigabytes": _of_leaves("HH", 0, 0xFFFF, 0xFFFF),
    "key of no bytes": _of_leaves("H", 6, 0),
    "key of many bytes": _of_leaves("H", 6, 0xFFFF),
    "keys all the same": _of_leaves("Q", 8, 0),
    "value of many values": _of_leaves("H", 4, 4),
    "value is a tree": _of_leaves("H", 4, 2),
    "overflow page out of the file": _of_leaves("HHHHQQ", 0, 100, 0, BIG, 8, 0, 10**12),
}  # fmt: skip


def _overlap(forgery: Forgery) -> None:
    _of_leaves("HH", 0, 60_000, 0)(forgery)
    _of_leaves("Q", 16, forgery.first_overflow)(forgery)


OVERFLOWS: dict[str, Callable[[Forgery], Any]] = {
    "page out of the file": _of_leaves("Q", 16, 10**12),
    "value of a gigabyte": _of_leaves("HH", 0, 0xFFFF, 0x3FFF),
    "value a page too long": _of_leaves("HH", 0, 0xF000, 1),
    "value in the leaf": _of_leaves("H", 4, 0),
    "values over each other": _overlap,
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
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + SPARE_BYTES,) * 2)
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


@pytest.mark.parametrize(
    ("name", "lie"), [*(("small", lie) for lie in TREES), *(("big", lie) for lie in OVERFLOWS)]
)
def test_a_false_tree_is_refused(name: str, lie: str, caches: Caches, tmp_path: Path, readers: Any) -> None:
    """A tree with the right checksum that leads anywhere but to its samples raises with the path."""
    path = Path(shutil.copy(caches[name][0], tmp_path / name))
    forge(path, {**TREES, **OVERFLOWS}[lie], tree=True)
    assert readers[name].read(path) == "refused"


def test_records_at_each_other_s_place_raise(path: Path) -> None:
    """A record that lies under another's key raises when it is read, with its index."""
    forge(path, lambda it: _of_leaves("Q", 16, it.first_overflow)(it), tree=True)
    cache = LMDBCache(path)
    assert_same_samples(cache.get(0), Images(20).sample(0))
    with pytest.raises(CacheCorruptError, match="sample 5: a different record"):
        cache.get(5)
    with pytest.raises(CacheCorruptError, match="sample 1: a different record"):
        cache.gather(np.arange(20), np.empty)


def test_the_older_state_does_not_matter(path: Path) -> None:
    """A file holds two states, and only the newer one is read."""
    forge(path, lambda it: it.put("QQ", PAGE_BYTES - it.meta + ROOT_AT, 10**7, 10**7), tree=True)
    assert_same_samples(LMDBCache(path).get(7), Images(20).sample(7))


# --- mutations -------------------------------------------------------------------------------------------


def flip(draw: Draw, content: bytes) -> bytes:
    """Flip single bits, half of the times in LMDB's tree."""
    mutated = bytearray(content)
    places = st.integers(0, 8 * len(mutated) - 1)
    if draw(st.booleans()):
        pages = range(0, len(content) - PAGE_BYTES, PAGE_BYTES)
        tree = [at for at in pages if content[at + 10] in (1, 2, 8)]  # their flags
        places = st.sampled_from(tree).flatmap(lambda at: st.integers(8 * at, 8 * at + 8 * PAGE_BYTES - 1))
    for place in draw(st.lists(places, min_size=1, max_size=6)):
        mutated[place // 8] ^= 1 << place % 8
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
RUNS = st.lists(st.tuples(NUMBERS, NUMBERS).map(list), max_size=5)


def describe(draw: Draw, content: bytes) -> bytes:
    """Change, add or delete one or two fields of the description, with its right checksum."""
    forgery = Forgery(content)
    parts = forgery.fields, forgery.fields["plan"]
    for _ in range(draw(st.integers(1, 2))):
        fields = draw(st.sampled_from(parts))
        name = draw(st.sampled_from(["new", *sorted(fields)]))
        fields[name] = draw(NUMBERS | RUNS | JSON)
        if draw(st.integers(0, 5)) == 5:
            del fields[name]
    return forgery.sealed()


PLACES = (10, 12, 14, 16, 18, 20)  # of a page: flags, lower, upper, the first pointers
NODE_PLACES = (0, 2, 4, 6, 8, 15, 16, 18, 22, 24, 28, 32)
META_PLACES = (10, 16, 20, 24, 32, 40, 92, 94, 120, 128, 136, 144)


def regrow(draw: Draw, content: bytes) -> bytes:
    """Change numbers in the tree, with its right checksum."""
    forgery = Forgery(content)
    runs = forgery.fields["tree_runs"]
    pages = [page * PAGE_BYTES for first, count in runs for page in range(first, first + count)]
    root, leaves = forgery.root * PAGE_BYTES, forgery.pages(LEAF)
    nodes = {page: forgery.nodes(page) for page in (root, *leaves)}
    for _ in range(draw(st.integers(1, 4))):
        way = draw(st.sampled_from(["meta", "page", "node", "any"]))
        if way == "meta":
            at = draw(st.sampled_from([0, PAGE_BYTES])) + draw(st.sampled_from(META_PLACES))
        elif way == "any":
            at = draw(st.sampled_from(pages)) + draw(st.integers(0, PAGE_BYTES - 1))
        else:
            page = draw(st.just(root) | st.sampled_from(leaves))
            node = draw(st.sampled_from(nodes[page])) + draw(st.sampled_from(NODE_PLACES))
            at = node if way == "node" else page + draw(st.sampled_from(PLACES))
        nbytes = draw(st.sampled_from([1, 2, 4, 8]))
        at = min(at, len(forgery.body) - nbytes)
        value = draw(NUMBERS) % (1 << 8 * nbytes)
        forgery.body[at : at + nbytes] = value.to_bytes(nbytes, "little")
    forgery.seal_tree()
    return forgery.sealed()


MUTATIONS = {mutate.__name__: mutate for mutate in (flip, cut, splice, describe, regrow)}


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
