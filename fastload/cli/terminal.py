"""What every command of the command line shares: how it answers, and how it fails.

Rules:

1. Standard output carries results alone: text for people, or with --json exactly one JSON object. Progress,
   logs and errors go to standard error, and so does what the user's own code prints while --json is on.
2. A failure is one line and an exit code, see ExitCode; --debug or FASTLOAD_DEBUG=1 adds the traceback.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from fastload.errors import CacheBusyError, FastloadError
from fastload.system.refusals import reading_refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class ExitCode(IntEnum):
    """How a command ended; the numbers are promised to scripts."""

    FINE = 0
    FAILED = 1
    USAGE = 2
    SKIPPED = 3
    BUSY = 75  # EX_TEMPFAIL of sysexits.h: try again later
    INTERRUPTED = 130  # 128 + SIGINT, as a shell has it


EPILOG = """\b
Exit codes:
    0  fine
    1  failed: a source or a file cannot be read, or damage was found
    2  wrong usage, such as a path that leads to nothing
    3  finished, but samples were skipped
   75  another builder is at work: try again later
  130  interrupted: run the same command again to go on"""

_ClickUsageError: Any = typer.BadParameter.__bases__[0]  # newer releases of typer bring a click of their own


class CommandError(Exception):
    """A command cannot go on; its message is for people.

    Attributes:
        exit_code: With which the process ends.
        kind: What `--json` gives as the type.
    """

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USAGE, kind: str = "UsageError") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.kind = kind


class CommandGroup(TyperGroup):
    """Turns whatever a command raises into one line and an exit code."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Run, and leave the process."""
        words = sys.argv[1:] if args is None else list(args)
        options["standalone_mode"] = False
        try:
            code = super().main(words, *rest, **options)
            if code == ExitCode.INTERRUPTED:  # newer releases of typer answer Ctrl-C so, without a word
                raise KeyboardInterrupt
        except (KeyboardInterrupt, typer.Abort):
            error = CommandError("interrupted", ExitCode.INTERRUPTED, "KeyboardInterrupt")
            code = _fail(error, "--json" in words)
        except Exception as error:  # noqa: BLE001 - a command's user wants one line, whatever it was
            if "--debug" in words or os.environ.get("FASTLOAD_DEBUG", "0") not in ("", "0"):
                traceback.print_exception(error)
            code = _fail(error, "--json" in words)
        # CPython ends `python -m` by SIGINT if a KeyboardInterrupt has left an exec() of text, such as that
        # of a dataclass in a module being imported, though it was handled. Another exec() of text forgets it.
        exec("")
        sys.exit(int(code or 0))


def _fail(error: Exception, as_json: bool) -> int:
    message = _one_line(error)
    typer.echo(f"fastload: error: {message}", err=True)
    is_usage = isinstance(error, _ClickUsageError)
    if as_json:
        kind = "UsageError" if is_usage else getattr(error, "kind", type(error).__name__)
        typer.echo(json.dumps({"error": message, "type": kind}))
    if isinstance(error, CommandError):
        return error.exit_code
    if isinstance(error, CacheBusyError):
        return ExitCode.BUSY
    return ExitCode.USAGE if is_usage else ExitCode.FAILED


def _one_line(error: Exception) -> str:
    if isinstance(error, _ClickUsageError):
        text = str(error.format_message())
    elif isinstance(error, OSError) and error.strerror:
        text = reading_refused(error)
    elif isinstance(error, (FastloadError, CommandError, OSError)):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")  # a MemoryError says nothing more
    notes = [note for note in getattr(error, "__notes__", []) if "\n" not in note]  # a worker's traceback
    text = ". ".join([text, *notes]).replace('on_error="skip"', "--on-error skip")
    return " ".join(text.split())


class Answer:
    """What a command found out.

    Attributes:
        result: What --json prints.
        lines: What is printed without it.
        exit_code: With which the command ends.
    """

    def __init__(self) -> None:
        self.result: dict[str, Any] = {}
        self.lines: list[str] = []
        self.exit_code = ExitCode.FINE


@contextlib.contextmanager
def answering(as_json: bool, *, quiet: bool = False) -> Iterator[Answer]:
    """Keep standard output clean while a command works, then print its answer and end it."""
    answer = Answer()
    with _logs_shown(logging.ERROR if quiet else logging.INFO):
        if as_json:
            with _stdout_diverted():
                yield answer
        else:
            yield answer
    if as_json:
        typer.echo(json.dumps(answer.result))
    elif not quiet:
        typer.echo("\n".join(answer.lines))
    raise typer.Exit(answer.exit_code)


@contextlib.contextmanager
def _stdout_diverted() -> Iterator[None]:
    """Send to standard error what anyone prints: this interpreter, its workers, or a C library."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class _ToStderr(logging.Handler):
    """Looks standard error up at each line: a progress bar draws its own lines below them."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"fastload: {record.getMessage()}\n")


@contextlib.contextmanager
def _logs_shown(level: int) -> Iterator[None]:
    log, handler = logging.getLogger("fastload"), _ToStderr()
    level_before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(level_before)
        log.removeHandler(handler)


def table(rows: list[list[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
