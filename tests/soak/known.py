"""The known defects, and the cases that meet them. A change that mends a defect removes its row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.soak.case import LMDB

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.soak.case import Case


class Defect(NamedTuple):
    """A known defect.

    Attributes:
        name: The defect in words.
        meets: Whether a case meets the defect, so that the soak does not run it.
    """

    name: str
    meets: Callable[[Case], bool]


def _starts_by_fork(case: Case) -> bool:
    return case.num_workers > 0 and case.method == "fork"


KNOWN = (
    Defect(
        "a slot is used again while samples that default_collate has made lie in it",
        lambda case: case.kind in ("collated", "looped") and case.shapes != "one" and case.num_workers > 0,
    ),
    Defect(
        "two threads that use one iterator without workers write into the same buffer",
        lambda case: case.mode == "two threads",
    ),
    Defect(
        "in_order=False brings batches through torch's transport",
        lambda case: not case.in_order and case.num_workers > 0,
    ),
    Defect(
        "a forked worker runs the consumer's handler for SIGTERM",
        lambda case: case.handles_sigterm and _starts_by_fork(case),
    ),
    Defect(
        "a state from before the first batch does not bring back an order that torch's own generator draws",
        lambda case: case.mode == "resumes" and case.order == "shuffle",
    ),
    Defect(
        "an exception between an answer and its delivery loses the batch, or the next one never comes",
        lambda case: case.mode == "interrupts",
    ),
    Defect(
        "threads race while a transform is tried out",
        lambda case: (
            case.is_cached
            and case.transform in ("in place", "in place by torch", "as tensor")
            and (case.mode == "side by side" or (case.num_workers > 0 and case.method == "thread"))
        ),
    ),
    Defect(
        "a spawned worker reads no namedtuples through from_cache(), as it has not imported their module",
        lambda case: (
            case.kind == "nest"
            and case.source == "from_cache"
            and case.num_workers > 0
            and case.method == "spawn"
        ),
    ),
    Defect(
        "an array without elements that a transform returns unchanged is read-only",
        lambda case: (
            case.kind == "empties"
            and case.transform == "alias"
            and case.is_cached
            and case.mode in ("writes", "forks", "reads samples")
        ),
    ),
    Defect(
        "a child that is forked while threads read an LMDB cache hangs when it reads the same cache",
        lambda case: (
            case.source in LMDB
            and case.num_workers > 0
            and case.method == "thread"
            and case.mode in ("forks", "interleaves", "resumes")
        ),
    ),
    Defect(
        "a transform that rarely writes in place meets read-only pages",
        lambda case: case.transform == "rarely in place" and case.is_cached,
    ),
)


def known_defect(case: Case) -> str | None:
    """The name of the first defect that the case meets, or None."""
    return next((defect.name for defect in KNOWN if defect.meets(case)), None)
