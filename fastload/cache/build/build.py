"""Builds an LMDB cache: workers decode a dataset in parallel, and this process writes its file.

Rules:

1. The file is written at PATH.partial (see `staging`). When it is complete and on the disk, it is moved to
   PATH, so a process that sees PATH sees the complete cache. A build that ends early leaves nothing.
2. Workers read samples (see `tasks`); this process only writes.
3. The file does not depend on who builds it, except for the cache's id and build time.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastload.batch.failures import FailedSample, check_left_out, check_max_errors
from fastload.cache.build import processes, staging
from fastload.cache.build.plan import check_source, make_plan
from fastload.cache.build.random_check import read_unnoticed, readable
from fastload.cache.build.tasks import TASKS_A_WORKER, Failure, RecordTasks, Value, cut
from fastload.cache.build.writer import FileWriter
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.progress import BuildProgress
from fastload.cache.records import encode
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError, TooManyFailuresError
from fastload.system.checks import check_arguments, one_of
from fastload.system.logs import log
from fastload.system.notes import add_note

if TYPE_CHECKING:
    from fastload.cache.fingerprint import Fingerprint
    from fastload.cache.lmdb.description import Plan

_GUESSED_BYTES = 1 << 20  # of a sample, if none was read before
_CHECKS = {
    "on_error": one_of("raise", "skip"),
}


def build_lmdb(dataset: Any, path: str | os.PathLike[str], **options: Any) -> LMDBCache:
    """The finished cache of a dataset at `path`: opened if it exists, else built.

    Args:
        dataset: Map-style and deterministic.
        path: The file.
        **options: See `Build`.

    Raises:
        CacheMismatchError: The cache at `path` was made from other samples, or with other settings.
        CacheBusyError: Another process is building it, and `wait` is False; or another thread is.
        UnsupportedSampleError: A value in a sample cannot be cached.
        CacheError: The file could not be written.
        TooManyFailuresError: More samples than `max_errors` allows could not be read.
        ValueError: An argument is invalid.
    """
    return Build(dataset, os.path.abspath(path), **options).cache()


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
    """A build of a cache by this process.

    Args:
        dataset: Map-style and deterministic.
        path: The absolute path of the cache.
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
    num_workers: int | None = None
    progress: bool = True
    probed: dict[int, Any] = field(default_factory=dict)
    on_error: str = "raise"
    max_errors: int | float = 0.01
    wait: bool = True
    fingerprint: Fingerprint | None = None

    def __post_init__(self) -> None:
        if self.on_error == "replace":  # the word of DataLoader
            raise ValueError('a build replaces no samples: write on_error="skip", which leaves them out')
        check_arguments(vars(self), _CHECKS)
        check_max_errors(self.max_errors, self.on_error, '"skip"')
        self.probed = dict(self.probed)
        self._is_skipping = self.on_error == "skip"

    def cache(self) -> LMDBCache:
        """The finished cache: opened if it exists, else built."""
        path = self.path
        if os.path.lexists(path):
            return self._opened()
        with staging.only_builder(path, wait=self.wait):
            if os.path.lexists(path):  # another process has just built it
                return self._opened()
            plan, partial = self._plan(), staging.begin(path)
            try:
                left_out = self._write(partial, plan)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(partial)
                raise
            staging.publish(partial, path, left_out)
        if left_out:
            log.warning(
                "%s: %d of %d samples could not be read and are left out: see %s%s",
                *(path, len(left_out), plan.num_samples, path, staging.REPORT),
            )
        cache = LMDBCache(path)
        cache.reason = "built now, as it did not exist"
        return cache

    def _opened(self) -> LMDBCache:
        """The finished cache, after it was compared with the dataset and the settings."""
        cache = opened_lmdb(self.path)
        dataset, fingerprint = self.dataset, self.fingerprint
        num_samples, probed = len(dataset), self.probed
        is_compared = fingerprint is None or cache.description.parts is None
        if is_compared and 0 not in probed and 0 in cache and num_samples:
            with contextlib.suppress(*[Exception] * self._is_skipping):
                probed = {0: read_unnoticed(dataset, 0)}
        check_source(cache, num_samples, probed, fingerprint=fingerprint)
        return cache

    def _plan(self) -> Plan:
        """The plan of this build; reads sample 0, or another one if that cannot be read, unless one was."""
        if 0 not in self.probed and len(self.dataset):
            try:
                self.probed[0] = self.dataset[0]
            except Exception as error:  # noqa: BLE001 - it is raised, unless such samples are left out
                if not self._is_skipping:
                    Failure.of(0, error).reraise()
                with contextlib.suppress(Exception):
                    self.probed |= [next(readable(self.dataset, self.dataset.__getitem__))]
        return make_plan(self.dataset, self.probed, self.fingerprint)

    def _write(self, partial: str, plan: Plan) -> list[FailedSample]:
        """Write the file at this path; returns the samples that it leaves out."""
        num_samples, left_out = plan.num_samples, []
        num_processes = processes.choose_workers(self.num_workers, num_samples)
        example_bytes = len(encode(self.probed[min(self.probed)])) if self.probed else _GUESSED_BYTES
        ranges = cut(num_samples, example_bytes, num_processes)
        tasks = RecordTasks(self.dataset, ranges, self.probed, self._is_skipping)
        # Workers start before a file is opened, because they must not inherit LMDB environments.
        answers = processes.run(tasks, len(ranges), num_processes, ahead=TASKS_A_WORKER)
        try:
            with (
                BuildProgress(f"building {self.path}", num_samples, shown=self.progress) as progress,
                contextlib.closing(FileWriter(partial, plan)) as writer,
            ):
                for indices, values in zip(ranges, answers, strict=True):
                    for index, value in zip(indices, values, strict=False):  # fewer, if the last one failed
                        if isinstance(value, Failure):
                            value.reraise()
                        if isinstance(value, FailedSample):
                            left_out.append(value)
                            self._check_left_out(left_out, num_samples)
                        else:
                            writer.put(index, *value)
                    nbytes = sum(len(value.data) for value in values if isinstance(value, Value))
                    progress.advance(nbytes, len(values))
                writer.finish()
        finally:
            processes.stop(answers)
        return left_out

    def _check_left_out(self, left_out: list[FailedSample], num_samples: int) -> None:
        try:
            advice = "Raise max_errors or repair the files, and build again"
            check_left_out(left_out, self.max_errors, num_samples, advice)
        except TooManyFailuresError as error:
            with contextlib.suppress(CacheError):
                staging.write_report(self.path, left_out)
                listed = f"{self.path}{staging.REPORT}"
                add_note(error, f"The samples that could not be read are listed in {listed}")
            raise
