"""Arguments and options that several commands share, and the functions that parse and check them."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastload.cli.terminal import CommandError, ExitCode
from fastload.system.humanize import did_you_mean
from fastload.system.os_errors import write_errors_as
from fastload.system.paths import cache_path

if TYPE_CHECKING:
    from collections.abc import Callable

# --- paths -----------------------------------------------------------------------------------------------


def cache_argument(name: str, *, is_new: bool = False) -> Callable[[str], str]:
    """A parser of the paths of caches, which become absolute.

    Args:
        name: The name of the argument, for messages.
        is_new: Whether a file is created at the path, so its directory must exist.
    """

    def parse(text: str) -> str:
        if not text:
            raise CommandError(f"{name} is empty: pass a path")
        try:
            text.encode()  # LMDB opens no other names
            path = cache_path(text, name)
        except UnicodeEncodeError:
            raise CommandError(f"{name} {text!a} is not valid UTF-8: use a different name") from None
        except ValueError as error:
            raise CommandError(str(error)) from None
        directory = os.path.dirname(path)
        if is_new and not os.path.isdir(directory):
            if os.path.lexists(directory):
                raise CommandError(f"{name} should lie in a directory, but {directory} is a file")
            raise CommandError(
                f"there is no directory at {directory}: make it first, or use a different {name}"
            )
        return path

    return parse


def output_file(path: str) -> str:
    """Parse the file that a command writes at the end, checked before hours are spent."""
    directory = os.path.dirname(os.path.abspath(path))
    if not path or os.path.isdir(path) or not os.access(directory, os.W_OK):
        raise CommandError(f"--output should be a file in a directory that can be written, not {path!r}")
    return path


def write_output(path: str, result: Any) -> None:
    """Write a result as JSON, completely, or keep the old file.

    Raises:
        CommandError: The file could not be written.
    """
    partial = f"{path}.{os.getpid()}.partial"
    failed = functools.partial(CommandError, exit_code=ExitCode.FAILED)
    try:
        with write_errors_as(failed, "--output", path):
            with open(partial, "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)
                file.write("\n")
            os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)


# --- sizes, numbers and names ----------------------------------------------------------------------------


def parse_size(text: str) -> int | tuple[int, int]:
    """The shorter side of images, or both sides.

    Raises:
        CommandError: The text has neither form.
    """
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise CommandError(f"--size should be like 256 or 224x320 (height x width), but got {text!r}")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def duration(text: str) -> float:
    """A time in seconds.

    Raises:
        CommandError: The text is no number with one of the letters s, m, h and d, or the time is 0.
    """
    number, unit = text[:-1], text[-1:].lower()
    seconds = (
        {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(unit, 0) if re.fullmatch(r"\d+(\.\d+)?", number) else 0
    )
    if not seconds or not float(number):
        raise CommandError(f"--for should be a time such as 90s, 30m or 2h, but got {text!r}")
    return seconds * float(number)


def one_of(option: str, *choices: str) -> Callable[[str], str]:
    """A parser of one of some names."""

    def parse(text: str) -> str:
        if text not in choices:
            listed = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise CommandError(f"{option} should be {listed}, but got {text!r}{did_you_mean(text, choices)}")
        return text

    return parse


def whole_number(option: str, first: int, last: int | None = None) -> Callable[[str | int], int]:
    """A parser of an int from `first` to `last`."""

    def parse(text: str | int) -> int:
        number = int(text) if str(text).isdecimal() else -1
        if number < first or (last is not None and number > last):
            limits = f"from {first} on" if last is None else f"from {first} to {last}"
            raise CommandError(f"{option} should be a whole number {limits}, but got {text!r}")
        return number

    return parse


def number(option: str) -> Callable[[str | float], float]:
    """A parser of a float from 0 on."""

    def parse(text: str | float) -> float:
        with contextlib.suppress(ValueError):
            if 0 <= float(text) < math.inf:
                return float(text)
        raise CommandError(f"{option} should be a number from 0 on, but got {text!r}")

    return parse


def parse_max_errors(text: str) -> int | float:
    """The number of samples that can be left out, or their share.

    Raises:
        CommandError: The text is neither.
    """
    with contextlib.suppress(ValueError):
        if text.isdecimal() or 0 < float(text) <= 1:
            return int(text) if text.isdecimal() else float(text)
    raise CommandError(
        "--max-errors should be a number of samples such as 20 or a share of them such as 0.01, "
        f"but got {text!r}"
    )


def numbers(option: str, minimum: int, text: str) -> Any:
    """An option with numbers and commas between them."""

    def parse(value: str) -> tuple[int, ...]:
        words = [word.strip() for word in value.split(",")]
        if not all(word.isdecimal() and int(word) >= minimum for word in words):
            raise CommandError(f"{option} should be numbers from {minimum} such as 2,4, but got {value!r}")
        return tuple(dict.fromkeys(map(int, words)))

    return typer.Option(parser=parse, metavar="N,N", help=text)


def names(option: str, choices: tuple[str, ...], text: str) -> Any:
    """An option with names and commas between them."""

    def parse(value: str) -> tuple[str, ...]:
        words = tuple(dict.fromkeys(word.strip() for word in value.split(",")))
        for word in words:
            if word not in choices:
                said = f"some of {','.join(choices)}, but got {word!r}{did_you_mean(word, choices)}"
                raise CommandError(f"{option} should be {said}")
        return words

    return typer.Option(parser=parse, metavar=",".join(choices), help=text)


Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A folder with one subfolder of images per class: a path, or a URL such as s3://bucket/train; "
        "or MODULE:NAME, a dataset or a function without arguments that returns one. The working directory "
        "is searched for MODULE, too.",
    ),
]
Size = Annotated[
    Any,  # int | tuple[int, int] | None: typer would take a tuple for several words
    typer.Option(
        help="Scale images of a folder: the shorter side, or HEIGHTxWIDTH.",
        metavar="PIXELS",
        parser=parse_size,
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        parser=output_file,
        metavar="FILE.json",
        help="Write the whole result as JSON.",
    ),
]
