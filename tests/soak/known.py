"""The known defects, and the cases that meet them. A change that mends a defect removes its row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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


KNOWN: tuple[Defect, ...] = ()


def known_defect(case: Case) -> str | None:
    """The name of the first defect that the case meets, or None."""
    return next((defect.name for defect in KNOWN if defect.meets(case)), None)
