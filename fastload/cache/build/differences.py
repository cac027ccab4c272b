"""Compares the plans of two caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastload.cache.fingerprint import Fingerprint

if TYPE_CHECKING:
    from fastload.cache.lmdb.description import Plan


def source_differences(cached: Plan, fingerprint: Fingerprint | None) -> list[str] | None:
    """Which parts of the fingerprints differ; None if one of the two has no fingerprint."""
    if fingerprint is None or cached.parts is None:
        return None
    return fingerprint.differences(Fingerprint(cached.parts))


def why_different(found: Plan, plan: Plan) -> str | None:
    """The differences that prevent a build from continuing another build; None if it can continue.

    Args:
        found: The plan of the files that are there.
        plan: The plan of this build.
    """
    fingerprint = None if plan.parts is None else Fingerprint(plan.parts)
    differences = source_differences(found, fingerprint)
    if differences:
        return "; ".join(differences)
    names = ["num_samples", "num_shards", "codec", "quality"]
    if differences is None:
        names += ["spec", "crc32"]
    changed = [
        f"{name} was {getattr(found, name)} and is now {getattr(plan, name)}"
        for name in names
        if getattr(found, name) != getattr(plan, name)
    ]
    return "; ".join(changed) or None
