"""Fingerprints: named parts that identify a cache's samples, and the name by which other processes find it.

A false match would feed wrong images to a training run, so a fingerprint exists only in two cases:

1. The dataset has a method `fingerprint()`, which returns a str, or a dict of str with named parts. None
   means that the dataset cannot identify its samples.
2. The user passes `cache_key=`, which promises that this key always means these samples.

torch's Subset of such a dataset also has a fingerprint. Any other dataset has none, and each process that
makes a cache of it in RAM has its own. A fingerprint does not cover the code of a custom `__getitem__`: it
stays the same when that code changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastload.cache.records import FORMAT_VERSION
from fastload.images.listing import DIGEST_BYTES

KEY_PART = "cache_key"
_READS = frozenset({"__getitem__", "__call__", "__getattribute__"})


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the samples of a cache.

    Attributes:
        parts: The value of each part, by the part's name; equal parts mean equal samples.
        key: The user's key, if there is one.
        label: The dataset's class and folder, for people; not compared.
        needs_key: Whether the key alone tells these samples from others; not compared.
    """

    parts: Mapping[str, str] = field(hash=False)
    key: str | None = None
    label: str = field(default="", compare=False)
    needs_key: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        """The name by which other processes find the cache: a digest of the key, or else of all parts."""
        return digest_of(self.parts if self.key is None else ["key", self.key])

    @property
    def parts_in_file(self) -> dict[str, str]:
        """What a file says about the samples in it: the parts, and the key."""
        return dict(self.parts) if self.key is None else {**self.parts, KEY_PART: self.key}

    def differences(self, other: Fingerprint) -> list[str]:
        """The differences, one clause per part: `size is "256" here and "224" there`."""
        differences = []
        parts = {*self.parts, *other.parts}
        if self.parts.get("files") != other.parts.get("files"):
            parts.discard("num_samples")  # they have the number
        for part in sorted(parts):
            here, there = self.parts.get(part), other.parts.get(part)
            if here != there:
                differences.append(f"{part} is {_shown(here)} here and {_shown(there)} there")
        return differences


def fingerprint_of(
    dataset: Any, *, key: str | None = None, pre_transform: Any | None = None
) -> Fingerprint | None:
    """The fingerprint of a dataset's samples after `pre_transform`; None without a fingerprint() and a key.

    Args:
        dataset: Map-style.
        key: The user's name for the samples.
        pre_transform: The deterministic part that runs before the cache: an albumentations pipeline, an
            object with a `fingerprint()`, or any other callable, which requires `key`.

    Raises:
        TypeError: `key` is not a str, or a `fingerprint()` does not return a str or a dict of str.
        ValueError: `key` is empty.
    """
    check_key(key)
    own = _source_parts(dataset)
    prepared = {} if pre_transform is None else _pre_transform_parts(pre_transform)
    needs_key = own is None or prepared is None
    if key is None and needs_key:
        return None
    if prepared is None:
        prepared = {"pre_transform": _qualified_name(pre_transform)}
    parts = {**(own or {}), **prepared, "num_samples": str(len(dataset)), "format": str(FORMAT_VERSION)}
    return Fingerprint(parts, key, _label_of(dataset), needs_key)


def _label_of(dataset: Any) -> str:
    """The class of a dataset, and the file or folder that it reads if an attribute says so."""
    attributes = getattr(_within(dataset), "__dict__", {})
    paths = (attributes.get(name) for name in ("root", "path"))
    path = next((os.fsdecode(path) for path in paths if isinstance(path, (str, os.PathLike))), "")
    label = f"{type(dataset).__name__}({path!r})" if path else type(dataset).__name__
    return label.encode(errors="backslashreplace").decode()


def _within(dataset: Any) -> Any:
    """The dataset of which this is a subset, or a subset of a subset."""
    from torch.utils.data import Subset  # here: as below

    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def check_key(key: object) -> None:
    """Check the user's name for the samples.

    Raises:
        TypeError: It is neither a str nor None.
        ValueError: It is empty.
    """
    if key is not None and not isinstance(key, str):
        raise TypeError(f"cache_key should be a str, but got {key!r}")
    if key == "":
        raise ValueError(
            "cache_key is empty: pass a name that always means these samples, such as 'photos-v1'"
        )


def _covers_code(owner: Any) -> bool:
    """Whether the class with `fingerprint()` has all code that runs: no subclass overrides a part of it."""
    bases = type(owner).__mro__
    number = next((number for number, base in enumerate(bases) if "fingerprint" in vars(base)), None)
    if number is None:  # it is that of another object, to which attributes are passed on
        return False
    return not any(
        name in _READS
        or (not name.startswith("__") and hasattr(bases[number], name) and hasattr(value, "__get__"))
        for base in bases[:number]
        for name, value in vars(base).items()
    )


def why_private(dataset: Any, pre_transform: Any | None) -> str:
    """Why other processes do not find a cache of these samples without a key, and what to do about it."""
    where = type(_within(dataset)).__name__
    if pre_transform is not None:
        where += f" and {getattr(pre_transform, '__qualname__', type(pre_transform).__name__)}"
    return (
        f"no fingerprint() covers all code and samples of {where}: add one, or pass cache_key='...', to "
        "share it with other ranks and jobs"
    )


def digest_of(value: Any) -> str:
    """A short digest of any JSON value; the order of a dict's keys does not matter."""
    text = json.dumps(dict(value) if isinstance(value, Mapping) else value, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8"), digest_size=DIGEST_BYTES).hexdigest()


def _source_parts(dataset: Any) -> dict[str, str] | None:
    from torch.utils.data import Subset  # here: reading a fingerprint does not need torch

    if type(dataset) is Subset:
        inner = _source_parts(dataset.dataset)
        return None if inner is None else {**inner, **_subset_part(inner, dataset.indices)}
    given = _given_parts(dataset) if _covers_code(dataset) else None
    return None if given is None else {"dataset": _qualified_name(type(dataset)), **given}


def _subset_part(inner: Mapping[str, str], indices: Any) -> dict[str, str]:
    name = "subset"
    while name in inner:  # a subset of a subset
        name += " of subset"
    numbers = [int(index) for index in indices]
    return {name: f"{len(numbers)} samples, digest {digest_of(numbers)}"}


def _given_parts(owner: Any) -> dict[str, str] | None:
    """The result of a `fingerprint()` method, as parts; None if it returned None."""
    given = owner.fingerprint()
    if given is None:
        return None
    parts = dict(given) if isinstance(given, Mapping) else {"fingerprint": given}
    for part, value in parts.items():
        if not isinstance(part, str) or not isinstance(value, str):
            raise TypeError(
                f"{type(owner).__name__}.fingerprint() should return a str or a dict of str, but returned "
                f"{given!r}"
            )
    return parts


def _pre_transform_parts(pre_transform: Any) -> dict[str, str] | None:
    """The parts of a fingerprint for the deterministic part; None if it cannot be identified."""
    if callable(getattr(pre_transform, "fingerprint", None)):
        given = _given_parts(pre_transform) if _covers_code(pre_transform) else None
        return None if given is None else {f"pre_transform {part}": value for part, value in given.items()}
    from fastload.augmentation.libraries import library_of  # here: it imports torch

    try:
        description = library_of(pre_transform).description(pre_transform)
        kind = _qualified_name(type(pre_transform))
        return None if description is None else {"pre_transform": f"{kind}, digest {digest_of(description)}"}
    except (TypeError, ValueError):  # a part of it has no digest
        return None


def _qualified_name(kind: Any) -> str:
    """The module and name of a class or function, or of the class of any other object."""
    named = kind if hasattr(kind, "__qualname__") else type(kind)
    # multiprocessing imports the main script under another name in spawned workers.
    module = "__main__" if named.__module__ == "__mp_main__" else named.__module__
    return f"{module}.{named.__qualname__}"


def _shown(value: str | None) -> str:
    return "nothing" if value is None else f'"{value}"'
