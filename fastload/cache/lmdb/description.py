"""Writes the description in a finished file, and reads it with strict checks.

A file can come from an untrusted source, and its checksums protect only against accidents. So every field
must have the type and range of the attributes below; otherwise reading raises.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from fastload.cache.fingerprint import KEY_PART, Fingerprint
from fastload.errors import CacheMismatchError
from fastload.system.checks import (
    TEXT,
    Check,
    check_fields,
    dict_of,
    instance_of,
    integer,
    list_of,
    one_of,
    optional,
)

FORMAT_VERSION = 4
MAX_TEXT_BYTES = 64 << 20  # enough for the names of millions of classes

_MAX_SAMPLES = 1 << 48
_MAX_SECONDS = 250_000_000_000  # in the year 9892, which calendars can still represent
_32_BITS = 1 << 32
_COMPARED = {
    "num_samples": "number of samples",
    "spec": "structure of sample 0",
    "crc32": "content of sample 0",
}


@dataclass(frozen=True)
class Plan:
    """The facts about a cache; known before the first sample is written.

    Attributes:
        build_id: New for each cache.
        num_samples: Number of samples of the dataset.
        spec: Structure of sample 0, as JSON; None if the cache is empty or sample 0 could not be read.
        crc32: Checksum of the record of sample 0.
        parts: Parts of the samples' fingerprint; None if the dataset had no fingerprint.
        classes: Names of the dataset's classes, if it has any.
        libraries: Versions of the libraries that wrote the cache, by name.
        created_s: When the build began, in seconds since 1970.
    """

    build_id: str
    num_samples: int
    spec: str | None
    crc32: int | None
    parts: dict[str, str] | None
    classes: list[str] | None
    libraries: dict[str, str]
    created_s: float


def why_different(existing: Plan, plan: Plan) -> str | None:
    """How the samples or settings of a cache differ from those of a build; None if they do not.

    Samples are compared by both fingerprints, or else by sample 0. Where both have a key, the structure of
    sample 0 is compared, too: nothing else shows that a class was edited.

    Args:
        existing: The plan of the existing cache.
        plan: The plan of this build.
    """
    fingerprints = [plan.parts or {}, existing.parts or {}]  # their parts are not said twice
    names = [name for name in _COMPARED if not all(name in parts for parts in fingerprints)]
    differences: list[str] = []
    if existing.parts is not None and plan.parts is not None:
        both_have_keys = KEY_PART in plan.parts and KEY_PART in existing.parts
        here, there = (
            {name: part for name, part in parts.items() if name != KEY_PART or both_have_keys}
            for parts in (plan.parts, existing.parts)
        )
        differences = Fingerprint(here).differences(Fingerprint(there))
        names = names[:-1] if both_have_keys else names[:-2]
    for name in names:
        value, earlier = getattr(plan, name), getattr(existing, name)
        if name in ("spec", "crc32") and None in (value, earlier):
            continue  # sample 0 could not be read
        if value != earlier:
            differences.append(f"the {_COMPARED[name]} is {value} here and {earlier} there")
    return "; ".join(differences) or None


def description_text(plan: Plan, table_crc32: int) -> bytes:
    """What a finished file says about itself: JSON in ASCII.

    Args:
        plan: The plan of the cache.
        table_crc32: Checksum of the table of its records.
    """
    fields = {"version": FORMAT_VERSION, "plan": asdict(plan), "table_crc32": table_crc32}
    return json.dumps(fields).encode("ascii")


def parse_description(text: bytes) -> tuple[Plan, int]:
    """The plan and the checksum of the table, from the text of a description or from any other.

    Raises:
        ValueError: The text is not a description; the error gives the reason.
        CacheMismatchError: The description has a different format version. The caller adds the path.
    """
    try:
        fields: Any = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    version = fields.get("version") if isinstance(fields, dict) else None
    if type(version) is not int:
        raise ValueError("it has no format version")
    if version != FORMAT_VERSION:  # it determines the meaning of all other fields
        raise CacheMismatchError(f"is a cache of format {version}, but this release reads {FORMAT_VERSION}")
    check_fields(fields, _DESCRIPTION_FIELDS, "the description")
    check_fields(fields["plan"], _PLAN_FIELDS, "the plan")
    return Plan(**fields["plan"]), fields["table_crc32"]


# --- fields ----------------------------------------------------------------------------------------------


_PLAN_FIELDS = {
    "build_id": TEXT,
    "num_samples": integer(0, _MAX_SAMPLES),
    "spec": optional(TEXT),
    "crc32": optional(integer(0, _32_BITS)),
    "parts": optional(dict_of(TEXT)),
    "classes": optional(list_of(TEXT)),
    "libraries": dict_of(TEXT),
    "created_s": Check(
        "a time in seconds", lambda s: type(s) in (int, float) and 0 <= s < _MAX_SECONDS
    ),  # not NaN
}
_DESCRIPTION_FIELDS = {
    "version": one_of(FORMAT_VERSION),
    "plan": instance_of(dict),
    "table_crc32": integer(0, _32_BITS),
}
