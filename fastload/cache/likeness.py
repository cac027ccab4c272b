"""What ranks compare before they share a cache without a key: class, length, attributes and some samples.

A false match would feed wrong images to a training run, so each part covers what the others miss:

- Attributes show that ranks hold different parts of one dataset, or different folds, although the compared
  samples are the same.
- Samples show what no attribute does, such as an environment variable. They prove nothing if they are all
  alike, as blank images are.

A needless difference costs only the sharing. Attributes are read after the samples, because datasets open
files and load lists on first access.
"""

from __future__ import annotations

import copyreg
import hashlib
import os
import pickle
import random
import sys
from types import FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.cache.fingerprint import prepare_parts, qualified_name
from fastload.cache.record import FORMAT_VERSION, encode
from fastload.cache.sample_cache import BaseCache
from fastload.memory.shared_list import SharedList

if TYPE_CHECKING:
    from collections.abc import Mapping

_RANDOM_PROBES = 5
_DIGEST_BYTES = 16
_MAX_BYTES = 128 << 20  # of a pickle, and of an array: more would delay the start of training
_ARRAY_PROBES = 1024  # elements of a larger array, evenly spaced

_PLAIN = frozenset({str, int, float, bool, bytes, type(None), tuple, list, dict})
# The state of generators differs between ranks, and deterministic samples do not depend on it. Functions can
# be told apart by name only.
_NAMED = (
    *(type, FunctionType, ModuleType, BaseCache, torch.Generator, random.Random),
    *(np.random.Generator, np.random.BitGenerator, np.random.RandomState),
)


def probed_indices(num_samples: int) -> list[int]:
    """The first, the middle and the last sample, and pseudo-random ones that depend only on the length."""
    chosen = random.Random(num_samples).sample(range(num_samples), min(num_samples, _RANDOM_PROBES))
    return list(dict.fromkeys([0, num_samples // 2, num_samples - 1, *chosen]))


def likeness(dataset: Any, prepare: Any | None, probed: Mapping[int, Any]) -> dict[str, str] | None:
    """The parts in which the datasets of two ranks must be equal; None if the samples are too much alike.

    Args:
        dataset: Map-style.
        prepare: Its deterministic part, if there is one.
        probed: Samples by index; an exception stands for a sample that cannot be read.
    """
    digests = [_digest_of_sample(sample) for sample in probed.values()]
    if 2 * len(set(digests)) <= len(digests):
        return None
    of_prepare: dict[str, str] = {}
    if prepare is not None:
        of_prepare = prepare_parts(prepare) or {"prepare": f"{qualified_name(prepare)}, {_digest(prepare)}"}
    file = getattr(sys.modules.get(type(dataset).__module__), "__file__", None) or ""
    attributes = getattr(dataset, "__dict__", None) or {"content": dataset}
    return {
        "class": f"{qualified_name(type(dataset))} in {os.path.realpath(file)}",
        "num_samples": str(len(dataset)),
        "format": str(FORMAT_VERSION),
        **of_prepare,
        **{f"attribute {name}": _digest(value) for name, value in attributes.items()},
        f"samples {', '.join(map(str, probed))}": f"digest {_hex(''.join(digests).encode())}",
    }


def _digest_of_sample(sample: Any) -> str:
    return type(sample).__qualname__ if isinstance(sample, Exception) else _hex(encode(sample))


def _hex(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def _digest(value: Any) -> str:
    """A digest of a value; of an object that contains itself, only its class."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    left_bytes = _MAX_BYTES

    def write(content: bytes | memoryview) -> None:
        nonlocal left_bytes
        digest.update(memoryview(content)[:left_bytes])
        left_bytes -= len(content)
        if left_bytes <= 0:
            raise _EnoughError

    file: Any = SimpleNamespace(write=write)
    pickler = _Pickler(file, protocol=5, buffer_callback=lambda buffer: write(buffer.raw()))
    pickler.fast = True  # an object that occurs twice is pickled twice, so it does not matter whether it does
    try:
        pickler.dump(value)
    except _EnoughError:
        pass
    except Exception:  # noqa: BLE001  # methods of the user's objects can raise anything
        return f"a {qualified_name(type(value))}"
    return f"digest {digest.hexdigest()}"


class _EnoughError(Exception):
    """The pickle is as long as what is compared of it."""


class _Pickler(pickle.Pickler):
    """Pickles equal values as equal bytes, in every process."""

    def persistent_id(self, value: Any) -> Any:
        """What stands for a value in the pickle; None for the value itself."""
        if type(value) in _PLAIN:
            return None
        if isinstance(value, (set, frozenset)):
            return "set", sorted(map(repr, value))  # the order of its strings differs between processes
        if isinstance(value, torch.Tensor):
            return "tensor", str(value.dtype), tuple(value.shape), _digest_of_tensor(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return "array", value.dtype.str, value.shape, _digest_of_array(value)
        return qualified_name(value) if isinstance(value, _NAMED) else None

    def reducer_override(self, value: Any) -> Any:
        """How an object is pickled; of one that cannot be, such as an open file, its class and attributes."""
        if type(value) in copyreg.dispatch_table:
            return NotImplemented
        if isinstance(value, SharedList):  # its own pickle says where the items are, not what they are
            return list, (), None, iter(value)
        try:
            return value.__reduce_ex__(5)
        except Exception:  # noqa: BLE001  # as above
            return str, (qualified_name(type(value)),), getattr(value, "__dict__", None)


def _digest_of_tensor(tensor: torch.Tensor) -> str:
    try:
        return _digest_of_array(tensor.detach().numpy())
    except (TypeError, RuntimeError):  # it is on a GPU, or NumPy lacks its dtype
        return ""


def _digest_of_array(array: np.ndarray[Any, Any]) -> str:
    if array.nbytes > _MAX_BYTES:
        array = array.flat[np.linspace(0, array.size - 1, _ARRAY_PROBES).astype(np.intp)]
    return _hex(array.tobytes())
