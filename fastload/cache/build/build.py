"""Builds an LMDB cache shard by shard: workers decode a dataset in parallel, and this process writes.

A shard is the unit of resumption and of a task (see `on_executor`). Rules:

1. All files are written below PATH.partial (see `staging`). When all shards are complete and on disk, the
   cache is moved to PATH, so a process that sees PATH sees the complete cache.
2. Workers read samples (see `tasks`); this process only writes.
3. The files do not depend on who builds them, or in which order, except for the cache's id and build time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastload.batch.failures import FailedSample, check_left_out, check_max_errors
from fastload.cache.build import processes
from fastload.cache.build.plan import check_source, make_plan
from fastload.cache.build.random_check import read_unnoticed, readable
from fastload.cache.build.staging import REPORT, StagingDirectory, only_builder
from fastload.cache.build.tasks import TASKS_A_WORKER, Failure, RecordTasks, Value, cut
from fastload.cache.build.writer import ShardWriter
from fastload.cache.format.progress import BuildProgress
from fastload.cache.format.record import encode
from fastload.cache.lmdb.files import PARTIAL_SUFFIX, check_openable, shard_name
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError, TooManyFailuresError
from fastload.system.checks import check_arguments, integer, one_of, optional
from fastload.system.humanize import fastload_command
from fastload.system.logs import log
from fastload.system.notes import add_note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from fastload.cache.format.fingerprint import Fingerprint
    from fastload.cache.lmdb.description import Plan

RETRY = "Raise max_errors or repair the files, and build again"
_GUESSED_BYTES = 1 << 20  # of a sample, if none was read before
_CHECKS = {
    "shards": optional(integer(1)),
    "on_error": one_of("raise", "skip"),
}


def build_lmdb(dataset: Any, path: str | os.PathLike[str], **options: Any) -> LMDBCache:
    """The finished cache of a dataset at `path`: opened if it exists, else built, or its build is resumed.

    Args:
        dataset: Map-style and deterministic.
        path: The file, or with several shards the directory.
        **options: See `Build`.

    Raises:
        CacheMismatchError: The cache, or the unfinished build, at `path` was made from other samples, or with
            other settings.
        CacheBusyError: Another process is building it, and `wait` is False; or another thread is.
        UnsupportedSampleError: A value in a sample cannot be cached.
        CacheError: The files could not be written, or this process cannot open as many files as the shards
            need.
        TooManyFailuresError: More samples than `max_errors` allows could not be read; finished shards are
            kept.
        ValueError: An argument is invalid.
    """
    build = Build(dataset, os.path.abspath(path), **options)
    return build.cache(
        lambda files: build.write(files, range(files.plan.num_shards), f"building {build.path}")
    )


def opened_lmdb(path: str) -> LMDBCache:
    """What is at a path where a cache can be built.

    Raises:
        CacheCorruptError, CacheMismatchError: It is no cache that can be read.
    """
    try:
        return LMDBCache(path)
    except (CacheCorruptError, CacheMismatchError) as error:
        add_note(error, "To build a cache, use a path that does not exist yet")
        raise


@dataclass
class Build:
    """A build of a cache, or of one of its shards, by this process.

    Args:
        dataset: Map-style and deterministic.
        path: The absolute path of the cache.
        shards: Number of files of the cache; None accepts that of a cache or an unfinished build, and builds
            files of about 1 GiB, at most 128. An interrupted build continues with the first unfinished shard.
        num_workers: Number of decoding processes; None for one per usable CPU, 0 for none.
        progress: Show a bar if standard error is a terminal; progress is logged otherwise.
        probed: Samples that were already read, by index; they are not read again.
        on_error: `"raise"` ends the build at the first sample that cannot be read; `"skip"` leaves such a
            sample out and writes a line about it to PATH.errors.jsonl.
        max_errors: The maximum number of left-out samples (an int), or their share (a float).
        wait: Wait while another process builds the cache, and then open it.
        fingerprint: Of the samples; identifies a cache without reading a sample.
    """

    dataset: Any
    path: str
    shards: int | None = None
    num_workers: int | None = None
    progress: bool = True
    probed: dict[int, Any] = field(default_factory=dict)
    on_error: str = "raise"
    max_errors: int | float = 0.01
    wait: bool = True
    fingerprint: Fingerprint | None = None
    left_out: list[FailedSample] = field(default_factory=list, init=False)  # of all shards so far

    def __post_init__(self) -> None:
        if self.on_error == "replace":  # the word of DataLoader
            raise ValueError('a build replaces no samples: write on_error="skip", which leaves them out')
        check_arguments(vars(self), _CHECKS)
        check_max_errors(self.max_errors, self.on_error, '"skip"')
        self.probed = dict(self.probed)
        self._kept = f"Finished shards are kept at {self.path + PARTIAL_SUFFIX}"
        self._is_skipping = self.on_error == "skip"

    def cache(self, write: Callable[[StagingDirectory], object]) -> LMDBCache:
        """The finished cache: opened if it exists, else built.

        Args:
            write: Called with the directory; finishes all its shards.
        """
        if os.path.lexists(self.path):
            return self.opened()
        with only_builder(self.path, wait=self.wait):
            if os.path.lexists(self.path):  # another process has just built it
                return self.opened()
            files = StagingDirectory(self.path)
            files.begin(self.plan(files.plan if files.open() else None))
            try:
                check_openable(files.plan.num_shards)
                write(files)
                return self._publish(files)
            except BaseException as error:
                if isinstance(error, TooManyFailuresError):
                    self._list_left_out(files, error)
                files.remove_unused()
                if os.path.isdir(files.path):
                    add_note(error, f"{self._kept}: build again to resume")
                raise

    def _list_left_out(self, files: StagingDirectory, error: TooManyFailuresError) -> None:
        """Write the report that the finished cache would have had."""
        samples = [*self.left_out]
        for shard in range(files.plan.num_shards):  # also those that other processes wrote
            samples += files.finished(shard) or []
        left_out = {sample.index: sample for sample in samples}
        with contextlib.suppress(OSError, CacheError):
            files.write_report([left_out[index] for index in sorted(left_out)])
            add_note(error, f"The samples that could not be read are listed in {self.path}{REPORT}")

    def opened(self) -> LMDBCache:
        """The finished cache, after it was compared with the dataset and the settings.

        Raises:
            CacheMismatchError: It was made from other samples, or with other settings.
        """
        cache = opened_lmdb(self.path)
        dataset, fingerprint = self.dataset, self.fingerprint
        num_samples, probed = len(dataset), self.probed
        is_compared = fingerprint is None or cache.description.parts is None
        if is_compared and 0 not in probed and 0 in cache and num_samples:
            with contextlib.suppress(*[Exception] * self._is_skipping):
                probed = {0: read_unnoticed(dataset, 0)}
        shards = None if self.shards is None else max(1, min(self.shards, num_samples))
        settings = {} if shards is None else {"num_shards": shards}
        check_source(cache, num_samples, probed, fingerprint=fingerprint, settings=settings)
        return cache

    def plan(self, earlier: Plan | None) -> Plan:
        """The plan of this build; reads sample 0, or another one if it cannot be read, unless it was probed.

        Args:
            earlier: The plan of an earlier build, whose settings replace those that are None.
        """
        num_shards = self.shards or (None if earlier is None else earlier.num_shards)
        if 0 not in self.probed and len(self.dataset):
            try:
                self.probed[0] = self.dataset[0]
            except Exception as error:  # noqa: BLE001 - it is raised, unless such samples are left out
                if not self._is_skipping:
                    Failure.of(0, error).reraise()
                with contextlib.suppress(Exception):
                    self.probed |= [next(readable(self.dataset, self.dataset.__getitem__))]
        return make_plan(self.dataset, self.probed, self.fingerprint, num_shards)

    def write(
        self,
        files: StagingDirectory,
        shards: Sequence[int],
        title: str,
    ) -> None:
        """Write the unfinished shards.

        Args:
            files: The directory.
            shards: The numbers of the shards.
            title: The name of the work, for the progress.

        Raises:
            CacheMismatchError: A finished shard leaves samples out, and this build must not.
        """
        plan, finished = files.plan, self.finished(files, shards)
        missing = [shard for shard in shards if shard not in finished]
        if not missing:
            return
        total = sum(len(plan.indices_of(shard)) for shard in shards)
        spans = [plan.indices_of(shard) for shard in missing]
        num_left = sum(map(len, spans))
        if num_left < total:
            log.info("%s: continues, %d of %d samples are in finished shards", title, total - num_left, total)
        num_processes = processes.choose_workers(self.num_workers, num_left)
        example_bytes = len(encode(self.probed[min(self.probed)])) if self.probed else _GUESSED_BYTES
        ranges = cut(spans, example_bytes, num_processes)
        tasks = RecordTasks(self.dataset, ranges, self.probed, self._is_skipping)
        # Workers start before a file is opened, because they must not inherit LMDB environments.
        answers = processes.run(tasks, len(ranges), num_processes, ahead=TASKS_A_WORKER)
        try:
            with BuildProgress(title, total, shown=self.progress, done=total - num_left) as progress:
                values = self._values(ranges, answers, progress)
                for shard, span in zip(missing, spans, strict=True):
                    self._write_shard(files, shard, itertools.islice(values, len(span)))
        finally:
            processes.stop(answers)

    def finished(self, files: StagingDirectory, shards: Iterable[int]) -> dict[int, list[FailedSample]]:
        """The finished ones of these shards, and the samples that each leaves out, which count from now on.

        Raises:
            CacheMismatchError: A finished shard leaves samples out, and this build must not.
        """
        finished = {}
        for shard in shards:
            left_out = files.finished(shard)
            if left_out is not None:
                self._check_may_leave_out(shard, left_out)
                self.left_out += left_out
                finished[shard] = left_out
        return finished

    def _check_may_leave_out(self, shard: int, left_out: Sequence[FailedSample]) -> None:
        """Check that this build can use a finished shard that leaves these samples out."""
        if left_out and not self._is_skipping:
            raise CacheMismatchError(
                f'shard {shard + 1} was built before with on_error="skip", and leaves out {len(left_out):,} '
                f'samples: build with on_error="skip" too, or remove all shards. {self._kept}'
            )

    def _values(
        self, ranges: Iterable[range], answers: Iterator[Any], progress: BuildProgress
    ) -> Iterator[tuple[int, Value | FailedSample]]:
        """The index of each sample with its value, or with why it has none."""
        for indices, values in zip(ranges, answers, strict=True):
            nbytes = sum(len(value.data) for value in values if isinstance(value, Value))
            progress.advance(nbytes, len(values))  # here: nobody asks for more after the last value
            for index, value in zip(indices, values, strict=False):  # fewer values, if the last one failed
                if isinstance(value, Failure):
                    value.reraise()
                yield index, value

    def _write_shard(
        self, files: StagingDirectory, shard: int, values: Iterable[tuple[int, Value | FailedSample]]
    ) -> None:
        """Write one shard."""
        left_out: list[FailedSample] = []
        own = files.own_path(shard_name(files.plan, shard))
        writer = ShardWriter(own, files.plan, shard)
        try:
            for index, value in values:
                if not isinstance(value, FailedSample):
                    writer.put(index, *value)
                    continue
                left_out.append(value)
                self.left_out.append(value)
                check_left_out(self.left_out, self.max_errors, files.plan.num_samples, RETRY)
            writer.finish()
            files.complete(shard, own, left_out)
        finally:
            writer.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(own)

    def _publish(self, files: StagingDirectory) -> LMDBCache:
        """The finished cache of a directory whose shards are all finished.

        Raises:
            CacheError: Shards are missing.
            TooManyFailuresError: More samples than `max_errors` allows are left out.
        """
        path, plan, left_out = self.path, files.plan, []
        for shard in range(plan.num_shards):
            left_out_here = files.finished(shard)
            if left_out_here is None:
                raise CacheError(
                    f"{files.path_of(shard)} was removed or changed while the cache was built: build again"
                )
            left_out += left_out_here
        check_left_out(
            left_out,
            self.max_errors,
            plan.num_samples,
            f"Build again with a larger max_errors, or remove the shards with "
            f"{fastload_command('cache', 'rm', path)}, repair the files, and build again",
        )
        files.publish(left_out)
        if left_out:
            log.warning(
                "%s: %d of %d samples could not be read and are left out: see %s%s",
                *(path, len(left_out), plan.num_samples, path, REPORT),
            )
        cache = LMDBCache(path)
        cache.reason = "built now, as it did not exist"
        return cache
