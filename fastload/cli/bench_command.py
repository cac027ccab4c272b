"""`fastload bench`: measures with `fastload.bench`, and reports its problems."""

from __future__ import annotations

import signal
from typing import Annotated, Literal

import typer

from fastload.bench.configurations import Cache, configurations_of, default_workers
from fastload.cli.arguments import Size, Source  # noqa: TC001 - typer reads annotations
from fastload.cli.source_argument import code_of, is_folder, open_source, open_transform
from fastload.cli.terminal import Answer, CommandError, ExitCode, is_quiet
from fastload.system.progress import Progress


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
        list[int] | None,
        typer.Option(min=0, help="Once for each number; default: 0, half of the CPUs, all CPUs."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a batch.")] = 64,
    cache: Annotated[list[Cache] | None, typer.Option(help="Once for each cache; default: all.")] = None,
    by: Annotated[
        Literal["sample", "file"],
        typer.Option(
            help="What is cached: 'sample', or 'file', the files that your own dataset decodes, which can be "
            "random: DataLoader(..., cache='ram')."
        ),
    ] = "sample",
    size: Size = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of an epoch, evenly spaced.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="How often each configuration runs, in turn.")] = 3,
) -> Answer:
    """Compare torch's loader and fastload over SOURCE, and print the line of code of the fastest.

    Each configuration runs in its own process, once per round. Nothing is trained, and no file is left.
    Temporary files, such as LMDB caches, go to TMPDIR.
    """
    from fastload.bench.report import table_lines, verdict_lines
    from fastload.bench.run import Benchmark
    from fastload.system.cpus import worthwhile_cpus

    dataset = open_source(source, size)
    augment = None if transform is None else open_transform(transform)
    length = len(dataset)
    if not length:
        raise CommandError(f"{source} has no samples", ExitCode.FAILED)
    workers = num_workers or default_workers(worthwhile_cpus())
    rows = configurations_of(workers, batch_size, cache or Cache, by_file=by == "file")
    benchmark = Benchmark(rows, rounds, length, min(samples, length))
    # Batch systems and CI send it: the steps that clean up run.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Progress("measuring", rounds * len(rows), shown=not is_quiet(), unit="runs") as progress:
        for _ in benchmark.run(dataset, augment):
            progress.advance()
    verdict = verdict_lines(benchmark, code_of(source, size), has_transform=augment is not None)
    if not verdict:
        hint = ""
        if is_folder(source) and not isinstance(size, tuple):
            hint = ": images of several shapes need --size 224x224, or a crop in --transform"
        raise CommandError(f"no configuration could be measured: {rows[0].problem}{hint}", ExitCode.FAILED)
    heading = f"{source}: {benchmark.num_samples:,} of {length:,} samples; samples/s, medians of the rounds"
    lines = [heading, "", *table_lines(benchmark), ""]
    plain = {"source": source, "transform": transform, "size": size, **benchmark.as_dict()}
    return Answer({**plain, "fastest": verdict[1].strip()}, [*lines, *verdict])
