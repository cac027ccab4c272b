"""Do the work of `fastload bench`: read its options, measure in interleaved runs, answer with the result.

Rules:

1. An option that is wrong, a missing extra and a baseline that cannot be compared end the command before
   anything is measured.
2. Nothing remains after the command, also after Ctrl-C and SIGTERM: no process, and no file but those that
   the user asked for.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from fastload.cli.source_argument import (
    code_ended,
    is_folder,
    open_source,
    open_transform,
    source_code,
    transform_code,
)
from fastload.cli.terminal import Answer, CommandError, ExitCode
from fastload.system.logs import log
from fastload.system.refusals import writing_refused
from fastload.system.sizes import readable_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fastload.bench.contenders import Contender, Sweep
    from fastload.bench.measure import Epochs, Examined
    from fastload.bench.result import Result, Row


_CACHES = ("none", "ram", "lmdb")  # as in bench.contenders, which would import torch
_BATCH_SIZES = (64,)
_ROUNDS = 3
# The path of a socket has at most 107 bytes, and multiprocessing adds /pymp-12345678/listener-12345678.
_MOST_DIRECTORY_BYTES = 70
_DISK_SHARE = 0.9  # of the free space, which an LMDB cache may take


@dataclass(frozen=True)
class Options:
    """The options as given; None where the user gave none.

    Attributes:
        source: SOURCE.
        transform: MODULE:NAME of a transform.
        workers: Numbers with commas.
        batch_sizes: Numbers with commas.
        start_methods: Names with commas.
        caches: Names with commas.
        sizes: Sizes with commas.
        samples: Samples of an epoch.
        minutes: About how long the command may take.
        rounds: How often each contender runs.
        scratch: A directory for LMDB caches.
        chart: The PNG to write.
        save: The JSON file to write.
        baseline: The JSON file to compare with.
        tolerance: The share of its rate that a contender may lose.
        is_relative: Whether rates are compared relative to torch's.
        as_json: Whether the answer is one JSON object.
        quiet: Whether only errors are printed.
    """

    source: str
    transform: str | None
    workers: str | None
    batch_sizes: str | None
    start_methods: str | None
    caches: str | None
    sizes: str | None
    samples: int | None
    minutes: float
    rounds: int | None
    scratch: str | None
    chart: str | None
    save: str | None
    baseline: str | None
    tolerance: float
    is_relative: bool
    as_json: bool
    quiet: bool


def run(options: Options, answer: Answer) -> None:
    """Benchmark SOURCE, and fill the answer.

    Raises:
        CommandError: An option is wrong, SOURCE cannot be read, or the command was interrupted.
    """
    wanted = _Wanted.of(options)
    for name, path in (("--chart", options.chart), ("--save", options.save)):
        _check_writable(name, path)
    _check_scratch(options.scratch)
    if options.is_relative and options.baseline is None:
        raise CommandError("--relative is for --baseline FILE.json: give the file, too")

    from fastload.bench.chart import why_no_chart
    from fastload.bench.machine import Machine

    if options.chart is not None and why_no_chart():
        raise CommandError(f"--chart {options.chart}: {why_no_chart()}")
    machine = Machine.this()
    baseline = None if options.baseline is None else _read_baseline(options.baseline)
    if baseline is not None:
        wanted = wanted.completed_by(baseline)
        if not options.is_relative:
            _check_same_machine(baseline, machine)

    datasets = {size: _open(options.source, size) for size in wanted.sizes or (None,)}
    transform = None if wanted.transform is None else open_transform(wanted.transform)
    with _ended_in_order():
        result = _Bench(options, wanted, datasets, transform, machine).run()
    _answer(options, result, baseline, answer)


def _answer(options: Options, result: Result, baseline: Result | None, answer: Answer) -> None:
    from fastload.bench.baseline import compare, differences
    from fastload.cli.bench_report import baseline_lines, report_lines

    if baseline is not None:
        result.warnings += differences(baseline, result)
    answer.result = result.as_dict()
    setup = {size: setup_of(result.source, size, result.transform) for size in result.sweep.sizes}
    answer.lines = report_lines(result, setup)
    if not any(row.is_measured for row in result.rows):
        answer.exit_code = ExitCode.FAILED
        if options.quiet:
            log.error("no contender could be measured: %s", result.rows[0].problem)
    if options.save is not None:
        _save(result, options.save)
        answer.lines.append(f"written to {options.save}")
    if options.chart is not None:
        _draw(result, options.chart)
        answer.lines.append(f"chart written to {options.chart}")
    if baseline is not None and options.baseline is not None:
        comparison = compare(baseline, result, tolerance=options.tolerance, is_relative=options.is_relative)
        lines = baseline_lines(comparison, options.baseline)
        answer.result["comparison"] = comparison.as_dict()
        answer.lines += lines
        if not comparison.has_passed:
            answer.exit_code = ExitCode.FAILED
            if options.quiet or options.as_json:
                log.error("%s", lines[-1])


def setup_of(source: str, size: str | None, transform: str | None) -> list[str]:
    """The lines of Python that make the variables `dataset` and `transform`."""
    return [*source_code(source, size), *([] if transform is None else transform_code(transform))]


# --- options ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    """The settings that the user chose; None where the benchmark may choose."""

    transform: str | None
    workers: tuple[int, ...] | None
    batch_sizes: tuple[int, ...] | None
    start_methods: tuple[str, ...] | None
    caches: tuple[str, ...] | None
    sizes: tuple[str | None, ...] | None
    samples: int | None
    rounds: int | None

    @classmethod
    def of(cls, options: Options) -> _Wanted:
        return cls(
            transform=options.transform,
            workers=_numbers("--workers", options.workers, least=0),
            batch_sizes=_numbers("--batch-size", options.batch_sizes, least=1),
            start_methods=_names(
                "--start-method", options.start_methods, multiprocessing.get_all_start_methods()
            ),
            caches=_names("--cache", options.caches, _CACHES),
            sizes=None if options.sizes is None else tuple(dict.fromkeys(options.sizes.split(","))),
            samples=options.samples,
            rounds=options.rounds,
        )

    def completed_by(self, baseline: Result) -> _Wanted:
        """These settings, and those of the baseline where the user chose none, so that the runs match."""
        sweep = baseline.sweep
        return _Wanted(
            transform=self.transform or baseline.transform,
            workers=self.workers or tuple(sweep.workers),
            batch_sizes=self.batch_sizes or tuple(sweep.batch_sizes),
            start_methods=self.start_methods or tuple(sweep.start_methods),
            caches=self.caches or tuple(sweep.caches),
            sizes=self.sizes or tuple(sweep.sizes),
            samples=self.samples or baseline.num_samples,
            rounds=self.rounds or baseline.rounds,
        )


def _numbers(name: str, text: str | None, *, least: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise CommandError(f"{name} should be numbers from {least} such as 2,4, but got {text!r}")
    return tuple(dict.fromkeys(map(int, words)))


def _names(name: str, text: str | None, known: Sequence[str]) -> tuple[str, ...] | None:
    if text is None:
        return None
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    wrong = [word for word in words if word not in known]
    if wrong:
        raise CommandError(f"{name} should be some of {','.join(known)}, but got {wrong[0]!r}")
    return words


def _check_writable(name: str, path: str | None) -> None:
    if path is None:
        return
    directory = os.path.dirname(os.path.abspath(path))
    if not path or os.path.isdir(path):
        raise CommandError(f"{name} should be a file, but got {path!r}")
    if not os.path.isdir(directory):
        raise CommandError(f"{name} {path}: there is no directory at {directory}: make it first")


def _check_scratch(path: str | None) -> None:
    if path is not None and not os.path.isdir(path):
        raise CommandError(f"--scratch should be a directory, but {path!r} is not one: make it first")


def _read_baseline(path: str) -> Result:
    from fastload.bench.result import Result, ResultFormatError

    try:
        with open(path, encoding="utf-8") as file:
            return Result.from_dict(json.load(file))
    except FileNotFoundError:
        raise CommandError(f"--baseline: there is no file at {path}: make one with --save {path}") from None
    except ResultFormatError as error:
        raise CommandError(f"--baseline {path}: {error}: make a new one with --save FILE.json") from error
    except ValueError as error:  # JSON or UTF-8
        raise CommandError(f"--baseline {path} is not JSON: {error}") from error


def _check_same_machine(baseline: Result, machine: Any) -> None:
    if (baseline.machine.cpu, baseline.machine.cores) != (machine.cpu, machine.cores):
        raise CommandError(
            f"the baseline was measured on another machine ({baseline.machine}) than this one ({machine}). "
            "Add --relative, which divides each rate by torch's in the same run, or make a new baseline on "
            "this machine with --save"
        )


def _open(source: str, size: str | None) -> Any:
    try:
        dataset = open_source(source, size)
    except SystemExit as error:
        raise code_ended(source, error) from error
    if not len(dataset):
        raise CommandError(f"{source} has no samples", ExitCode.FAILED, "ValueError")
    return dataset


# --- one benchmark ---------------------------------------------------------------------------------------


@dataclass
class _Bench:
    """The steps of a benchmark.

    Attributes:
        options: The user's options.
        wanted: The settings that are fixed.
        datasets: The whole dataset of each size.
        transform: The random part behind it; None without one.
        machine: This machine.
        rows: Of the contenders, once they are known.
    """

    options: Options
    wanted: _Wanted
    datasets: dict[str | None, Any]
    transform: Any
    machine: Any
    rows: list[Row] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def run(self) -> Result:
        """Examine, plan, build caches, and measure all contenders in turn."""
        from fastload.bench.machine import busy_warnings, load_per_cpu
        from fastload.bench.result import Result, Row
        from fastload.cache.dataset import CachedDataset
        from fastload.system.cpu_times import CpuTimes, others_share
        from fastload.system.cpus import worthwhile_cpus

        load = load_per_cpu()
        cpus = worthwhile_cpus()
        try:
            examined = {size: self._examine(dataset) for size, dataset in self.datasets.items()}
            sweep = self._sweep(cpus)
            contenders = sweep.contenders()
            rounds = self.wanted.rounds or _ROUNDS
            count = self._count(contenders, rounds, examined, cpus)
        except KeyboardInterrupt as error:
            raise CommandError(
                "interrupted before anything was measured", ExitCode.INTERRUPTED, "KeyboardInterrupt"
            ) from error
        self.rows = [Row(contender) for contender in contenders]
        length = len(next(iter(self.datasets.values())))
        result = Result(
            source=self.options.source,
            transform=self.wanted.transform,
            length=length,
            num_samples=count,
            sample_nbytes={size or "": found.sample_nbytes for size, found in examined.items()},
            sweep=sweep,
            rounds=rounds,
            machine=self.machine,
            rows=self.rows,
            load_before=load,
        )
        try:
            with _temporary_files() as temporary, _scratch(self.options.scratch or temporary) as directory:
                parts = {size: _part(dataset, count) for size, dataset in self.datasets.items()}
                self._refuse_caches(examined, count, directory)
                before = CpuTimes.now()
                with _Progress(result, shown=not self.options.quiet) as progress:
                    paths = self._prepare(parts, directory, cpus, result, progress)
                    self._measure(parts, paths, result, progress)
                result.others_share = others_share(before, CpuTimes.now())
        except KeyboardInterrupt as error:
            raise self._interrupted(result) from error
        if any(isinstance(dataset, CachedDataset) for dataset in self.datasets.values()):
            self.warnings.append(
                "the dataset is a CachedDataset, whose cache all contenders share: only later epochs compare"
            )
        result.warnings += [*self.warnings, *busy_warnings(result.others_share, load)]
        return result

    def _examine(self, dataset: Any) -> Examined:
        from fastload.bench.apart import RunFailedError, call
        from fastload.bench.measure import examine

        source = self.options.source
        try:
            found: Examined = call(examine, dataset, self.transform)
        except RunFailedError as error:
            raise CommandError(
                f"the samples of {source} could not be read: {error}", ExitCode.FAILED, "RunFailedError"
            ) from error
        if found.why_no_batch:
            cure = "add --transform MODULE:NAME, such as a crop that gives samples of one shape"
            if is_folder(source):
                cure = f"add a size with both sides such as --size 224x224, or {cure}"
            raise CommandError(
                f"the samples of {source} cannot be collated to a batch: {found.why_no_batch}: {cure}"
            )
        return found

    def _sweep(self, cpus: int) -> Sweep:
        from fastload.bench.contenders import Sweep
        from fastload.bench.plan import default_workers

        wanted = self.wanted
        return Sweep(
            workers=wanted.workers or default_workers(cpus),
            batch_sizes=wanted.batch_sizes or _BATCH_SIZES,
            start_methods=wanted.start_methods or (multiprocessing.get_start_method(),),
            caches=wanted.caches or _CACHES,
            sizes=tuple(self.datasets),
        )

    def _count(
        self, contenders: Sequence[Contender], rounds: int, examined: dict[str | None, Examined], cpus: int
    ) -> int:
        """How many samples an epoch has."""
        from fastload.bench.plan import num_samples_within, seconds

        length = len(next(iter(self.datasets.values())))
        costs: Any = {
            "rounds": rounds,
            "sample_s": max(found.sample_s for found in examined.values()),
            "transform_s": max(found.transform_s for found in examined.values()),
            "num_cpus": cpus,
        }
        if self.wanted.samples is not None:
            count = min(length, self.wanted.samples)
        else:
            count = num_samples_within(
                60 * self.options.minutes,
                contenders,
                length=length,
                **costs,
            )
        expected_s = seconds(contenders, count, **costs)
        log.info(
            "%d contenders, %d rounds, %s of %s samples: about %.1f minutes",
            *(len(contenders), rounds, f"{count:,}", f"{length:,}", expected_s / 60),
        )
        return count

    def _refuse_caches(self, examined: dict[str | None, Examined], count: int, directory: str) -> None:
        """Mark the rows whose cache is not possible or does not fit, with the reason."""
        from fastload.system.budget import parse_budget

        memory_nbytes = parse_budget("auto")
        disk_nbytes = int(_DISK_SHARE * shutil.disk_usage(directory).free)
        for row in self.rows:
            cache, found = row.contender.cache, examined[row.contender.size]
            if cache == "none":
                continue
            length = len(self.datasets[row.contender.size])
            whole, part = length * found.sample_nbytes, count * found.sample_nbytes
            if found.why_no_cache:
                row.problem = f"not possible: {found.why_no_cache}"
            elif cache == "ram" and (
                part > memory_nbytes or (whole > memory_nbytes and not self.wanted.caches)
            ):
                row.problem = (
                    f"not measured: the whole dataset takes {readable_size(whole)} when it is decoded, but a "
                    f"cache in RAM may take {readable_size(memory_nbytes)} now. --cache ram measures a part"
                )
            elif cache == "lmdb" and part > disk_nbytes:
                row.problem = (
                    f"not measured: the cache takes {readable_size(part)}, but {directory} has room for "
                    f"{readable_size(disk_nbytes)}: give another directory with --scratch"
                )
            elif whole > memory_nbytes:
                text = (
                    f"the whole dataset takes {readable_size(whole)} when it is decoded, and a cache in "
                    f"memory may take {readable_size(memory_nbytes)} now: the rows with a cache show the "
                    "rates of the measured part, which fits"
                )
                if text not in self.warnings:
                    self.warnings.append(text)

    def _prepare(
        self, parts: dict[str | None, Any], directory: str, cpus: int, result: Result, progress: _Progress
    ) -> dict[str | None, str]:
        """Build the LMDB caches; for sizes without one, read all samples once.

        Both bring the files into the page cache, before any contender runs.
        """
        from fastload.bench.apart import RunFailedError, call
        from fastload.bench.measure import build, warm

        paths: dict[str | None, str] = {}
        for number, (size, dataset) in enumerate(parts.items()):
            rows = [row for row in self.rows if row.contender.size == size]
            in_lmdb = [row for row in rows if row.contender.cache == "lmdb" and not row.problem]
            try:
                if in_lmdb:
                    progress.say("building an LMDB cache")
                    path = os.path.join(directory, f"{number}.lmdb")
                    result.build_s[size or ""] = call(build, dataset, path, cpus)
                    paths[size] = path
                else:
                    progress.say("reading all samples once")
                    call(warm, dataset, cpus)
            except RunFailedError as error:
                for row in in_lmdb:
                    row.problem = f"failed: the LMDB cache could not be built: {error}"
        return paths

    def _measure(
        self,
        parts: dict[str | None, Any],
        paths: dict[str | None, str],
        result: Result,
        progress: _Progress,
    ) -> None:
        from fastload.bench.apart import call
        from fastload.bench.measure import measure
        from fastload.bench.rounds import run_rounds

        def run_once(contender: Contender) -> Epochs:
            path = paths.get(contender.size) if contender.cache == "lmdb" else None
            epochs: Epochs = call(measure, parts[contender.size], self.transform, contender, path)
            return epochs

        run_rounds(self.rows, result.rounds, run_once, progress.on_run)

    def _interrupted(self, result: Result) -> CommandError:
        """The error after Ctrl-C; what was measured so far is printed now."""
        num_runs = sum(len(row.later) for row in self.rows)
        said = "interrupted before anything was measured"
        if num_runs:
            total = result.rounds * len(self.rows)
            said = f"interrupted after {num_runs} of {total} runs; --save and --chart have written nothing"
            if not (self.options.as_json or self.options.quiet):
                from fastload.cli.bench_report import table_lines

                typer.echo("\n".join(table_lines(result)))
        return CommandError(said, ExitCode.INTERRUPTED, "KeyboardInterrupt")


def _part(dataset: Any, count: int) -> Any:
    """`count` samples of the dataset, evenly spaced."""
    from torch.utils.data import Subset

    from fastload.bench.measure import spread_indices

    length = len(dataset)
    return dataset if count >= length else Subset(dataset, spread_indices(length, count))


# --- temporary files -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _temporary_files() -> Iterator[str]:
    """A directory for the temporary files of all runs, which is removed at the end.

    A worker of torch's loader that is stopped because of an error leaves the directory of its socket behind.
    Where the path of such a socket would be too long for the system, the runs keep the usual directory.
    """
    variable, directory_before = os.environ.get("TMPDIR"), tempfile.tempdir
    with _scratch(None) as directory:
        if len(os.fsencode(directory)) > _MOST_DIRECTORY_BYTES:
            yield directory
            return
        os.environ["TMPDIR"] = tempfile.tempdir = directory
        try:
            yield directory
        finally:
            tempfile.tempdir = directory_before
            os.environ.pop("TMPDIR")
            if variable is not None:
                os.environ["TMPDIR"] = variable


@contextlib.contextmanager
def _scratch(parent: str | None) -> Iterator[str]:
    """A new directory, which is removed at the end."""
    try:
        directory = tempfile.mkdtemp(prefix="fastload-bench-", dir=parent)
    except OSError as error:
        path = os.path.join(parent or tempfile.gettempdir(), "fastload-bench")
        reason = writing_refused(error, path)
        raise CommandError(f"--scratch: {reason}", ExitCode.FAILED, type(error).__name__) from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM, which batch systems and CI send, run the steps that clean up."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --- files -----------------------------------------------------------------------------------------------


def _save(result: Result, path: str) -> None:
    def write(partial: str) -> None:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(result.as_dict(), file, indent=1)
            file.write("\n")

    _write("--save", path, write)


def _draw(result: Result, path: str) -> None:
    from fastload.bench.chart import draw

    _write("--chart", path, lambda partial: draw(result, partial))


def _write(name: str, path: str, write: Callable[[str], None]) -> None:
    """Write a file completely, or leave the earlier one."""
    partial = f"{path}.{os.getpid()}.partial"
    try:
        write(partial)
        os.replace(partial, path)
    except OSError as error:
        reason = writing_refused(error, os.path.abspath(path))
        raise CommandError(f"{name} {path}: {reason}", ExitCode.FAILED, type(error).__name__) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)


# --- progress --------------------------------------------------------------------------------------------


class _Progress:
    """A bar on a terminal, a log line for each round elsewhere; starts no thread, because runs are forked."""

    def __init__(self, result: Result, *, shown: bool) -> None:
        self._rounds = result.rounds
        self._bar: Any = None
        self._done = 0
        self._round = 0
        total = result.rounds * sum(1 for row in result.rows if not row.problem)
        if shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
                console=Console(stderr=True),
                auto_refresh=False,
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            if kind is None:
                self.say("finished")
            self._bar.stop()

    def say(self, text: str) -> None:
        if self._bar is None:
            log.info("%s", text)
        else:
            self._bar.update(self._task, description=text, completed=self._done)
            self._bar.refresh()

    def on_run(self, number: int, row: Row) -> None:
        name = f"round {number + 1} of {self._rounds}"
        if self._bar is not None:
            self.say(f"{name}: {row.contender}")
        elif number + 1 > self._round:
            self._round = number + 1
            self.say(name)
        self._done += 1
