"""Damaged LMDB files: a clear error or the right samples, never a wrong one, never a crash."""

from __future__ import annotations

import multiprocessing
import os
import random
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np
import pytest

from fastload.cache.build.build import build_lmdb
from fastload.cache.lmdb.files import open_file
from fastload.cache.lmdb.format import write_description
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheCorruptError, CacheError
from tests.cache.zoo import Images
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from pathlib import Path


def rewrite(path: Path, change: Any) -> None:
    """Change the environment in place, as only a test may."""
    description = open_file(str(path)).description
    environment = lmdb.open(str(path), subdir=False, lock=False)
    with environment, environment.begin(write=True) as transaction:
        change(transaction)
    with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as environment:
        num_pages = environment.info()["last_pgno"] + 1
    write_description(str(path), description, num_pages, 4096)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.999])
def test_truncated_file(share: float, path: Path) -> None:
    """A file that is cut short raises when it is opened, before anything behind its end is touched."""
    os.truncate(path, int(path.stat().st_size * share))

    with pytest.raises(CacheCorruptError):
        LMDBCache(path)


def test_missing_record(path: Path) -> None:
    """A record that is not there raises when the file is opened."""
    rewrite(path, lambda transaction: transaction.delete((5).to_bytes(8, "big")))

    with pytest.raises(CacheCorruptError, match="holds 19 samples, but should hold 20"):
        LMDBCache(path)


def test_swapped_records(path: Path) -> None:
    """A record that lies under another's key raises."""

    def swap(transaction: Any) -> None:
        transaction.put((5).to_bytes(8, "big"), transaction.get((6).to_bytes(8, "big")))

    rewrite(path, swap)
    cache = LMDBCache(path)

    with pytest.raises(CacheCorruptError, match="sample 5: another record"):
        cache.get(5)


def test_flipped_bits_are_found(path: Path) -> None:
    """A record with any bit flipped raises at its first read, with path and index; the others are right."""
    rewrite(path, lambda transaction: transaction.put((5).to_bytes(8, "big"), flipped(transaction)))
    cache = LMDBCache(path)
    dataset = Images(20)
    for index in range(20):
        if index == 5:
            with pytest.raises(CacheCorruptError, match=f"{path}: sample 5"):
                cache.get(index)
        else:
            assert_same_samples(cache.get(index), dataset.sample(index))


def flipped(transaction: Any) -> bytes:
    value = bytearray(transaction.get((5).to_bytes(8, "big")))
    value[random.Random(0).randrange(400, len(value))] ^= 4
    return bytes(value)


def read_everything(path: str, expected: list[Any], first_by: str) -> None:
    """Run in a child: exit with 0 if every sample is right or raises a clear error."""
    try:
        cache = LMDBCache(path)
    except (CacheError, FileNotFoundError):
        os._exit(0)
    if first_by == "gather":
        images, _ = zip(*expected, strict=True)
        for start in range(0, len(expected), 5):
            indices = np.arange(start, start + 5)
            try:
                batch = cache.gather(indices, np.empty)
            except CacheError:
                continue
            assert batch is not None
            np.testing.assert_array_equal(batch[0].numpy(), np.stack(images[start : start + 5]))
            assert batch[1].tolist() == indices.tolist()
    for index, sample in enumerate(expected):
        try:
            found = cache.get(index)
        except CacheError:
            continue
        assert_same_samples(found, sample)
    os._exit(0)


def exit_code(*args: Any) -> int | None:
    """Of a child that reads everything."""
    child = multiprocessing.get_context("fork").Process(target=read_everything, args=args)
    child.start()
    child.join()
    code = child.exitcode
    child.close()
    return code


@pytest.mark.slow
@pytest.mark.parametrize("first_by", ["get", "gather"])
@pytest.mark.parametrize("way", ["flip", "tree", "cut", "page"])
def test_damage_anywhere_in_the_file(way: str, first_by: str, path: Path) -> None:
    """Flips, cuts and overwritten pages, most of them in LMDB's tree: an error or the right samples."""
    dataset = Images(20)
    expected = [dataset.sample(index) for index in range(20)]
    content = path.read_bytes()
    tree = [at for at in range(0, len(content), 4096) if content[at + 10] in (1, 2, 8)]  # LMDB's page flags
    chance = random.Random(way)
    for _ in range(20):
        damaged = bytearray(content)
        at = chance.randrange(len(content))
        if way == "tree":
            at = chance.choice(tree) + chance.randrange(4096)
        if way in ("flip", "tree"):
            damaged[min(at, len(damaged) - 1)] ^= 1 << chance.randrange(8)
        elif way == "cut":
            del damaged[at:]
        else:
            start = at // 4096 * 4096
            damaged[start : start + 4096] = chance.randbytes(len(damaged[start : start + 4096]))
        path.unlink()  # a file of its own, as a copy from elsewhere would be
        path.write_bytes(damaged)
        assert exit_code(str(path), expected, first_by) == 0


@pytest.mark.parametrize("codec", ["raw", "png"])
def test_verify_names_what_is_damaged(codec: str, tmp_path: Path) -> None:
    """verify() gives the indices of damaged records, also of those that were read before the damage."""
    path = tmp_path / "cache"
    cache = build_lmdb(Images(20), path, num_workers=0, codec=codec, shards=2)
    cache.get(15)
    for index, shard in ((15, "00001-of-00002.lmdb"), (4, "00000-of-00002.lmdb")):
        content = (path / shard).read_bytes()
        at = content.index(b"FLrd" + content[content.index(index.to_bytes(8, "little") + b"FLrc") - 4 :][:4])
        with open(path / shard, "r+b") as file:
            file.seek(at + 600)
            byte = file.read(1)[0]
            file.seek(at + 600)
            file.write(bytes([byte ^ 1]))

    assert cache.verify() == [4, 15]


def test_gather_names_what_is_damaged(path: Path) -> None:
    """A batch with a damaged record raises at its first read, with path and index."""
    rewrite(path, lambda transaction: transaction.put((5).to_bytes(8, "big"), flipped(transaction)))
    cache = LMDBCache(path)

    with pytest.raises(CacheCorruptError, match=f"{path}: sample 5"):
        cache.gather(np.array([4, 5, 6]), np.empty)
    assert cache.gather(np.array([4, 6]), np.empty) is not None
