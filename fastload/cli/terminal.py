"""Print the results and errors of all commands of the command line.

Rules:

1. Only results go to standard output: readable text, or with --json exactly one JSON object. Progress, logs
   and errors go to standard error; with --json, the output of the user's own code goes there, too.
2. A failure prints one line and returns an exit code, see ExitCode; --debug or FASTLOAD_DEBUG=1 adds the
   traceback.
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
from fastload.system.logs import is_debugging, log, write_stderr
from fastload.system.refusals import reading_refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class ExitCode(IntEnum):
    """How a command ended; scripts may rely on the numbers."""

    FINE = 0
    FAILED = 1
    USAGE = 2
    SKIPPED = 3
    BUSY = 75  # EX_TEMPFAIL of sysexits.h: try again later
    INTERRUPTED = 130  # 128 + SIGINT, as in a shell


EPILOG = """\b
Exit codes:
    0  fine
    1  failed: a source or a file cannot be read, damage was found, or slower than a baseline
    2  wrong usage, such as a path that does not exist
    3  finished, but samples were skipped
   75  another build is running: try again later
  130  interrupted: run the same command again to continue"""

_ClickUsageError: Any = typer.BadParameter.__bases__[0]  # newer releases of typer contain their own click


class CommandError(Exception):
    """A command cannot continue; the message is for users.

    Attributes:
        exit_code: The exit code of the process.
        kind: The type of the error in the output of `--json`.
    """

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USAGE, kind: str = "UsageError") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.kind = kind


class CommandGroup(TyperGroup):
    """Turns any error of a command into one line and an exit code."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Run the command, and exit the process."""
        words = sys.argv[1:] if args is None else list(args)
        options["standalone_mode"] = False
        try:
            code = super().main(words, *rest, **options)
            if code == ExitCode.INTERRUPTED:  # newer releases of typer return this after Ctrl-C, silently
                raise KeyboardInterrupt
        except (KeyboardInterrupt, typer.Abort):
            error = CommandError("interrupted", ExitCode.INTERRUPTED, "KeyboardInterrupt")
            code = _fail(error, _wants_json(words))
        except Exception as error:  # noqa: BLE001 - the user gets one line for any error
            if "--debug" in words or is_debugging():
                traceback.print_exception(error)
            code = _fail(error, _wants_json(words))
        # If a KeyboardInterrupt has left an exec() of text (for example of a dataclass in a module that is
        # being imported), CPython ends `python -m` by SIGINT, even if the interrupt was handled. Another
        # exec() of text resets this.
        exec("")
        if callable(code):  # the user's own script: its errors are shown as plain python shows them
            code()
            code = ExitCode.FINE
        sys.exit(int(code or 0))


def _wants_json(words: Sequence[str]) -> bool:
    """Whether the answer is one JSON object; for commands that run a script, --json names a file instead."""
    command = next((word for word in words if not word.startswith("-")), "")
    return "--json" in words and command not in ("profile", "run")


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
        text = f"{type(error).__name__}: {error}".removesuffix(": ")  # a MemoryError has no text
    notes = [note for note in getattr(error, "__notes__", []) if "\n" not in note]  # no worker tracebacks
    for note in notes:
        text += f". {note}" if note[:1].isupper() else f" ({note})"
    text = text.replace('on_error="skip"', "--on-error skip")
    return " ".join(text.split())


class Answer:
    """The result of a command.

    Attributes:
        result: The output with --json.
        lines: The output without --json.
        exit_code: The exit code of the command.
    """

    def __init__(self) -> None:
        self.result: dict[str, Any] = {}
        self.lines: list[str] = []
        self.exit_code = ExitCode.FINE


@contextlib.contextmanager
def answering(as_json: bool, *, quiet: bool = False) -> Iterator[Answer]:
    """Keep standard output clean while a command runs, then print its answer and exit."""
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
    """Redirect all output to standard error: of this interpreter, its workers, and C libraries."""
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
    """Looks up sys.stderr for each line, because a progress bar may have replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        write_stderr(f"fastload: {record.getMessage()}\n")


@contextlib.contextmanager
def _logs_shown(level: int) -> Iterator[None]:
    handler = _ToStderr()
    level_before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(level_before)
        log.removeHandler(handler)


def table(rows: list[list[str]]) -> list[str]:
    """Format rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
