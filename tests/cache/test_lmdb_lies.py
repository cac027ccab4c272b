"""Cache files from elsewhere, whose checksums are right and whose content is false: an error, and no more."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fastload.cache.build.build import build_lmdb
from fastload.cache.dataset import CachedDataset
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheCorruptError, CacheMismatchError
from tests.cache.forge import (
    BIG,
    BRANCH,
    LEAF,
    PAGE_BYTES,
    ROOT_AT,
    Forgery,
    Reader,
    SmallSamples,
    forge,
)
from tests.cache.zoo import Images
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUM_SMALL = 600  # enough for a branch page over the leaves


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Finished caches: of 20 images, which lie in overflow pages, and of samples that lie in the tree."""
    directory = tmp_path_factory.mktemp("contents")
    build_lmdb(Images(20), directory / "big", num_workers=0).close()
    build_lmdb(SmallSamples(NUM_SMALL), directory / "small", num_workers=0).close()
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture
def path(contents: dict[str, bytes], tmp_path: Path) -> Path:
    """A file of 20 images."""
    (tmp_path / "cache").write_bytes(contents["big"])
    return tmp_path / "cache"


@pytest.fixture
def small(contents: dict[str, bytes], tmp_path: Path) -> Path:
    """A file of samples that lie in the tree."""
    (tmp_path / "small").write_bytes(contents["small"])
    return tmp_path / "small"


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
}  # fmt: skip


@pytest.mark.parametrize(("name", "lie"), [(name, lie) for name, lies in LIES.items() for lie in lies])
def test_a_false_field_is_refused(name: str, lie: str, path: Path) -> None:
    """A field of another type, or outside what the file can hold, raises with the path."""

    def change(forgery: Forgery) -> None:
        fields = forgery.fields if name in forgery.fields else forgery.fields["plan"]
        fields[name] = LIES[name][lie]

    forge(path, change)
    with pytest.raises(CacheCorruptError, match=f"^{path}: "):
        LMDBCache(path)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200_000 + b"]" * 200_000,
        b"[1]",
        b"null",
        b"{zz",
        b'"\xff\xfe"',
        b"{}",
        b'{"version": 1}',
        b"1" * 9999,
    ],
    ids=["nested", "list", "null", "cut", "no text", "empty", "version alone", "long number"],
)
def test_a_text_that_is_no_description_is_refused(text: bytes, path: Path) -> None:
    """Whatever stands where the description should be raises with the path."""
    forge(path, lambda _: text)

    with pytest.raises(CacheCorruptError, match=f"^{path}: "):
        LMDBCache(path)


@pytest.mark.parametrize("version", [2, 0, -1, HUGE])
def test_another_version_comes_first(version: int, path: Path) -> None:
    """A file of another format version is not damaged, whatever else it says."""
    forge(path, lambda _: json.dumps({"version": version, "new": []}).encode())

    with pytest.raises(CacheMismatchError, match=f"{path} is a cache of format"):
        LMDBCache(path)


@pytest.mark.parametrize("version", ["1", None, 1.0, True, [1]])
def test_a_version_that_is_no_number_is_damage(version: Any, path: Path) -> None:
    """Only a number names another format version."""
    forge(path, lambda forgery: forgery.fields.update(version=version))

    with pytest.raises(CacheCorruptError, match=f"^{path}: "):
        LMDBCache(path)


@pytest.mark.parametrize("field", ["plan", "codec", "shard"])
@pytest.mark.parametrize("way", ["lacks", "has another"])
def test_fields_are_exactly_those_of_the_format(way: str, field: str, path: Path) -> None:
    """A field too few or too many raises with the path."""

    def change(forgery: Forgery) -> None:
        fields = forgery.fields if field in forgery.fields else forgery.fields["plan"]
        if way == "lacks":
            del fields[field]
        else:
            fields[f"{field}s"] = 1

    forge(path, change)
    with pytest.raises(CacheCorruptError, match=f"^{path}: "):
        LMDBCache(path)


@pytest.mark.parametrize("lie", ["samples", "runs", "pages", "length"])
def test_a_lie_takes_no_memory(lie: str, path: Path) -> None:
    """Memory is never taken for what a file only states."""

    def change(forgery: Forgery) -> None:
        if lie == "samples":
            forgery.fields["plan"]["num_samples"] = 4 * 10**9
        elif lie == "runs":
            forgery.fields["plan"]["num_samples"] = 4 * 10**9
            forgery.fields["missing"] = [[20, 10**9]]
        elif lie == "pages":
            forgery.fields["tree_runs"] = [[0, 10**12]]

    forge(path, change)
    if lie == "length":
        content = bytearray(path.read_bytes())
        content[-16:-8] = (1 << 40).to_bytes(8, "little")
        path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CacheCorruptError):
            LMDBCache(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_left_out_samples_take_no_memory_and_no_time(path: Path) -> None:
    """A cache that left out nearly all of a trillion samples opens, and every look at it is as cheap."""

    def change(forgery: Forgery) -> None:
        forgery.fields["plan"]["num_samples"] = 10**12
        forgery.fields["missing"] = [[20, 10**12 - 20]]

    forge(path, change)
    tracemalloc.start()
    try:
        cache = LMDBCache(path)
        dataset = CachedDataset.from_cache(path)
        assert (cache.num_samples, cache.num_cached, len(dataset)) == (10**12, 20, 20)
        assert cache.stored_indices is not None
        assert cache.stored_indices.tolist() == list(range(20))
        assert (19 in cache, 20 in cache, 10**12 - 1 in cache) == (True, False, False)
        assert cache.get(10**11) is None
        assert cache.gather(np.array([3, 10**11]), np.empty) is None
        assert cache.verify() == []
        assert_same_samples(dataset[19], Images(20).sample(19))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_shards_that_disagree_are_refused(tmp_path: Path) -> None:
    """Shards of one build whose descriptions of the whole cache differ raise."""
    path = tmp_path / "cache"
    build_lmdb(Images(20), path, num_workers=0, shards=2).close()
    # The range of shard 1 is the same for 20 samples as it is for 21 if one is left out.
    shard = path / "00001-of-00002.lmdb"

    def change(forgery: Forgery) -> None:
        forgery.fields["plan"]["num_samples"] = 21
        forgery.fields["missing"] = [[20, 1]]

    forge(shard, change)
    with pytest.raises(CacheMismatchError, match="shards of two caches"):
        LMDBCache(path)


def test_millions_of_lost_shards_are_not_listed(tmp_path: Path) -> None:
    """An error names the first lost shard, however many a file claims there to be."""
    (tmp_path / "cache").mkdir()
    shard = tmp_path / "cache" / "0.lmdb"
    build_lmdb(Images(20), shard, num_workers=0).close()

    def change(forgery: Forgery) -> None:
        forgery.fields["plan"].update(num_samples=20 * 10**9, num_shards=10**9)

    forge(shard, change)
    with pytest.raises(CacheMismatchError, match=r"has 1 of the 1,000,000,000 shards"):
        LMDBCache(tmp_path / "cache")


# --- trees -----------------------------------------------------------------------------------------------


def _set_root(forgery: Forgery, page: int) -> None:
    for meta in (0, PAGE_BYTES):
        forgery.put("QQ", meta + ROOT_AT, page, 10**9)


def _every_leaf(forgery: Forgery, change: Callable[[Forgery, int], None]) -> None:
    for page in forgery.pages(LEAF):
        for node in forgery.nodes(page):
            change(forgery, node)


def _swap_children(forgery: Forgery) -> None:
    one, other = forgery.nodes(forgery.pages(BRANCH)[0])[:2]
    one_page, other_page = forgery.body[one : one + 6], forgery.body[other : other + 6]
    forgery.body[one : one + 6], forgery.body[other : other + 6] = other_page, one_page


def _repeat_child(forgery: Forgery) -> None:
    one, other = forgery.nodes(forgery.pages(BRANCH)[0])[:2]
    forgery.body[other : other + 6] = forgery.body[one : one + 6]


def _child(page: int) -> Callable[[Forgery], None]:
    return lambda forgery: forgery.put(
        "IH", forgery.nodes(forgery.pages(BRANCH)[0])[0], page & 0xFFFFFFFF, page >> 32
    )


def _of_page(flags: int, form: str, offset: int, *values: int) -> Callable[[Forgery], None]:
    return lambda forgery: forgery.put(form, forgery.pages(flags)[0] + offset, *values)


def _of_leaves(form: str, offset: int, *values: int) -> Callable[[Forgery], None]:
    return lambda forgery: _every_leaf(forgery, lambda it, node: it.put(form, node + offset, *values))


TREES: dict[str, Callable[[Forgery], Any]] = {
    "root out of the file": lambda forgery: _set_root(forgery, 10**7),
    "root in the wide": lambda forgery: _set_root(forgery, (1 << 64) - 2),
    "root nowhere": lambda forgery: _set_root(forgery, (1 << 64) - 1),
    "root is a meta page": lambda forgery: _set_root(forgery, 0),
    "no magic": lambda forgery: forgery.put("I", 16, 1),
    "version of LMDB": lambda forgery: forgery.put("I", PAGE_BYTES + 20, 2),
    "meta page of no kind": lambda forgery: forgery.put("H", 10, 0),
    "child out of the file": _child(10**7),
    "child in the wide": _child((1 << 48) - 1),
    "child is its own parent": lambda forgery: _child(forgery.root)(forgery),
    "child twice": _repeat_child,
    "children swapped": _swap_children,
    "branch says leaf": _of_page(BRANCH, "H", 10, LEAF),
    "branch says overflow": _of_page(BRANCH, "H", 10, 4),
    "leaf says branch": _of_page(LEAF, "H", 10, BRANCH),
    "leaf is of fixed size": _of_page(LEAF, "H", 10, 0x22),
    "leaf of no entries": _of_page(LEAF, "H", 12, 16),
    "leaf of negative entries": _of_page(LEAF, "H", 12, 0),
    "leaf of too many entries": _of_page(LEAF, "H", 12, 4096),
    "leaf of endless entries": _of_page(LEAF, "HH", 12, 0xFFFF, 0xFFFF),
    "branch of endless entries": _of_page(BRANCH, "HH", 12, 0xFFFF, 0xFFFF),
    "entry at the end of its page": _of_page(LEAF, "H", 16, 4094),
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


@pytest.mark.parametrize("lie", TREES)
def test_a_false_tree_is_refused(lie: str, small: Path) -> None:
    """A tree with the right checksum that leads anywhere but to its samples raises with the path."""
    forge(small, TREES[lie], tree=True)
    dataset = SmallSamples(NUM_SMALL)
    with Reader([dataset.sample(index) for index in range(NUM_SMALL)]) as reader:
        assert reader.read(small) == "refused"


def _overlap(forgery: Forgery) -> None:
    first = forgery.u32(forgery.nodes(forgery.pages(LEAF)[0])[0] + 16)
    _every_leaf(forgery, lambda it, node: it.put("HH", node, 60_000, 0))
    _every_leaf(forgery, lambda it, node: it.put("Q", node + 16, first))


OVERFLOWS: dict[str, Callable[[Forgery], Any]] = {
    "page out of the file": _of_leaves("Q", 16, 10**12),
    "page in the wide": _of_leaves("Q", 16, (1 << 64) - 1),
    "value of a gigabyte": _of_leaves("HH", 0, 0xFFFF, 0x3FFF),
    "value a page too long": _of_leaves("HH", 0, 0xF000, 1),
    "value in the leaf": _of_leaves("H", 4, 0),
    "values over each other": _overlap,
}


@pytest.mark.parametrize("lie", OVERFLOWS)
def test_a_false_place_of_a_record_is_refused(lie: str, path: Path) -> None:
    """A record that would lie outside the file raises with the path."""
    forge(path, OVERFLOWS[lie], tree=True)
    with Reader([Images(20).sample(index) for index in range(20)]) as reader:
        assert reader.read(path) == "refused"


def test_records_at_each_other_s_place_raise(path: Path) -> None:
    """A record that lies under another's key raises when it is read, with its index."""

    def change(forgery: Forgery) -> None:
        page = forgery.pages(LEAF)[0]
        first = forgery.nodes(page)[0]
        for node in forgery.nodes(page):
            forgery.body[node + 16 : node + 24] = forgery.body[first + 16 : first + 24]

    forge(path, change, tree=True)
    cache = LMDBCache(path)

    assert_same_samples(cache.get(0), Images(20).sample(0))
    with pytest.raises(CacheCorruptError, match="sample 5: another record"):
        cache.get(5)
    with pytest.raises(CacheCorruptError, match="sample 1: another record"):
        cache.gather(np.arange(20), np.empty)


def test_the_older_state_does_not_matter(small: Path) -> None:
    """A file holds two states, and only the newer one is read."""

    def change(forgery: Forgery) -> None:
        older = PAGE_BYTES - forgery.meta
        forgery.put("QQ", older + ROOT_AT, 10**7, 10**7)

    forge(small, change, tree=True)
    assert_same_samples(LMDBCache(small).get(7), SmallSamples(8).sample(7))
