"""docs/cache-format.md is enough to read caches on disk: a reader that imports nothing of fastload does."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import lmdb
import numpy as np
import pytest
import torch
import xxhash
from PIL import Image

from fastload.cache import records
from fastload.cache.build import build_lmdb
from fastload.cache.decoded_files import DecodedFiles, open_files
from fastload.cache.lmdb_file import FORMAT_VERSION
from fastload.nested.leaf import BARE_KINDS, TENSOR_STORAGE
from fastload.nested.leaves import to_bytes
from fastload.nested.spec import flatten
from fastload.readers import identity, patches
from fastload.readers.decode_cache import DecodeCache
from tests.cache import plain_reader
from tests.cache.build_zoo import BrokenImages
from tests.cache.zoo import Everything, Images, Made
from tests.kit.batches import assert_same_samples
from tests.kit.numbered_files import key_of

if TYPE_CHECKING:
    from fastload.nested.leaf import Leaf

ROOT = Path(__file__).parents[2]
TENSORS = [name for name in TENSOR_STORAGE if hasattr(torch, name)]


def plain(value: Any) -> Any:
    """A sample as the reader returns it: tensors as the arrays that store them."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(plain, value))
    if isinstance(value, torch.Tensor):
        leaf = flatten(value)[0].leaves[0]
        return np.frombuffer(bytes(to_bytes(leaf, value)), TENSOR_STORAGE[leaf.dtype]).reshape(leaf.shape)
    return {np.str_: str, np.bytes_: bytes}.get(type(value), lambda same: same)(value)


def values(index: int) -> Any:
    """Every kind of value."""
    rng = np.random.RandomState(index)
    return {
        "tensors": [torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in TENSORS],
        "arrays": (rng.rand(3, 2).astype(">f8"), rng.rand(0, 4), np.array(index), np.zeros(3, "V5")),
        "scalars": [np.float16(0.5), np.datetime64("2026-01-02"), np.zeros(1, "V5")[0]],
        "numbers": (index, -(10**30), 0.1, float("inf"), True, False, None),
        "texts": ["", "ä\udc80" * index, b"\0\xff", np.str_("s"), np.bytes_(b"b")],
        "pair": ({"empty": ()}, []),
        "ä": 1,
    }


def assert_reads(path: Path, expected: dict[int, Any]) -> None:
    """The reader gives exactly these samples."""
    _, found = plain_reader.read_cache(path)
    assert list(found) == list(expected)
    for index, sample in expected.items():
        assert_same_samples(plain(sample), found[index])


def test_it_imports_nothing_of_fastload() -> None:
    """Only the standard library, py-lmdb and NumPy."""
    tree = ast.parse(Path(plain_reader.__file__).read_text())
    lines = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {getattr(node, "module", None) or node.names[0].name for node in lines}
    assert names == {"ast", "json", "struct", "lmdb", "numpy"}


def test_the_page_links_to_the_reader_and_names_the_version() -> None:
    """And the checksum, which the reader does not compare."""
    page = (ROOT / "docs" / "cache-format.md").read_text()
    words = (
        "tests/cache/plain_reader.py",
        f"`version` ({FORMAT_VERSION})",
        f"records: {records.FORMAT_VERSION}",
        "XXH3-64",
    )
    assert [word for word in words if word not in page] == []


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_values_of_every_kind_are_read(tmp_path: Path) -> None:
    """Each kind of leaf, each dtype of tensors, each container."""
    for number, dataset in enumerate(
        (Made(values, 5), Everything(7), Made(lambda index: index, 1), Images(0))
    ):
        probed = {0: dataset.sample(0)} if len(dataset) else {}  # padding of long doubles differs each time
        build_lmdb(dataset, tmp_path / str(number), num_workers=0, probed=probed).close()
        assert_reads(tmp_path / str(number), {index: dataset.sample(index) for index in range(len(dataset))})
    leaves: tuple[Leaf, ...] = flatten(values(0))[0].leaves
    assert {leaf.kind for leaf in leaves} == {*BARE_KINDS, "array", "tensor", "scalar"}


def test_a_cache_that_leaves_samples_out_is_read(tmp_path: Path) -> None:
    """Its other samples have their indices."""
    dataset = BrokenImages(30, bad=[3, 4, 10, 28])
    skip: Any = {"on_error": "skip", "max_errors": 1.0}
    build_lmdb(dataset, tmp_path / "a", num_workers=0, **skip).close()
    assert_reads(tmp_path / "a", {i: dataset.sample(i) for i in range(30) if i not in dataset.bad})


def test_the_checksum_is_that_of_the_page(tmp_path: Path) -> None:
    """Of the bytes from 8 on; the seed joins the two halves of the uuid and the key."""
    build_lmdb(Images(3), tmp_path / "a", num_workers=0).close()
    with (
        lmdb.open(str(tmp_path / "a"), subdir=False, readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        text, checksum = transaction.get(b"meta").split(b"\n")
        assert xxhash.xxh3_64_hexdigest(text) == checksum.decode()
        record = transaction.get((2).to_bytes(8, "big"))
    uuid = json.loads(text)["uuid"]
    assert record[:8] == xxhash.xxh3_64_digest(record[8:], int(uuid[:16], 16) ^ int(uuid[16:], 16) ^ 2)


@pytest.mark.skipif(shutil.which("mdb_stat") is None, reason="lmdb-utils are not installed")
def test_the_tools_of_lmdb_read_it(tmp_path: Path) -> None:
    """mdb_stat counts the records, and mdb_dump prints them."""
    build_lmdb(Images(3), tmp_path / "a", num_workers=0).close()
    for tool, said in (("mdb_stat", "Entries: 4"), ("mdb_dump", "0000000000000002")):
        done = subprocess.run([tool, "-n", str(tmp_path / "a")], capture_output=True, text=True, check=True)
        assert said in done.stdout


# --- decoded files ----------------------------------------------------------------------------------------

ARRAYS = [
    np.random.default_rng(0).integers(0, 256, (375, 500, 3), np.uint8),
    np.random.default_rng(1).random((3, 4)).astype(">f4"),
    np.asfortranarray(np.random.default_rng(2).random((5, 7, 2))),
    np.array(7, np.int64),
    np.zeros((0, 3), np.complex128),
    np.array(["ab", "c"]),
    np.array(["2026-01-02"], "M8[D]"),
]
NOTES = [None, {"a": [1, (2.5, b"\0", "ä")], 3: {}}, [[], ()], float("inf"), -(10**30), True, ("t", "text")]


def test_decoded_files_of_every_kind_are_read(tmp_path: Path) -> None:
    """Arrays of many dtypes, and notes of all plain values."""
    files = DecodedFiles(open_files(str(tmp_path / "files")))
    for number, (array, note) in enumerate(zip(ARRAYS, NOTES, strict=True)):
        assert files.put(key_of(number), array, note)
    files.store.close()
    meta, found = plain_reader.read_cache(tmp_path / "files")
    assert (meta["kind"], meta["finished"]) == ("files", False)
    assert found.keys() == {key_of(number) for number in range(len(ARRAYS))}
    for number, (array, note) in enumerate(zip(ARRAYS, NOTES, strict=True)):
        copy, text = found[key_of(number)]
        assert copy.dtype == array.dtype
        assert_same_samples((array, note), (copy, plain_reader.read_note(text)))


def test_what_libraries_decoded_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels of OpenCV; and the hash of a file has the key of which the page tells."""
    monkeypatch.setattr(identity, "SETTLED_S", 0)
    monkeypatch.setattr(identity, "SETTLED_REMOTE_S", 0)
    monkeypatch.setattr(identity, "_file_systems", {})
    path, pixels = tmp_path / "photo.png", Images().sample(0)[0]
    Image.fromarray(pixels).save(path)
    files = DecodedFiles(open_files(str(tmp_path / "files")))
    patches.meet()
    with DecodeCache(files, verify_share=0).active():
        assert cv2.imread(str(path)) is not None
    files.store.close()
    _, found = plain_reader.read_cache(tmp_path / "files")
    status = path.stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    text = repr(("file", "photo.png", status.st_ino, status.st_size, *times))
    key = b"c" + hashlib.blake2b(text.encode(), digest_size=16).digest()
    assert found.pop(key) == hashlib.sha256(path.read_bytes()).digest()
    ((array, _),) = found.values()
    assert array.tobytes() == pixels[:, :, ::-1].tobytes()
