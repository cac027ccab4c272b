"""Mutated cache files, with and without right checksums: the written samples or an error, never a crash.

A child process opens the files: whatever ends it is a failure of the test. All runs try the same mutations.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastload.cache.build.build import build_lmdb
from tests.cache.forge import LEAF, PAGE_BYTES, Forgery, Reader, SmallSamples
from tests.cache.zoo import Images

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Draw = Callable[[st.SearchStrategy[Any]], Any]

EXAMPLES = 200  # of each kind of mutation and of cache


class LeftOut:
    """Samples of another dataset, of which some cannot be read."""

    def __init__(self, samples: Images) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index % 7 in (3, 4):
            raise OSError(f"no sample {index}")
        return self.samples[index]


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Any]]]:
    """Finished caches, and the samples that were written."""
    directory = tmp_path_factory.mktemp("caches")
    images, small, shape = Images(20), SmallSamples(600), Images(60, shape=(8, 9, 3))
    build_lmdb(images, directory / "big", num_workers=0).close()
    build_lmdb(small, directory / "small", num_workers=0).close()
    build_lmdb(LeftOut(shape), directory / "shards", num_workers=0, shards=3, on_error="skip").close()
    stored = [None if index % 7 in (3, 4) else shape.sample(index) for index in range(60)]
    return {
        "big": (directory / "big", [images.sample(index) for index in range(20)]),
        "small": (directory / "small", [small.sample(index) for index in range(600)]),
        "shards": (directory / "shards", stored),
    }


# --- mutations -------------------------------------------------------------------------------------------


def flip(draw: Draw, content: bytes) -> bytes:
    """Flip single bits."""
    mutated = bytearray(content)
    for place in draw(st.lists(st.integers(0, 8 * len(mutated) - 1), min_size=1, max_size=6)):
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
    """Change one or two fields of the description, with its right checksum."""
    forgery = Forgery(content)
    for _ in range(draw(st.integers(1, 2))):
        fields = draw(st.sampled_from([forgery.fields, forgery.fields.get("plan")]))
        if not isinstance(fields, dict) or not fields:
            continue
        name = draw(st.sampled_from(sorted(fields)))
        way = draw(st.sampled_from(["number", "runs", "json", "list", "delete", "add"]))
        if way == "delete":
            del fields[name]
        elif way == "add":
            fields[draw(st.text(max_size=3))] = draw(JSON)
        elif way == "list" and isinstance(fields[name], list) and fields[name]:
            run = draw(st.integers(0, len(fields[name]) - 1))
            fields[name][run] = draw(st.tuples(NUMBERS, NUMBERS).map(list) | JSON)
        else:
            fields[name] = draw({"number": NUMBERS, "runs": RUNS}.get(way, JSON))
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
@pytest.mark.parametrize("name", ["big", "small", "shards"])
@pytest.mark.parametrize("way", MUTATIONS)
def test_the_written_samples_or_an_error(
    way: str, name: str, caches: dict[str, tuple[Path, list[Any]]], tmp_path: Path
) -> None:
    """A mutated file gives exactly the samples that were written, or errors of the cache that name it."""
    source, expected = caches[name]
    path = tmp_path / "mutated"
    seen: set[str] = set()
    with Reader(expected) as reader:

        @given(st.data())
        @settings(
            max_examples=EXAMPLES, derandomize=True, database=None, deadline=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def read(data: st.DataObject) -> None:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            if source.is_dir():
                shutil.copytree(source, path)
                file = data.draw(st.sampled_from(sorted(path.iterdir())))
            else:
                file = path
            content = (source / file.name if source.is_dir() else source).read_bytes()
            mutated = MUTATIONS[way](data.draw, content)
            file.unlink(missing_ok=True)  # a file of its own, as a copy from elsewhere would be
            file.write_bytes(mutated)
            seen.add(reader.read(path))

        read()
    assert "refused" in seen
