"""`fastload bench`: measures with `fastload.bench`, and reports its problems.

Wrong options end the command before anything is measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastload.bench.configurations import CACHES
from fastload.cli.arguments import (
    Output,
    Size,
    Source,
    names,
    numbers,
    whole_number,
    write_output,
)
from fastload.cli.source_argument import is_folder, open_source, open_transform, setup_code
from fastload.cli.terminal import Answer, CommandError, ExitCode, is_quiet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastload.bench.result import Result
    from fastload.bench.run import Settings


def _scratch(path: str) -> str:
    if not os.path.isdir(path):
        raise CommandError(f"--scratch should be a directory, but {path!r} is not one: make it first")
    return path


def bench(
    source: Source,
    transform: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="The random part, which runs on every access and is never cached: an albumentations "
            "pipeline, any other callable, or a function without arguments that returns one.",
        ),
    ] = None,
    num_workers: Annotated[
        Any, numbers("--num-workers", 0, "Default: 0, half of the CPUs, all CPUs.")
    ] = None,
    batch_size: Annotated[Any, numbers("--batch-size", 1, "Default: 64.")] = None,
    cache: Annotated[Any, names("--cache", CACHES, "Default: all; ram only if all samples fit.")] = None,
    size: Size = None,
    samples: Annotated[
        Any,  # int | None
        typer.Option(
            parser=whole_number("--samples", 1),
            metavar="N",
            help="Samples of an epoch, evenly spaced; default: 2048.",
        ),
    ] = None,
    rounds: Annotated[
        Any,  # int | None
        typer.Option(
            parser=whole_number("--rounds", 1),
            metavar="N",
            help="How often each configuration runs, in turn; default: 3.",
        ),
    ] = None,
    scratch: Annotated[
        str | None,
        typer.Option(
            parser=_scratch,
            metavar="DIRECTORY",
            help="Where LMDB caches are built, and removed at the end; default: the system's "
            "temporary directory.",
        ),
    ] = None,
    output: Output = None,
) -> Answer:
    """Compare torch's loader and fastload over SOURCE, and print the code of the fastest.

    Each configuration runs in its own process, once per round. Nothing is trained, and no file is left except
    that of --output.
    """
    from fastload.bench.report import report_lines
    from fastload.bench.run import Settings

    result = _measured(
        Settings(source, transform, num_workers, batch_size, cache, size, samples, rounds, scratch)
    )
    plain, lines = result.as_dict(), report_lines(result, setup_code(source, size, transform))
    code, complaint = ExitCode.FINE, ""
    if not any(row.is_measured for row in result.rows):
        code, complaint = ExitCode.FAILED, f"no configuration could be measured: {result.rows[0].problem}"
    if output is not None:
        write_output(output, plain)
        lines.append(f"written to {output}")
    return Answer(plain, lines, code, complaint)


def _measured(settings: Settings) -> Result:
    """The result of a benchmark; after Ctrl-C, what was measured so far is printed."""
    from fastload.bench.report import table_lines
    from fastload.bench.run import Benchmark, NoBatchError
    from fastload.bench.subprocess_runner import RunFailedError

    source = settings.source
    dataset = open_source(source, settings.size)
    transform = None if settings.transform is None else open_transform(settings.transform)
    if not len(dataset):
        raise CommandError(f"{source} has no samples", ExitCode.FAILED)
    benchmark = None
    with _ended_in_order():
        try:
            benchmark = Benchmark(settings, dataset, transform)
            benchmark.run()
        except NoBatchError as error:
            cure = "add --transform MODULE:NAME, such as a crop to samples of one shape"
            if is_folder(source):
                cure = f"add a size with both sides such as --size 224x224, or {cure}"
            message = f"the samples of {source} cannot be collated to a batch: {error}: {cure}"
            raise CommandError(message) from error
        except RunFailedError as error:
            message = f"the samples of {source} could not be read: {error}"
            raise CommandError(message, ExitCode.FAILED) from error
        except KeyboardInterrupt as error:
            if benchmark is not None and not is_quiet():
                typer.echo("\n".join(table_lines(benchmark.result)))
            rows = [] if benchmark is None else benchmark.result.rows
            num_runs = sum(len(row.later) for row in rows)
            message = f"interrupted after {num_runs} runs; --output has written nothing"
            raise CommandError(message, ExitCode.INTERRUPTED) from error
    return benchmark.result


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM, which batch systems and CI send, run the steps that clean up."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
