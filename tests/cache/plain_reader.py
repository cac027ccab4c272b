"""Reads caches on disk without fastload; docs/cache-format.md describes them, and links to this file."""

import ast
import json
import struct

import lmdb
import numpy as np

STORED_AS = {"bfloat16": "<i2", "complex32": "<i4"}  # tensors of dtypes that NumPy lacks


def read_cache(path):
    """What the cache at a path says of itself, and each key and value in it, of samples by their index."""
    with (
        lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        meta = json.loads(transaction.get(b"meta").splitlines()[0])
        if meta["version"] != 7:
            raise ValueError(f"{path} is of another format")
        is_of_samples = meta["kind"] == "samples"
        values = {
            int.from_bytes(key, "big") if is_of_samples else key: read_record(record)
            for key, record in transaction.cursor()
            if key != b"meta"
        }
    return meta, values


class Floats(ast.NodeTransformer):
    """Lets a literal have inf and nan."""

    def visit_Name(self, node):
        return ast.Constant(float(node.id))


def read_note(text):
    """What a reader noted beside an array: the value of a literal of Python."""
    return ast.literal_eval(Floats().visit(ast.parse(text, mode="eval")))


def read_record(record):
    """The value in a record; a tensor as an array."""
    place, spec_bytes, count = struct.unpack_from("<HII", record, 14)
    at = -(-(32 + spec_bytes) // 8) * 8
    lengths = iter(struct.unpack_from(f"<{count}Q", record, at))
    at += 8 * count

    def read(kind, *more):
        nonlocal at
        if kind in ("tuple", "list"):
            return {"tuple": tuple, "list": list}[kind](read(*node) for node in more[0])
        if kind == "dict":
            return {name: read(*node) for name, node in more[0]}
        unit = 64 if kind in ("array", "tensor") else 8
        start = -(-(place + at) // unit) * unit - place
        at = start + next(lengths)
        return read_leaf(record[start:at], kind, *more)

    return read(*json.loads(record[32 : 32 + spec_bytes]))


def read_leaf(payload, kind, dtype="", shape=()):
    """One value."""
    if kind in ("array", "tensor", "scalar"):
        name = STORED_AS.get(dtype, "|u1" if dtype.startswith("float8") else dtype)
        array = np.ndarray(shape, name, payload or bytes(64))
        return array[()] if kind == "scalar" else array
    if kind in ("str", "str_"):
        return payload.decode("utf-8", "surrogatepass")
    if kind == "int":
        return int.from_bytes(payload, "little", signed=True)
    if kind == "float":
        return struct.unpack("<d", payload)[0]
    return {"bool": payload == b"\1", "none": None}.get(kind, payload)
