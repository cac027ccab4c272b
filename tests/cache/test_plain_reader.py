"""docs/cache-format.md is enough to read caches on disk: a reader that imports nothing of fastload does."""

from __future__ import annotations

import ast
import hashlib
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import lmdb
import numpy as np
import pytest
import torch
from PIL import Image

from fastload.cache.build.build import build_lmdb
from fastload.cache.decoded_files import DecodedFiles, open_files
from fastload.nested.leaf import BARE_KINDS, TENSOR_STORAGE
from fastload.nested.leaves import to_bytes
from fastload.nested.spec import flatten, is_namedtuple
from fastload.readers import identity, patches
from fastload.readers.decode_cache import DecodeCache
from tests.cache import plain_reader
from tests.cache.build_zoo import BrokenImages
from tests.cache.zoo import Everything, Images, Made, Pair
from tests.kit.batches import assert_same_samples
from tests.kit.numbered_files import key_of

if TYPE_CHECKING:
    from fastload.nested.leaf import Leaf

pytestmark = pytest.mark.usefixtures("needs_lmdb")

ROOT = Path(__file__).parents[2]
STRUCTURE = np.dtype([("x", "<f4", (2,)), ("name", "S3")], align=True)
TENSORS = [name for name in TENSOR_STORAGE if hasattr(torch, name)]


def plain(value: Any) -> Any:
    """A sample as the reader returns it: tensors as the arrays that store them, names for classes."""
    if is_namedtuple(value):
        kind = type(value)
        return f"{kind.__module__}.{kind.__name__}", dict(zip(kind._fields, map(plain, value), strict=True))
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
        "arrays": (rng.rand(3, 2).astype(">f8"), rng.rand(0, 4), np.array(index), np.zeros(3, STRUCTURE)),
        "scalars": [np.float16(0.5), np.datetime64("2026-01-02"), np.zeros(1, STRUCTURE)[0]],
        "numbers": (index, -(10**30), 0.1, float("inf"), True, False, None),
        "texts": ["", "ä\udc80" * index, b"\0\xff", np.str_("s"), np.bytes_(b"b")],
        "pair": Pair({"empty": ()}, []),
        "ä": 1,
    }


def assert_reads(path: Path, expected: dict[int, Any]) -> None:
    """The reader gives exactly these samples."""
    found = dict(plain_reader.read_samples(path))
    assert list(found) == list(expected)
    for index, sample in expected.items():
        assert_same_samples(plain(sample), found[index])


def test_it_imports_nothing_of_fastload() -> None:
    """Only the standard library, py-lmdb and NumPy."""
    tree = ast.parse(Path(plain_reader.__file__).read_text())
    lines = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {getattr(node, "module", None) or node.names[0].name for node in lines}
    assert names == {"ast", "json", "struct", "zlib", "pathlib", "lmdb", "numpy"}


def test_the_page_has_each_number_of_the_reader() -> None:
    """The magic words that a reader needs are on the page, which links to this one."""
    page = (ROOT / "docs" / "cache-format.md").read_text()
    assert "tests/cache/plain_reader.py" in page
    assert [word for word in ("FLlmdb1", "FLrc", '"version": 5') if word not in page] == []


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_values_of_every_kind_are_read(tmp_path: Path) -> None:
    """Each kind of leaf, each dtype of tensors, each container."""
    for number, dataset in enumerate(
        (Made(values, 5), Everything(7), Made(lambda index: index, 1), Images(0))
    ):
        build_lmdb(dataset, tmp_path / str(number), num_workers=0).close()
        assert_reads(tmp_path / str(number), {index: dataset.sample(index) for index in range(len(dataset))})
    leaves: tuple[Leaf, ...] = flatten(values(0))[0].leaves
    assert {leaf.kind for leaf in leaves} == {*BARE_KINDS, "array", "tensor", "scalar"}


def test_a_cache_that_leaves_samples_out_is_read(tmp_path: Path) -> None:
    """Its other samples have their indices."""
    dataset = BrokenImages(30, bad=[3, 4, 10, 28])
    skip: Any = {"on_error": "skip", "max_errors": 1.0}
    build_lmdb(dataset, tmp_path / "a", num_workers=0, **skip).close()
    assert_reads(tmp_path / "a", {i: dataset.sample(i) for i in range(30) if i not in dataset.bad})


def test_lmdb_finds_the_same_records(tmp_path: Path) -> None:
    """The file is an environment of LMDB too, whose keys and values are those of the page."""
    build_lmdb(Images(20), tmp_path / "a", num_workers=0).close()
    samples = dict(plain_reader.read_samples(tmp_path / "a"))
    with (
        lmdb.open(str(tmp_path / "a"), subdir=False, readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        for key, value in transaction.cursor():
            assert value[:48] == bytes(48)
            (index,) = struct.unpack(">Q", key)
            assert_same_samples(samples.pop(index), plain_reader.read_record(value[48:]))
    assert not samples


def test_damage_of_samples_is_seen(tmp_path: Path) -> None:
    """A bit in a record, in the table, or in the description."""
    build_lmdb(Images(3), tmp_path / "a", num_workers=0).close()
    content = (tmp_path / "a").read_bytes()
    end = len(content) - 20 - int.from_bytes(content[-16:-8], "little")
    for place in (content.index(Images().sample(1)[0].tobytes()), end - 1, end + 1):
        damaged = bytearray(content)
        damaged[place] ^= 1
        (tmp_path / "a").write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged"):
            dict(plain_reader.read_samples(tmp_path / "a"))


# --- decoded files ----------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
ARRAYS = [
    RNG.integers(0, 256, (375, 500, 3), np.uint8),  # many blocks of its checksum, and a rest
    RNG.integers(0, 256, 4096, np.uint8),
    np.asfortranarray(RNG.random((5, 7, 2))),
    RNG.random((3, 4)).astype(">f4"),
    np.array(7, np.int64),
    np.zeros((0, 3), np.complex128),
    np.array(["ab", "c"]),
    np.array(["2026-01-02"], "M8[D]"),
]
NOTES = [None, {"a": [1, (2.5, b"\0", "ä")], 3: {}}, [[], ()], float("inf"), -(10**30), True, "text", ("t",)]


def test_decoded_files_of_every_kind_are_read(tmp_path: Path) -> None:
    """Arrays of many dtypes, and notes of all plain values."""
    files = DecodedFiles(open_files(str(tmp_path / "files")))
    for number, (array, note) in enumerate(zip(ARRAYS, NOTES, strict=True)):
        assert files.put(key_of(number), array, note)
    files.store.close()
    found = {key: (array, note) for key, array, note in plain_reader.read_files(tmp_path / "files")}
    assert found.keys() == {key_of(number) for number in range(len(ARRAYS))}
    for number, (array, note) in enumerate(zip(ARRAYS, NOTES, strict=True)):
        copy, copied_note = found[key_of(number)]
        assert copy.dtype == array.dtype
        assert_same_samples((array, note), (copy, copied_note))


def test_what_libraries_decoded_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels of Pillow and of OpenCV; and the hash of a file has the key of which the page tells."""
    monkeypatch.setattr(identity, "SETTLED_S", 0)
    monkeypatch.setattr(identity, "SETTLED_REMOTE_S", 0)
    monkeypatch.setattr(identity, "_file_systems", {})
    path, pixels = tmp_path / "photo.png", Images().sample(0)[0]
    Image.fromarray(pixels).save(path)
    files = DecodedFiles(open_files(str(tmp_path / "files")))
    patches.meet()
    with DecodeCache(files, verify_share=0).active():
        with Image.open(path) as image:
            image.load()
        assert cv2.imread(str(path)) is not None
    files.store.close()
    found = [array for _, array, _ in plain_reader.read_files(tmp_path / "files")]
    assert sorted(array.tobytes() for array in found) == sorted(
        [pixels.tobytes(), pixels[:, :, ::-1].tobytes()]
    )
    status = path.stat()
    text = repr(("file", "photo.png", status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    key = b"c" + hashlib.blake2b(text.encode(), digest_size=16).digest()
    with (
        lmdb.open(str(tmp_path / "files"), subdir=False, readonly=True, lock=False) as env,
        env.begin() as txn,
    ):
        assert plain_reader.read_record(txn.get(key)) == hashlib.sha256(path.read_bytes()).digest()
