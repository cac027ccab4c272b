"""Reports about the samples that a build leaves out: a line of JSON for each sample."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fastload.batch.failed_sample import FailedSample
from fastload.cache.lmdb.description import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable

_FIELDS = ("index", "path", "type", "reason", "worker")


def report_text(samples: Iterable[FailedSample]) -> str:
    """The report about these samples."""
    return "".join(json.dumps({name: getattr(sample, name) for name in _FIELDS}) + "\n" for sample in samples)


def read_report(path: str) -> list[FailedSample]:
    """The samples in the report at a path; a report that does not exist is empty."""
    try:
        return parse_report(Path(path).read_text(errors="replace"))
    except FileNotFoundError:
        return []


def parse_report(text: str) -> list[FailedSample]:
    """The samples in a report; damaged lines are left out."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            sample = FailedSample(**parse_json(line))
            if type(sample.index) is int:
                found.append(sample)
    return found
