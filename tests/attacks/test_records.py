"""Records of caches on disk that were forged, with right checksums: nothing is run, opened or allocated.

A forged record raises an error of the cache, or counts as not stored. What it claims takes no memory.
"""

from __future__ import annotations

import json
import struct
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash

from fastload.cache import records
from fastload.cache.decoded_files import DecodedFiles, open_files
from fastload.errors import CacheError
from fastload.readers.decode_cache import DecodeCache
from fastload.readers.identity import Identity, digest
from fastload.readers.results import pack
from tests.kit.faults import leave_address_space
from tests.kit.numbered_files import key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.kit.jobs import Job

SPARE_BYTES = 256 << 20  # that reading all of the forged records may take


def forged(spec: Any, *payloads: bytes) -> bytes:
    """A record with these payloads, one for each leaf."""
    text = json.dumps(spec).encode()
    words = [len(payload) for payload in payloads]
    at = -(-(32 + len(text)) // 8) * 8
    kinds = [kind for kind in record_kinds(spec) if kind not in ("tuple", "list", "dict")]
    content, start = b"", at + 8 * len(words)
    for kind, payload in zip(kinds, payloads, strict=True):
        unit = 64 if kind in ("array", "tensor") else 8
        content += bytes(-(start + len(content)) % unit) + payload
    head = struct.pack("<Q4sHHIIQ", 0, b"FLrc", 4, 0, len(text), len(words), start + len(content))
    return head + text.ljust(at - 32, b"\0") + struct.pack(f"<{len(words)}Q", *words) + content


def record_kinds(node: Any) -> Iterator[str]:
    """The kind of each node, in order."""
    yield node[0]
    children = node[-1] if node[0] in ("tuple", "list") else []
    children = [child for _, child in node[-1]] if node[0] == "dict" else children
    for child in children:
        yield from record_kinds(child)


def array(dtype: str, shape: Any = (1,), content: bytes = bytes(8)) -> bytes:
    return forged(["array", dtype, shape], content)


SAMPLES: dict[str, Callable[[], bytes]] = {
    # code
    "a class": lambda: forged(["namedtuple", "os", "system", ["command"], [["str"]]], b"touch attacked"),
    "an unknown object": lambda: forged(["object", "builtins:eval", [["x", ["str"]]]], b"1"),
    "objects in an array": lambda: array("|O"),
    "objects in a structure": lambda: array("[('a', '|O')]"),
    "code in a dtype": lambda: array("[__import__('os').system('touch attacked')]"),
    # what ends processes
    "a dtype that divides by zero": lambda: array("M8[Y/0]"),
    "one in a structure": lambda: array("[('a', '<M8[Y/0]')]"),
    "one in a structure in it": lambda: array("[('a', [('b', ('<M8[Y/0]', (1,)))])]"),
    "one of a scalar": lambda: forged(["scalar", "m8[s/0]"], bytes(8)),
    "a dtype that is no Python": lambda: array("f4,("),
    "a dtype of many brackets": lambda: array("[" * 10_000),
    "a spec of many brackets": lambda: forged(["list", [["none"]] * 9], *[b""] * 9).replace(b"none", b"[[[["),
    "70 lists in each other": lambda: forged(json.loads('["list",[' * 70 + '["none"]' + "]]" * 70), b""),
    # memory
    "a shape of too many bytes": lambda: array("|u1", [0, 1 << 47, 1 << 47], b""),
    "a shape of too many axes": lambda: array("|u1", [1] * 65),
    "a negative shape": lambda: array("|u1", [-2, -4]),
    "an element of 2 gigabytes": lambda: array("|V2147483647"),
    "a kind that there is not": lambda: forged(["image"], bytes(8)),
    "text that is no UTF-8": lambda: forged(["str"], b"\xff"),
    "fewer bytes than the shape has": lambda: forged(["array", "<f4", [4]], bytes(15)),
}  # fmt: skip


def read_sample(_: None, content: bytes) -> str:
    """What comes of a record."""
    try:
        return f"returned {records.decode(memoryview(content))!r:.100}"
    except CacheError as error:
        return type(error).__name__


def limited() -> tuple[None, None]:
    """Starts the child of `reader`."""
    read_sample(None, array("<i8"))
    pack(np.arange(3))  # imports torch
    leave_address_space(SPARE_BYTES)
    return None, None


@pytest.mark.parametrize("name", SAMPLES)
def test_a_forged_sample_is_an_error_of_the_cache(name: str, reader: Job) -> None:
    """No code is run, no class is taken, and no memory for what a record claims."""
    assert reader.ask(read_sample, SAMPLES[name]()) in ("CacheCorruptError", "CacheError")


NOTES = [
    *(b"", b"[" * 100_000, b"(" * 100_000, b"-" * 100_000 + b"1", b"1" * 9_999, b"{[]: 1}", b"eval", b"\xff"),
]


@pytest.mark.parametrize(
    "forge",
    [
        *(lambda name=name: SAMPLES[name]() for name in SAMPLES),
        *(lambda note=note: records.encode((np.arange(3), note)) for note in NOTES),
        lambda: records.encode((5, b"null")),
    ],
)
def test_a_forged_file_is_not_stored(forge: Any, tmp_path: Path) -> None:
    """With its right checksum. It is decoded again: nothing is raised into a training."""
    files, key = DecodedFiles(open_files(str(tmp_path / "files"))), key_of(2)
    assert files.put(key_of(1), np.arange(300), None)
    record = bytearray(forge())
    record[:8] = xxhash.xxh3_64_digest(record[8:], records.seed_of(key))
    assert records.is_intact(record, key)
    files.store.put(key, [record])
    files.store.close()
    assert files.get(key) is None
    found: Any = files.get(key_of(1))
    assert found.array.tolist() == list(range(300))


def block(kind: str, dtype: str, shape: Any, strides: Any, origin: int = 0) -> tuple[Any, ...]:
    """The note of a result of 64 bytes."""
    return "\0block", kind, dtype, shape, strides, 0, 64, origin, True


RESULTS: dict[str, Any] = {
    "addresses as objects": block("ndarray", "|O", (8,), (8,)),
    "a dtype that divides by zero": block("ndarray", "M8[Y/0]", (8,), (8,)),
    "a dtype that is a function": block("Tensor", "load", (64,), (1,)),
    "a dtype that torch imports": block("Tensor", "_dynamo", (64,), (1,)),
    "a dtype that is a list": block("ndarray", ["|u1"], (64,), (1,)),
    "a tensor of one byte for all": block("Tensor", "uint8", (64,), (0,)),
    "a tensor with a terabyte between its elements": block("Tensor", "uint8", (64,), (1 << 40,)),
    "a tensor of 8 gigabytes": block("Tensor", "uint8", (1 << 33,), (1,)),
    "a tensor of negative sides": block("Tensor", "uint8", (-8, -8), (8, 1)),
    "an array of one byte for gigabytes": block("ndarray", "|u1", (1 << 34,), (0,)),
    "an array behind its memory": block("ndarray", "|u1", (64,), (1,), 32),
    "an array before its memory": block("ndarray", "|u1", (64,), (1,), -8),
    "an array of fewer bytes": block("ndarray", "|u1", (32,), (1,)),
    "too few words": ("\0block",),
    "too few words in a list": [1, ("\0block", "ndarray")],
}


def read_result(_: None, note: Any, path: str) -> list[Any]:
    """What comes of a result with this note: twice, and whether something was imported."""
    cache = DecodeCache(files := DecodedFiles(open_files(path)), verify_share=0)
    identity = Identity((b"content", 1))
    known: Any = files.known_as(identity, None)
    files.put(digest("result", "kind", known.parts, ()) or b"", np.arange(64, dtype=np.uint8), note)
    modules = set(sys.modules)
    return [
        *(cache.array("kind", lambda: identity, (), None, lambda: "decoded") for _ in range(2)),
        {name for name in set(sys.modules) - modules if name.startswith("torch._dynamo")},
    ]


@pytest.mark.parametrize("name", RESULTS)
def test_a_forged_note_of_a_result_is_not_believed(name: str, tmp_path: Path, reader: Job) -> None:
    """The file is decoded again. No memory is read, written or taken as the note claims."""
    assert reader.ask(read_result, RESULTS[name], str(tmp_path / "files")) == ["decoded"] * 2 + [set()]


def test_the_tables_are_read_by_the_reader(reader: Job, tmp_path: Path) -> None:
    """What is not forged comes back, so that the tests above say something."""
    assert reader.ask(read_sample, array("<i8")) == "returned array([0])"
    for number, kind in enumerate(["ndarray", "Tensor"]):
        note = block(kind, ["|u1", "uint8"][number], (4, 16), (1, 4))
        found = reader.ask(read_result, note, str(tmp_path / kind))
        assert [np.asarray(result).T.tobytes() for result in found[:2]] == [bytes(range(64))] * 2
