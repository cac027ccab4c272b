"""A whole benchmark: examine the samples, choose what the user left open, build caches, measure in turn.

Nothing remains after it, also after an error or an interruption: no process, and no file.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset

from fastload.bench import measure
from fastload.bench.apart import RunFailedError, call
from fastload.bench.contenders import CACHES, Sweep
from fastload.bench.machine import Machine, busy_warnings, load_per_cpu
from fastload.bench.plan import Costs, default_workers
from fastload.bench.result import Result, Row
from fastload.bench.rounds import run_rounds
from fastload.cache.dataset import CachedDataset
from fastload.system.budget import parse_budget
from fastload.system.cpu_times import CpuTimes, others_share
from fastload.system.cpus import worthwhile_cpus
from fastload.system.logs import log
from fastload.system.sizes import readable_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fastload.bench.contenders import Contender
    from fastload.bench.measure import Epochs, Examined

_BATCH_SIZES = (64,)
_ROUNDS = 3
# The path of a socket has at most 107 bytes, and multiprocessing adds /pymp-12345678/listener-12345678.
_MOST_DIRECTORY_BYTES = 70
_DISK_SHARE = 0.9  # of the free space, which an LMDB cache may take


@dataclass(frozen=True)
class Settings:
    """What the user wants to be measured; None where the benchmark may choose.

    Attributes:
        source: The name of the source.
        transform: The name of the transform.
        workers: Numbers of workers.
        batch_sizes: Batch sizes.
        start_methods: Start methods of workers.
        caches: Of `contenders.CACHES`.
        sizes: The names of sizes to which images are scaled.
        samples: Samples of an epoch.
        minutes: About how long the benchmark may take.
        rounds: How often each contender runs.
        scratch: A directory for LMDB caches.
    """

    source: str
    transform: str | None = None
    workers: tuple[int, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    start_methods: tuple[str, ...] | None = None
    caches: tuple[str, ...] | None = None
    sizes: tuple[str | None, ...] | None = None
    samples: int | None = None
    minutes: float = 3.0
    rounds: int | None = None
    scratch: str | None = None

    def completed_by(self, baseline: Result) -> Settings:
        """These settings, and those of the baseline where the user chose none, so that the runs match."""
        there: dict[str, Any] = {name: tuple(found) for name, found in baseline.sweep.as_dict().items()}
        there["transform"], there["rounds"] = baseline.transform, baseline.rounds
        there["samples"] = baseline.num_samples
        return replace(self, **{name: there[name] for name in there if getattr(self, name) is None})


class NoBatchError(ValueError):
    """The samples cannot be collated to a batch; the message says why."""


class Benchmark:
    """Looks at some samples and plans the runs.

    Args:
        settings: The user's settings.
        datasets: The whole dataset of each size.
        transform: The random part behind it; None without one.

    Attributes:
        result: The contenders, with the figures of those that have run.

    Raises:
        RunFailedError: Samples could not be read.
        NoBatchError: They have several shapes, or are of a kind that makes no batch.
    """

    def __init__(self, settings: Settings, datasets: Mapping[str | None, Any], transform: Any) -> None:
        load = load_per_cpu()
        self._settings, self._datasets, self._transform = settings, datasets, transform
        self._examined: dict[str | None, Examined] = {
            size: call(measure.examine, dataset, transform) for size, dataset in datasets.items()
        }
        found = self._examined.values()
        for why_no_batch in filter(None, (one.why_no_batch for one in found)):
            raise NoBatchError(why_no_batch)
        cpus = worthwhile_cpus()
        sweep = Sweep(
            workers=settings.workers or default_workers(cpus),
            batch_sizes=settings.batch_sizes or _BATCH_SIZES,
            start_methods=settings.start_methods or (multiprocessing.get_start_method(),),
            caches=settings.caches or CACHES,
            sizes=tuple(datasets),
        )
        contenders, rounds = sweep.contenders(), settings.rounds or _ROUNDS
        length = len(next(iter(datasets.values())))
        sample_s, transform_s = max(one.sample_s for one in found), max(one.transform_s for one in found)
        costs = Costs(rounds, sample_s, transform_s, cpus)
        count = min(length, settings.samples or length)
        if settings.samples is None:
            count = costs.num_samples_within(60 * settings.minutes, contenders, length)
        log.info(
            "%d contenders, %d rounds, %s of %s samples: about %.1f minutes",
            *(len(contenders), rounds, f"{count:,}", f"{length:,}", costs.seconds(contenders, count) / 60),
        )
        self.result = Result(
            source=settings.source,
            transform=settings.transform,
            length=length,
            num_samples=count,
            sample_nbytes={size or "": one.sample_nbytes for size, one in self._examined.items()},
            sweep=sweep,
            rounds=rounds,
            machine=Machine.this(),
            rows=[Row(contender) for contender in contenders],
            load_before=load,
        )

    def run(self, on_run: Callable[[int, Row], None]) -> None:
        """Measure all contenders in turn; an interruption leaves what was measured.

        Args:
            on_run: Called before each run, see `run_rounds`.
        """
        result = self.result
        with _temporary_files() as temporary, _directory(self._settings.scratch or temporary) as directory:
            parts = {size: _part(dataset, result.num_samples) for size, dataset in self._datasets.items()}
            self._refuse_caches(directory)
            before = CpuTimes.now()
            paths = self._prepare(parts, directory)

            def run_once(contender: Contender) -> Epochs:
                path = paths.get(contender.size) if contender.cache == "lmdb" else None
                part = parts[contender.size]
                epochs: Epochs = call(measure.measure, part, self._transform, contender, path)
                return epochs

            run_rounds(result.rows, result.rounds, run_once, on_run)
            result.others_share = others_share(before, CpuTimes.now())
        if any(isinstance(dataset, CachedDataset) for dataset in self._datasets.values()):
            result.warnings.append(
                "the dataset is a CachedDataset, whose cache all contenders share: only later epochs compare"
            )
        result.warnings += busy_warnings(result.others_share, result.load_before)

    def _refuse_caches(self, directory: str) -> None:
        """Mark the rows whose cache is not possible or does not fit, with the reason."""
        result = self.result
        memory_nbytes = parse_budget("auto")
        disk_nbytes = int(_DISK_SHARE * shutil.disk_usage(directory).free)
        for row in result.rows:
            cache, found = row.contender.cache, self._examined[row.contender.size]
            if cache == "none":
                continue
            whole, part = result.length * found.sample_nbytes, result.num_samples * found.sample_nbytes
            is_for_whole = whole > memory_nbytes and not self._settings.caches
            if found.why_no_cache:
                row.problem = f"not possible: {found.why_no_cache}"
            elif cache == "ram" and (part > memory_nbytes or is_for_whole):
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
                if text not in result.warnings:
                    result.warnings.append(text)

    def _prepare(self, parts: Mapping[str | None, Any], directory: str) -> dict[str | None, str]:
        """Build the LMDB caches; for sizes without one, read all samples once.

        Both bring the files into the page cache, before any contender runs.
        """
        paths: dict[str | None, str] = {}
        for number, (size, dataset) in enumerate(parts.items()):
            rows = [row for row in self.result.rows if row.contender.size == size and not row.problem]
            in_lmdb = [row for row in rows if row.contender.cache == "lmdb"]
            try:
                if in_lmdb:
                    log.info("building an LMDB cache")
                    path = os.path.join(directory, f"{number}.lmdb")
                    self.result.build_s[size or ""] = call(measure.build, dataset, path, worthwhile_cpus())
                    paths[size] = path
                else:
                    log.info("reading all samples once")
                    call(measure.warm, dataset, worthwhile_cpus())
            except RunFailedError as error:
                for row in in_lmdb:
                    row.problem = f"failed: the LMDB cache could not be built: {error}"
        return paths


def _part(dataset: Any, count: int) -> Any:
    """`count` samples of the dataset, evenly spaced."""
    length = len(dataset)
    return dataset if count >= length else Subset(dataset, measure.spread_indices(length, count))


def _directory(parent: str | None) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fastload-bench-", dir=parent, ignore_cleanup_errors=True)


@contextlib.contextmanager
def _temporary_files() -> Iterator[str]:
    """A directory for the temporary files of all runs, which is removed at the end.

    A worker of torch's loader that is stopped because of an error leaves the directory of its socket behind.
    Where the path of such a socket would be too long for the system, the runs keep the usual directory.
    """
    variable, directory_before = os.environ.get("TMPDIR"), tempfile.tempdir
    with _directory(None) as directory:
        try:
            if len(os.fsencode(directory)) <= _MOST_DIRECTORY_BYTES:
                os.environ["TMPDIR"] = tempfile.tempdir = directory
            yield directory
        finally:
            tempfile.tempdir = directory_before
            os.environ.pop("TMPDIR", None)
            if variable is not None:
                os.environ["TMPDIR"] = variable
