"""Check values from outside: arguments of users, saved states, descriptions of files.

A `Check` returns a value that it accepts, and raises ValueError for any other. A bool is no number.
"""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.system.notes import short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Check:
    """A test of one value.

    Attributes:
        expected: What the value should be, as it follows "should be" in an error.
        accepts: Whether it is.
    """

    expected: str
    accepts: Callable[[Any], bool]

    def __call__(self, value: Any) -> Any:
        """Return the value.

        Raises:
            ValueError: The value is not accepted.
        """
        if not self.accepts(value):
            raise ValueError(f"should be {self.expected}, but got {short_repr(value)}")
        return value


def integer(first: int, stop: int | None = None) -> Check:
    """An int from `first` on, below `stop`."""
    if stop is None:
        return Check(f"an int of at least {first}", lambda value: type(value) is int and value >= first)
    return Check(
        f"an int from {first} to {stop - 1}", lambda value: type(value) is int and first <= value < stop
    )


def position_of(index: Any, length: int) -> int:
    """An index of a dataset as a number from 0; negative indices count from the end, as in a list.

    Raises:
        IndexError: There is no such sample.
        TypeError: It is no integer.
    """
    position = operator.index(index)
    if not -length <= position < length:
        raise IndexError(f"index {position} is out of range: the dataset has {length} samples")
    return position % length


def one_of(*values: Any, or_callable: bool = False) -> Check:
    """One of some values of built-in types, or None; or, where that is allowed, a function."""
    expected = [repr(value).replace("'", '"') for value in values] + ["a function"] * or_callable
    text = expected[0] if len(expected) == 1 else f"{', '.join(expected[:-1])} or {expected[-1]}"
    return Check(
        text,
        lambda value: (
            any(isinstance(value, type(choice)) and value == choice for choice in values)
            or (or_callable and callable(value))
        ),
    )


def instance_of(kind: type) -> Check:
    """An object of exactly this class."""
    return Check(f"of type {kind.__name__}", lambda value: type(value) is kind)


def optional(check: Check) -> Check:
    """None, or what another check accepts."""
    return Check(f"{check.expected}, or None", lambda value: value is None or check.accepts(value))


def list_of(check: Check) -> Check:
    """A list of values that are each `check.expected`."""
    return Check(
        f"a list whose items are {check.expected}",
        lambda value: type(value) is list and all(map(check.accepts, value)),
    )


def dict_of(check: Check) -> Check:
    """A dict by strings of values that are each `check.expected`."""
    return Check(
        f"a dict whose values are {check.expected}",
        lambda value: (
            type(value) is dict
            and all(type(key) is str for key in value)
            and all(map(check.accepts, value.values()))
        ),
    )


TEXT = instance_of(str)


def check_arguments(arguments: Mapping[str, Any], checks: Mapping[str, Callable[[Any], Any]]) -> None:
    """Check the arguments of a user's call, by name.

    Raises:
        ValueError: A check does not accept its argument; the error begins with the name.
    """
    for name, check in checks.items():
        try:
            check(arguments[name])
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None


def as_int(name: str, value: Any) -> int:
    """An int, or a number that stands for one, such as NumPy's.

    Raises:
        TypeError: It is neither; the error begins with the name of the user's argument.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} should be an int, but got {short_repr(value)}") from None


def as_path(name: str, value: Any) -> str:
    """The text of a path or URL.

    Raises:
        TypeError: It is neither; the error begins with the name of the user's argument.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError(f"{name} should be a path, as a str or a pathlib.Path, but got {short_repr(value)}")
    return path


def check_size(size: Any) -> int | tuple[int, int]:
    """A user's size as plain ints: one side, or height and width.

    Raises:
        TypeError: It is not one or two ints.
        ValueError: A side has no pixel.
    """
    is_pair = isinstance(size, Sequence) and not isinstance(size, (str, bytes))
    try:
        numbers = [operator.index(side) for side in (size if is_pair else [size])]
    except TypeError:
        numbers = []
    if len(numbers) != 1 + is_pair:
        raise TypeError(
            f"size should be an int, or the height and the width, two ints, but got {size!r:.200}"
        )
    if min(numbers) < 1:
        raise ValueError(f"size should be at least 1 pixel, but got {size!r}")
    return (numbers[0], numbers[1]) if is_pair else numbers[0]


def check_iterable(name: str, value: Any, items: str) -> None:
    """Check that a user's argument can be iterated over.

    Raises:
        TypeError: It cannot; the error has the name of the argument, and what its items should be.
    """
    if not hasattr(type(value), "__iter__") and not hasattr(type(value), "__getitem__"):
        raise TypeError(f"{name} should be an iterable of {items}, but got {short_repr(value)}")


def check_fields(fields: Any, checks: Mapping[str, Callable[[Any], Any]], owner: str) -> None:
    """Check that a JSON object has exactly these fields, each with a value that its check accepts.

    Raises:
        ValueError: It does not; the error names the owner and the field.
    """
    if type(fields) is not dict or set(fields) != set(checks):
        raise ValueError(f"{owner} should have the fields {', '.join(checks)}, but is {reprlib.repr(fields)}")
    for name, check in checks.items():
        try:
            check(fields[name])
        except ValueError as error:
            raise ValueError(f"{name} of {owner} {error}") from None
