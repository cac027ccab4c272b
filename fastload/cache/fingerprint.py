"""What a cache was made of: named parts that can be compared, and the name by which others find it.

A wrong match would be a wrong image in somebody's training, so there is a fingerprint only where someone
vouches for it:

1. the dataset says what it is: `fingerprint()` gives a str, or a dict of str that names the parts;
2. or the user does, by `key=`: a promise that this key always means these samples.

torch's Subset of such a dataset has one too. Every other dataset has none: its cache is private. The code of
a user's own `__getitem__` is no part of any fingerprint: an edit of it is not seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastload.cache.record import FORMAT_VERSION

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Fingerprint:
    """What the samples of a cache were made of.

    Attributes:
        parts: What each part is, by its name; equal parts mean equal samples.
        key: The user's own name for it, if there is one.
    """

    parts: Mapping[str, str] = field(hash=False)
    key: str | None = None

    @property
    def name(self) -> str:
        """Under which others find the cache: the digest of the key, or else of all parts."""
        return digest_of(self.parts if self.key is None else ["key", self.key])

    def differences(self, other: Fingerprint) -> list[str]:
        """What differs, one clause a part: `size is "256" here and "224" there`."""
        found = []
        for part in sorted({*self.parts, *other.parts}):
            here, there = self.parts.get(part), other.parts.get(part)
            if here != there:
                found.append(f"{part} is {_shown(here)} here and {_shown(there)} there")
        return found


def fingerprint_of(dataset: Any, *, key: str | None = None, prepare: Any | None = None) -> Fingerprint | None:
    """The fingerprint of a dataset's samples after `prepare`; None if nobody vouches for it.

    Args:
        dataset: Map-style.
        key: The user's name for the samples.
        prepare: The deterministic part that runs before the cache: an albumentations pipeline, something
            with a `fingerprint()` of its own, or any callable, which only `key` can vouch for.

    Raises:
        TypeError: `key` is no str, or a `fingerprint()` gives neither a str nor a dict of str.
        ValueError: `key` is empty.
    """
    if key is not None and not isinstance(key, str):
        raise TypeError(f"key should be a str, but got {key!r}")
    if key == "":
        raise ValueError("key is empty: give a name that always means these samples, such as 'photos-v1'")
    own = _source_parts(dataset)
    prepared = {} if prepare is None else _prepare_parts(prepare)
    if key is None and (own is None or prepared is None):
        return None
    if prepared is None:
        prepared = {"prepare": _qualified_name(prepare)}
    parts = {**(own or {}), **prepared, "num_samples": str(len(dataset)), "format": str(FORMAT_VERSION)}
    return Fingerprint(parts, key)


def digest_of(value: Any) -> str:
    """A short digest of anything that JSON can hold; equal for equal dicts, whatever their order."""
    text = json.dumps(dict(value) if isinstance(value, Mapping) else value, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8"), digest_size=_DIGEST_BYTES).hexdigest()


def _source_parts(dataset: Any) -> dict[str, str] | None:
    from torch.utils.data import Subset  # here: reading a fingerprint does without torch

    if type(dataset) is Subset:
        inner = _source_parts(dataset.dataset)
        return None if inner is None else {**inner, **_subset_part(inner, dataset.indices)}
    if not callable(getattr(dataset, "fingerprint", None)):
        return None
    return {"dataset": _qualified_name(type(dataset)), **_given_parts(dataset, "fingerprint")}


def _subset_part(inner: Mapping[str, str], indices: Any) -> dict[str, str]:
    name = "subset"
    while name in inner:  # a subset of a subset
        name += " of subset"
    numbers = [int(index) for index in indices]
    return {name: f"{len(numbers)} samples, digest {digest_of(numbers)}"}


def _given_parts(owner: Any, name: str) -> dict[str, str]:
    """What a `fingerprint()` method says, as parts."""
    given = owner.fingerprint()
    parts = dict(given) if isinstance(given, Mapping) else {name: given}
    for part, value in parts.items():
        if not isinstance(part, str) or not isinstance(value, str):
            raise TypeError(
                f"{type(owner).__name__}.fingerprint() should give a str or a dict of str, but gave {given!r}"
            )
    return parts


def _prepare_parts(prepare: Any) -> dict[str, str] | None:
    if callable(getattr(prepare, "fingerprint", None)):
        return {f"prepare {part}": value for part, value in _given_parts(prepare, "fingerprint").items()}
    if is_albumentations(prepare):
        import albumentations

        try:
            description = albumentations.to_dict(prepare)
            return {"prepare": f"{_qualified_name(type(prepare))}, digest {digest_of(description)}"}
        except (NotImplementedError, TypeError, ValueError):  # it holds a function, which nobody can name
            return None
    return None


def is_albumentations(value: Any) -> bool:
    """Whether a value is an albumentations pipeline or transform, without importing albumentations."""
    return any(base.__module__.partition(".")[0] == "albumentations" for base in type(value).__mro__)


def _qualified_name(kind: Any) -> str:
    named = kind if hasattr(kind, "__qualname__") else type(kind)
    # multiprocessing imports the main script under another name in spawned workers.
    module = "__main__" if named.__module__ == "__mp_main__" else named.__module__
    return f"{module}.{named.__qualname__}"


def _shown(value: str | None) -> str:
    return "nothing" if value is None else f'"{value}"'
