"""How every command answers: its result as text or as --json, any error as one line and an exit code.

1. Only results go to standard output: readable text, or with --json exactly one JSON object. Progress, logs
   and errors go to standard error; with --json, the output of the user's own code goes there, too.
2. A failure prints one line and returns an exit code, see ExitCode; FASTLOAD_DEBUG=1 adds the traceback.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import sys
import traceback
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from fastload.errors import FastloadError, TooManyFailuresError
from fastload.system.logs import is_debugging, log, write_stderr
from fastload.system.os_errors import why_unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class ExitCode(IntEnum):
    """How a command ended; scripts can rely on the numbers."""

    FINE = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130  # 128 + SIGINT, as in a shell


EXIT_CODES = """\b
Exit codes:
    0  success
    1  failed: a source or a file cannot be read, or damage was found
    2  wrong usage, such as a path that does not exist
  130  interrupted"""

_UsageError: Any = typer.BadParameter.__bases__[0]  # newer releases of typer contain their own click


class CommandError(Exception):
    """A command cannot continue; the message is for users. In --json, the error has the type of its cause.

    Attributes:
        exit_code: The exit code of the process.
    """

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# --- errors ----------------------------------------------------------------------------------------------


class CommandGroup(TyperGroup):
    """Turns any error of a command into one line and an exit code."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Run the command, and exit the process."""
        words = list(sys.argv[1:] if args is None else args) or ["--help"]
        options |= {"standalone_mode": False, "prog_name": "fastload"}
        try:
            code = super().main(words, *rest, **options)
        except Exception as error:  # noqa: BLE001 - the user gets one line for any error
            if is_debugging():
                traceback.print_exception(error)
            code = _fail(error, words)
        sys.exit(int(code or 0))


APP: dict[str, Any] = {
    "cls": CommandGroup,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def _fail(error: Exception, words: Sequence[str]) -> ExitCode:
    """Print an error; returns the exit code."""
    message, code = _one_line(error), _exit_code(error)
    write_stderr(f"fastload: error: {message}\n")
    if "--json" in words:
        cause = (error.__cause__ or error) if isinstance(error, CommandError) else error
        kind = "UsageError" if code == ExitCode.USAGE else type(cause).__name__
        with contextlib.suppress(OSError):  # full, or nobody reads it: the exit code tells
            typer.echo(json.dumps({"error": message, "type": kind}))
    return code


def _exit_code(error: Exception) -> ExitCode:
    if isinstance(error, CommandError):
        return error.exit_code
    # Without a number, it is fastload's error, not the system's: an argument names nothing.
    names_nothing = isinstance(error, (FileNotFoundError, NotADirectoryError)) and error.errno is None
    return ExitCode.USAGE if names_nothing or isinstance(error, _UsageError) else ExitCode.FAILED


def _one_line(error: Exception) -> str:
    if isinstance(error, _UsageError):
        text = error.format_message()
        if type(error) is not typer.BadParameter and error.ctx is not None:  # that says what to pass instead
            text += f" (see `{error.ctx.command_path} --help`)"
    elif isinstance(error, OSError) and error.strerror:
        text = why_unreadable(error)
    elif isinstance(error, (FastloadError, CommandError, OSError)):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")  # a MemoryError has no text
    for note in getattr(error, "__notes__", []):
        if "\n" not in note:  # no tracebacks of workers
            text += f". {note}" if note[:1].isupper() else f" ({note})"
    if isinstance(error, TooManyFailuresError):
        text += " (the option is --max-errors)"
    return " ".join(text.split())


# --- results ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """The result of a command.

    Attributes:
        result: The output with --json.
        lines: The output without --json.
        exit_code: The exit code of the command; unless it is `FINE`, the first line says why.
    """

    result: dict[str, Any]
    lines: Sequence[str]
    exit_code: ExitCode = ExitCode.FINE


def answers(app: typer.Typer, **settings: Any) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Make a command of a function that returns its answer, and give it the options --json and --quiet.

    Args:
        app: What it is a command of.
        settings: As for typer's `command`.
    """

    def register(function: Callable[..., Answer]) -> Callable[..., Answer]:
        @functools.wraps(function)
        def command(*, as_json: bool, quiet: bool, **arguments: Any) -> None:
            with (
                _logs_shown(logging.ERROR if quiet else logging.INFO),
                _stdout_diverted() if as_json and sys.stdout is not None else contextlib.nullcontext(),
            ):
                try:
                    answer = function(**arguments)
                except (KeyboardInterrupt, typer.Abort) as error:  # at a question, typer raises Abort
                    text = "; ".join(["interrupted", *getattr(error, "__notes__", [])])
                    raise CommandError(text, ExitCode.INTERRUPTED) from error
                except SystemExit as error:
                    raise CommandError(
                        f"the code of the dataset ended the process with exit code {error.code!r}: put the "
                        'actions of a script under if __name__ == "__main__"',
                        ExitCode.FAILED,
                    ) from error
                if answer.exit_code and (as_json or quiet):
                    log.error("%s", answer.lines[0])
            if as_json:
                typer.echo(json.dumps(answer.result))
            elif not quiet:
                typer.echo("\n".join(answer.lines))
            raise typer.Exit(answer.exit_code)

        own, added = (inspect.signature(each, eval_str=True).parameters for each in (function, _output))
        vars(command)["__signature__"] = inspect.Signature([*own.values(), *added.values()])
        app.command(epilog=EXIT_CODES, **settings)(command)
        return function

    return register


def _output(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """The options of all commands that answer."""


def is_quiet() -> bool:
    """Whether the command that runs was called with --quiet."""
    return not log.isEnabledFor(logging.INFO)


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
    """Looks up sys.stderr for each line, because a progress bar can replace it."""

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
