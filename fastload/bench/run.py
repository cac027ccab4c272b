"""A whole benchmark: examine the samples, choose what the user left open, build caches, measure in turn.

It leaves no process and no file behind, also after an error or an interruption.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset

from fastload.bench import measure
from fastload.bench.configurations import CACHES, configurations_of
from fastload.bench.result import Result, Row, this_machine
from fastload.bench.subprocess_runner import RunFailedError, run_isolated
from fastload.cache.build.random_check import spread_indices
from fastload.cache.dataset import CachedDataset
from fastload.system.budget import parse_memory
from fastload.system.cpus import CpuTimes, others_share, worthwhile_cpus
from fastload.system.humanize import readable_size
from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fastload.bench.measure import Examined

_BATCH_SIZES = (64,)
_ROUNDS = 3
_MAX_WORKERS = 32  # by default
_SAMPLES = 2048  # of an epoch, by default
# The path of a socket has at most 107 bytes, and multiprocessing adds /pymp-12345678/listener-12345678.
_MAX_DIRECTORY_BYTES = 70
_DISK_SHARE = 0.9  # of the free space, for an LMDB cache
_BUSY_SHARE = 0.1  # a warning is shown if other processes use a larger share of the CPUs


@dataclass(frozen=True)
class Settings:
    """What to measure; None where the benchmark chooses.

    Attributes:
        source: The name of the source.
        transform: The name of the transform.
        workers: Numbers of workers.
        batch_sizes: Batch sizes.
        caches: Of `configurations.CACHES`.
        size: To which images are scaled.
        samples: Samples of an epoch.
        rounds: How often each configuration runs.
        scratch: A directory for LMDB caches.
    """

    source: str
    transform: str | None = None
    workers: tuple[int, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    caches: tuple[str, ...] | None = None
    size: int | tuple[int, int] | None = None
    samples: int | None = None
    rounds: int | None = None
    scratch: str | None = None


class NoBatchError(ValueError):
    """The samples cannot be collated to a batch; the message says why."""


class Benchmark:
    """Looks at some samples and plans the runs.

    Args:
        settings: The user's settings.
        dataset: The whole dataset.
        transform: The random part behind it; None without one.

    Attributes:
        result: The configurations, with the figures of those that have run.

    Raises:
        RunFailedError: Samples could not be read.
        NoBatchError: They have several shapes, or are of a kind that makes no batch.
    """

    def __init__(self, settings: Settings, dataset: Any, transform: Any) -> None:
        self._settings, self._dataset, self._transform = settings, dataset, transform
        self._examined: Examined = run_isolated(measure.examine, dataset, transform)
        if self._examined.why_no_batch:
            raise NoBatchError(self._examined.why_no_batch)
        configurations = configurations_of(
            settings.workers or default_workers(worthwhile_cpus()),
            settings.batch_sizes or _BATCH_SIZES,
            settings.caches or CACHES,
        )
        rounds, length = settings.rounds or _ROUNDS, len(dataset)
        count = min(settings.samples or _SAMPLES, length)
        log.info("%d configurations, %d rounds, %d of %d samples", len(configurations), rounds, count, length)
        self.result = Result(
            source=settings.source,
            transform=settings.transform,
            size=settings.size,
            length=length,
            num_samples=count,
            sample_nbytes=self._examined.sample_nbytes,
            rounds=rounds,
            machine=this_machine(),
            rows=[Row(configuration) for configuration in configurations],
        )

    def run(self) -> None:
        """Measure all configurations in turn; an interruption leaves what was measured."""
        result = self.result
        with _temporary_files() as temporary, _directory(self._settings.scratch or temporary) as directory:
            part = _part(self._dataset, result.num_samples)
            self._reject_caches(directory)
            before = CpuTimes.now()
            path = os.path.join(directory, "cache.lmdb")
            self._prepare(part, path)
            for number in range(result.rounds):
                log.info("round %d of %d", number + 1, result.rounds)
                for row in in_turn(result.rows, number, result.rounds):
                    if not row.problem:
                        self._run_once(row, part, path)
            share = result.others_share = others_share(before, CpuTimes.now())
        if isinstance(self._dataset, CachedDataset):
            result.warnings.append(
                "the dataset is a CachedDataset, whose cache all configurations share: only later epochs "
                "compare"
            )
        if share is not None and share > _BUSY_SHARE:
            result.warnings.append(
                f"the machine was busy: other processes used {share:.0%} of the CPUs during the runs. Repeat "
                "the benchmark when they have ended"
            )

    def _run_once(self, row: Row, dataset: Any, lmdb_path: str) -> None:
        """Measure a configuration; an error becomes its problem."""
        try:
            first, later = run_isolated(
                measure.measure, dataset, self._transform, row.configuration, lmdb_path
            )
        except RunFailedError as error:
            row.problem = f"failed: {error}"
        else:
            row.first.append(first)
            row.later.append(later)

    def _reject_caches(self, directory: str) -> None:
        """Mark the rows whose cache is not possible or does not fit, with the reason."""
        result = self.result
        memory_nbytes = parse_memory("auto")
        disk_nbytes = int(_DISK_SHARE * shutil.disk_usage(directory).free)
        whole, part = result.length * result.sample_nbytes, result.num_samples * result.sample_nbytes
        is_for_whole = whole > memory_nbytes and not self._settings.caches
        sizes = (
            f"the whole dataset takes {readable_size(whole)} decoded, but a cache in RAM can take "
            f"{readable_size(memory_nbytes)} now"
        )
        for row in result.rows:
            cache = row.configuration.cache
            if cache == "none":
                continue
            if self._examined.why_no_cache:
                row.problem = f"not possible: {self._examined.why_no_cache}"
            elif cache == "ram" and (part > memory_nbytes or is_for_whole):
                row.problem = f"not measured: {sizes}. --cache ram measures a part"
            elif cache == "lmdb" and part > disk_nbytes:
                row.problem = (
                    f"not measured: the cache takes {readable_size(part)}, but {directory} has room for "
                    f"{readable_size(disk_nbytes)}: pass a different directory with --scratch"
                )
            elif whole > memory_nbytes:
                warning = f"{sizes}: the rows with a cache show the rates of the measured part, which fits"
                result.warnings = list(dict.fromkeys([*result.warnings, warning]))

    def _prepare(self, dataset: Any, path: str) -> None:
        """Build the LMDB cache, or without one, read all samples once.

        Both bring the files into the page cache, before any configuration runs.
        """
        rows = [row for row in self.result.rows if row.configuration.cache == "lmdb" and not row.problem]
        try:
            if rows:
                log.info("building an LMDB cache")
                self.result.build_s = run_isolated(measure.build, dataset, path, worthwhile_cpus())
            else:
                log.info("reading all samples once")
                run_isolated(measure.warm, dataset, worthwhile_cpus())
        except RunFailedError as error:
            for row in rows:
                row.problem = f"failed: the LMDB cache could not be built: {error}"


def default_workers(num_cpus: int) -> tuple[int, ...]:
    """No workers, one for each second CPU, and one for each CPU."""
    return tuple(sorted({0, min(_MAX_WORKERS, math.ceil(num_cpus / 2)), min(_MAX_WORKERS, num_cpus)}))


def in_turn(rows: Sequence[Row], number: int, rounds: int) -> list[Row]:
    """All rows, in the order of a round: each round begins with a different one.

    In each round every configuration runs once, so a slow minute of the machine affects all of them.
    """
    first = number * max(1, len(rows) // rounds) % max(1, len(rows))
    return [*rows[first:], *rows[:first]]


def _part(dataset: Any, count: int) -> Any:
    """`count` samples of the dataset, evenly spaced."""
    length = len(dataset)
    return dataset if count >= length else Subset(dataset, spread_indices(length, count))


def _directory(parent: str | None) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fastload-bench-", dir=parent, ignore_cleanup_errors=True)


@contextlib.contextmanager
def _temporary_files() -> Iterator[str]:
    """A directory for the temporary files of all runs, removed at the end.

    A worker of torch's loader that is stopped after an error leaves its socket's directory behind. Where the
    path of such a socket would be too long for the system, the runs keep the usual directory.
    """
    variable, directory_before = os.environ.get("TMPDIR"), tempfile.tempdir
    with _directory(None) as directory:
        try:
            if len(os.fsencode(directory)) <= _MAX_DIRECTORY_BYTES:
                os.environ["TMPDIR"] = tempfile.tempdir = directory
            yield directory
        finally:
            tempfile.tempdir = directory_before
            os.environ.pop("TMPDIR", None)
            if variable is not None:
                os.environ["TMPDIR"] = variable
