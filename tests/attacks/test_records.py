"""Records of both caches on disk that were forged, with right checksums: nothing is run, opened or allocated.

A forged record raises an error of the cache, or counts as not stored. What it claims takes no memory.
"""

from __future__ import annotations

import json
import struct
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fastload.cache import records
from fastload.cache.disk import records as disk_records
from fastload.cache.disk.disk_store import DiskFileStore
from fastload.cache.disk.rows import FILE, PIXELS, Row
from fastload.cache.disk.segments import SegmentWriter
from fastload.errors import CacheError
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
    kinds = [kind for kind in record_kinds(spec) if kind not in ("tuple", "list", "dict", "namedtuple")]
    content, start = b"", at + 8 * len(words)
    for kind, payload in zip(kinds, payloads, strict=True):
        unit = 64 if kind in ("array", "tensor") else 8
        content += bytes(-(start + len(content)) % unit) + payload
    head = struct.pack("<4sHHQIIQ", b"FLrc", 3, 0, 0, len(text), len(words), start + len(content))
    return head + text.ljust(at - 32, b"\0") + struct.pack(f"<{len(words)}Q", *words) + content


def record_kinds(node: Any) -> Iterator[str]:
    """The kind of each node, in order."""
    yield node[0]
    children = node[-1] if node[0] in ("tuple", "list", "namedtuple") else []
    children = [child for _, child in node[-1]] if node[0] == "dict" else children
    for child in children:
        yield from record_kinds(child)


def named(module: str, name: str) -> bytes:
    return forged(["namedtuple", module, name, ["command"], [["str"]]], b"touch attacked")


def array(dtype: str, shape: Any = (1,), content: bytes = bytes(8)) -> bytes:
    return forged(["array", dtype, shape], content)


SAMPLES: dict[str, Callable[[], bytes]] = {
    # code
    "a class that runs commands": lambda: named("os", "system"),
    "another one": lambda: named("subprocess", "Popen"),
    "a method of a class": lambda: named("os", "system.__call__"),
    "a module that is not imported": lambda: named("antigravity", "x"),
    "a tuple class without fields": lambda: named("os", "stat_result"),
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


# Heads of records of decoded files; each is read with no elements, and with 8 bytes of them.
HEADS: dict[str, str] = {
    "objects": '["t","|O",["t",1],"C",null]',
    "objects in a structure": '["t","f4,O",["t",1],"C",null]',
    "objects in a table": '["t",["d","names",["l","a"],"formats",["l","O"]],["t",1],"C",null]',
    "a list as a dtype": '["t",["l",["t","a","f8"]],["t",1],"C",null]',
    "no Python": '["t","f4,(",["t",1],"C",null]',
    "a division by zero": '["t","M8[Y/0]",["t",1],"C",null]',
    "no dtype": '["t",null,["t",1],"C",null]',
    "no size": '["t","<U0",["t",8],"C",null]',
    "an element of 4 terabytes": '["t","<U999999999999",["t",0],"C",null]',
    "a negative shape": '["t","|u1",["t",-2,-4],"C",null]',
    "a shape to be guessed": '["t","|u1",["t",-1],"C",null]',
    "a shape beyond all numbers": '["t","|u1",["t",1180591620717411303424,0,8],"C",null]',
    "a shape of floats": '["t","|u1",["t",8.0],"C",null]',
    "too many axes": f'["t","|u1",["t"{",1" * 100}],"C",null]',
    "an order that there is not": '["t","|u1",["t",8],"Z",null]',
    "many brackets": "[" * 100_000 + "]" * 100_000,
    "many digits": "1" * 9_999,
    "a list without a letter": '["t","|u1",["t",8],"C",[]]',
    "a key that is no key": '["t","|u1",["t",8],"C",["d",["l"],1]]',
    "bytes that are a number": '["t","|u1",["t",8],"C",["b",5]]',
    "too few values": '["t","|u1",["t",8],"C"]',
    "an object": '{"dtype":"|u1"}',
}


def read_file(_: None, text: str) -> str:
    """What comes of a record of a decoded file."""
    head = text.encode().ljust(-(-len(text) // 64) * 64, b"\0")
    answers = set()
    for elements in (b"", bytes(8)):
        checksum = disk_records._checksum(head, np.frombuffer(elements, np.uint8))
        found = disk_records.decode(memoryview(head + elements), len(text), checksum)
        answers.add("not stored" if found is None else f"returned {found!r:.100}")
    return " and ".join(sorted(answers))


def limited() -> tuple[None, None]:
    """Starts the child of `reader`."""
    for decode in (records, disk_records):  # what is imported at the first use is there
        assert decode
    read_sample(None, array("<i8"))
    leave_address_space(SPARE_BYTES)
    return None, None


@pytest.mark.parametrize("name", SAMPLES)
def test_a_forged_sample_is_an_error_of_the_cache(name: str, reader: Job) -> None:
    """No code is run, no class is taken that is no namedtuple, and no memory for what a record claims."""
    assert reader.ask(read_sample, SAMPLES[name]()) in ("CacheCorruptError", "CacheError")


@pytest.mark.parametrize("name", HEADS)
def test_a_forged_file_is_not_stored(name: str, reader: Job) -> None:
    """It is decoded again: nothing is raised into a training."""
    assert reader.ask(read_file, HEADS[name]) == "not stored"


def test_the_tables_are_read_by_the_reader(reader: Job) -> None:
    """What is not forged comes back, so that the two tests above say something."""
    assert reader.ask(read_sample, array("<i8")) == "returned array([0])"
    assert reader.ask(read_sample, array("[('a', '<i4', (2,))]")).startswith("returned array(")
    assert "returned Stored" in reader.ask(read_file, '["t","<M8[25s]",["t",1],"C",null]')


def test_no_module_is_imported_for_a_record() -> None:
    """A namedtuple's class is looked up among the modules that the program has imported itself."""
    assert "antigravity" not in sys.modules  # which opens a browser
    assert read_sample(None, named("antigravity", "x")) == "CacheError"
    assert "antigravity" not in sys.modules


# --- rows -------------------------------------------------------------------------------------------------

ROWS: dict[str, tuple[int, int, int, int]] = {  # offset, bytes, bytes of the head, checksum
    "far behind the file": (1 << 62, 100, 64, 0),
    "longer than the file": (0, 1 << 62, 64, 0),
    "around the end of all numbers": ((1 << 64) - 1, 1 << 63, 64, 0),
    "no bytes": (0, 0, 0, 0),
    "a head longer than the record": (0, 64, 1 << 62, 0),
    "a head that is none": (0, 200, 0, 0),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_forged_row_is_not_stored(name: str, tmp_path: Path) -> None:
    """With its right check; what was stored before is still found, and what is stored then is."""
    store = DiskFileStore(str(tmp_path / "files"))
    assert store.put(key_of(1), np.arange(300), None)
    SegmentWriter(store.path).add_row(Row(key_of(2), PIXELS, ROWS[name]))
    again = DiskFileStore(store.path)
    assert again.get(key_of(2)) is None
    found: Any = again.get(key_of(1))
    assert found.array.tolist() == list(range(300))
    assert again.put(key_of(2), np.arange(3), None)
    found = again.get(key_of(2))
    assert found.array.tolist() == [0, 1, 2]


def test_rows_of_an_unknown_kind_are_passed_over(tmp_path: Path) -> None:
    """And a file's row is none of pixels."""
    store = DiskFileStore(str(tmp_path / "files"))
    writer = SegmentWriter(store.path)
    for kind in (0, FILE, 99, (1 << 64) - 1):
        writer.add_row(Row(key_of(3), kind, (0, 1, 2, 3)))
    again = DiskFileStore(store.path)
    assert again.get(key_of(3)) is None
    assert again.num_files == 0
