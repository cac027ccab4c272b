"""Reads caches on disk without fastload; docs/cache-format.md describes them, and links to this file."""

import ast
import json
import struct
import zlib
from pathlib import Path

import lmdb
import numpy as np

STORED_AS = {"bfloat16": "<i2", "complex32": "<i4"}  # tensors of dtypes that NumPy lacks


def read_samples(path):
    """Each index and sample of a cache of samples."""
    data = Path(path).read_bytes()
    text_crc, text_bytes, magic = struct.unpack("<IQ8s", data[-20:])
    end = len(data) - 20 - text_bytes
    fields = json.loads(data[end:-20]) if zlib.crc32(data[end:-20]) == text_crc else {}
    if magic != b"FLlmdb1\0" or fields.get("version") != 4:
        raise ValueError(f"{path} is damaged, or of another format")
    rows = fields["plan"]["num_samples"]
    table = data[end - 16 * rows : end]
    if zlib.crc32(table) != fields["table_crc32"]:
        raise ValueError(f"{path} is damaged")
    starts = np.frombuffer(table, "<i8", rows).tolist()
    sizes, crcs = np.frombuffer(table, "<u4", 2 * rows, 8 * rows).reshape(2, rows).tolist()
    for index in range(rows):
        record = data[starts[index] : starts[index] + sizes[index]]
        if zlib.crc32(record) != crcs[index]:
            raise ValueError(f"{path}: sample {index} is damaged")
        if record:  # else it was left out
            yield index, read_record(record)


def read_record(record):
    """The sample in a record; a tensor as an array."""
    spec_bytes, count = struct.unpack_from("<II", record, 16)
    at = -(-(32 + spec_bytes) // 8) * 8
    lengths = iter(struct.unpack_from(f"<{count}Q", record, at))
    at += 8 * count

    def read(kind, *more):
        nonlocal at
        if kind in ("tuple", "list"):
            return {"tuple": tuple, "list": list}[kind](read(*node) for node in more[0])
        if kind == "dict":
            return {name: read(*node) for name, node in more[0]}
        if kind == "namedtuple":
            return ".".join(more[:2]), dict(zip(more[2], (read(*node) for node in more[3]), strict=True))
        unit = 64 if kind in ("array", "tensor") else 8
        start = -(-at // unit) * unit
        at = start + next(lengths)
        return read_leaf(record[start:at], kind, *more)

    return read(*json.loads(record[32 : 32 + spec_bytes]))


def read_leaf(payload, kind, dtype="", shape=()):
    """One value."""
    if kind in ("array", "tensor", "scalar"):
        name = STORED_AS.get(dtype, "|u1" if dtype.startswith("float8") else dtype)
        descr = ast.literal_eval(name) if name.startswith("[") else name  # the fields of a structure
        array = np.ndarray(shape, np.lib.format.descr_to_dtype(descr), payload or bytes(64))
        return array[()] if kind == "scalar" else array
    if kind in ("str", "str_"):
        return payload.decode("utf-8", "surrogatepass")
    if kind == "int":
        return int.from_bytes(payload, "little", signed=True)
    if kind == "float":
        return struct.unpack("<d", payload)[0]
    return {"bool": payload == b"\1", "none": None}.get(kind, payload)


def read_files(path):
    """Each key, array and note of a cache of decoded files."""
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        if json.loads(txn.get(b"meta"))["version"] != 5:
            raise ValueError(f"{path} is of another format")
        for key, record in txn.cursor():
            if len(key) == 16:
                array, text = read_record(record)
                yield key, array, plain_value(json.loads(text))


def plain_value(value):
    """The value that JSON with tags stands for."""
    if not isinstance(value, list):
        return value
    tag, *parts = value
    if tag == "b":
        return bytes.fromhex(parts[0])
    parts = [plain_value(part) for part in parts]
    if tag == "d":
        return dict(zip(parts[::2], parts[1::2], strict=True))
    return tuple(parts) if tag == "t" else parts
