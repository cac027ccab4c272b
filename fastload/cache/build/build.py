"""Builds an LMDB cache shard by shard: workers decode a dataset in parallel, and this process writes.

A shard is the unit of resumption, of upload (see `upload`) and of a task (see `on_executor`). Rules:

1. All files are written below PATH.partial (see `unfinished`). When all shards are complete and on the disk,
   the cache is moved to PATH, so a process that sees PATH sees the complete cache.
2. Workers decode and encode (see `tasks`); this process only writes.
3. The files do not depend on who builds them, or in which order, but for the facts that are new for each
   cache: its id and the time of its build.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.batch.failed_sample import FailedSample
from fastload.batch.failures import budget_exceeded, check_error_budget, check_left_out, most_failures
from fastload.cache.build import processes
from fastload.cache.build.build_lock import lock_name, only_builder
from fastload.cache.build.names import foreign_part
from fastload.cache.build.plan import as_stored, check_arguments, make_plan, open_finished
from fastload.cache.build.tasks import TASKS_A_WORKER, Failed, RecordTasks, plan_tasks
from fastload.cache.build.unfinished import Unfinished
from fastload.cache.build.writer import ShardWriter
from fastload.cache.lmdb.description import Description, runs_of
from fastload.cache.lmdb.files import check_openable
from fastload.cache.lmdb.format import VALUE_HEADER_BYTES
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.lmdb.shapes import SeenShapes
from fastload.cache.progress import BuildProgress
from fastload.cache.record import encode
from fastload.errors import CacheError, CacheMismatchError, ErrorBudgetError, UnsupportedSampleError, add_note
from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fastload.cache.build.tasks import Answer
    from fastload.cache.fingerprint import Fingerprint
    from fastload.cache.lmdb.description import Plan

_GUESSED_BYTES = 1 << 20  # of a sample, if sample 0 cannot be read
_MAX_LISTED = 10  # commands, and shards, that an error lists


def build_lmdb(
    dataset: Any,
    path: str | os.PathLike[str],
    *,
    num_workers: int | None = None,
    progress: bool = True,
    probed: Mapping[int, Any] | None = None,
    codec: str | None = None,
    quality: int | None = None,
    shards: int | None = None,
    on_error: str = "raise",
    error_budget: int | float = 1.0,
    fingerprint: Fingerprint | None = None,
) -> LMDBCache:
    """The finished cache of a dataset at `path`: opened if it exists, else built, or its build is resumed.

    Args:
        dataset: Map-style and deterministic.
        path: The file, or with `shards` the directory.
        num_workers: Processes that decode; None for one per usable CPU, 0 for none.
        progress: Show a bar if standard error is a terminal; progress is logged otherwise.
        probed: Samples that were already read, by index; they are not read again.
        codec: How `(H, W, 3)`, `(H, W, 1)` and `(H, W)` uint8 arrays are encoded: `"raw"`; `"png"`, lossless;
            `"jpeg"` or `"webp"`, which change the pixels of arrays with three channels (one channel may be a
            mask, and is encoded as png); `"source"` stores the files of undecoded images as they are. None
            accepts a finished cache of any codec, and builds a raw cache.
        quality: Quality of jpeg and webp, 1 to 100; webp of quality 100 is lossless. None accepts a finished
            cache of any quality, and builds with 95.
        shards: Number of files of the cache; None accepts any number, and builds one. With several, `path`
            is a directory. Finished shards survive a power failure during the build.
        on_error: `"raise"` ends the build at the first sample that cannot be read; `"skip"` leaves such a
            sample out and writes a line about it to PATH.errors.jsonl.
        error_budget: The maximum number of samples that are left out (an int), or their share (a float).
        fingerprint: Of the samples; it identifies a finished cache without reading a sample.

    Raises:
        CacheMismatchError: The cache at `path` was made from other samples, or has another codec; or several
            machines build another cache there.
        CacheBusyError: Another process is building it.
        UnsupportedSampleError: A value in a sample cannot be cached.
        CacheError: The files could not be written, or this process may not open as many files as the shards
            need.
        ErrorBudgetError: More samples than the budget could not be read; the finished part is kept.
        ValueError: An argument is invalid.
    """
    path = os.path.abspath(os.fspath(path))
    build = Build(
        dataset, path, shards, dict(probed or {}), codec, quality, on_error, error_budget, fingerprint
    )
    with contextlib.ExitStack() as stack:
        if os.path.lexists(path):
            _remove_leftovers(path)
        else:
            check_openable(min(shards or 1, len(dataset)))
            stack.enter_context(only_builder(path))
        files = stack.enter_context(build.files(is_shared=False))
        if isinstance(files, LMDBCache):
            return files
        num_resumed = build.write_all(num_workers, f"building {path}", shown=progress)
        resumed = ""
        if num_resumed:
            num_left = files.plan.num_samples - num_resumed
            resumed = f" (the last {num_left:,} samples; an earlier build made the others)"
        cache = _publish(files, path, error_budget, f"built now, as it did not exist{resumed}")
        build.report_shapes(cache)
        return cache


def _remove_leftovers(path: str) -> None:
    """Remove the harmless remains of a builder that was killed after it had published the cache."""
    if os.path.lexists(f"{path}.partial") or os.path.lexists(lock_name(path)):
        # Another builder may remove the same files now, and this directory may be read-only.
        with (
            contextlib.suppress(CacheError, OSError),
            only_builder(path),
            contextlib.closing(Unfinished(path)) as files,
        ):
            with contextlib.suppress(CacheMismatchError):
                files.open()
            if foreign_part(files.path) is None and not files.is_shared:
                files.remove()


# --- one shard -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BuiltShard:
    """A finished shard, or a shard of a cache that is finished.

    Attributes:
        shard: Its number, from 0.
        num_shards: Number of shards that were asked for.
        num_samples: Samples of this shard, including samples that are left out.
        left_out: The samples of this shard that are left out.
        nbytes: Size of its file.
        was_built: Whether this call built it; it was finished before otherwise.
        is_joined: Whether the finished cache exists already.
    """

    shard: int
    num_shards: int
    num_samples: int
    left_out: Sequence[FailedSample] = ()
    nbytes: int = 0
    was_built: bool = False
    is_joined: bool = True

    @property
    def num_left_out(self) -> int:
        """How many of its samples are left out."""
        return len(self.left_out)


def build_shard(
    dataset: Any,
    path: str | os.PathLike[str],
    shard: int,
    num_shards: int,
    *,
    num_workers: int | None = None,
    progress: bool = True,
    probed: Mapping[int, Any] | None = None,
    codec: str | None = None,
    quality: int | None = None,
    on_error: str = "raise",
    error_budget: int | float = 1.0,
    fingerprint: Fingerprint | None = None,
    name: str | None = None,
) -> BuiltShard:
    """One shard of the cache of a dataset, built in PATH.partial unless it is finished.

    Any process on any machine can build any shard at any time, as long as all see PATH on one file system.
    When all shards are finished, `join` makes the cache. A dataset with fewer samples than shards has one
    shard per sample; there is nothing to build for the others.

    Args:
        dataset: Map-style and deterministic; the same in all processes.
        path: The path of the finished cache.
        shard: The shard to build, from 0.
        num_shards: Number of shards of the cache.
        num_workers: As in `build_lmdb`.
        progress: As in `build_lmdb`.
        probed: As in `build_lmdb`.
        codec: As in `build_lmdb`.
        quality: As in `build_lmdb`.
        on_error: As in `build_lmdb`. With `"skip"`, `join` writes the report PATH.errors.jsonl.
        error_budget: The maximum number or share of samples of the whole cache that are left out. A shard
            that leaves out more ends its build; `join` counts all shards.
        fingerprint: As in `build_lmdb`.
        name: The place of the finished cache in messages, if the shards are moved there; None for `path`.

    Raises:
        CacheMismatchError: The shards at `path` are made from other samples, or with other settings; or this
            shard leaves out samples, and `on_error` is `"raise"`.
        UnsupportedSampleError: A value in a sample cannot be cached.
        CacheError: The files could not be written.
        ErrorBudgetError: The shard leaves out more samples than the budget allows.
        ValueError: An argument is invalid.
    """
    path = os.path.abspath(os.fspath(path))
    build = Build(
        dataset, path, num_shards, dict(probed or {}), codec, quality, on_error, error_budget, fingerprint
    )
    if isinstance(shard, bool) or not isinstance(shard, int) or not 0 <= shard < num_shards:
        raise ValueError(f"shard should be an int from 0 to {num_shards - 1}, but got {shard!r}")
    with build.files(is_shared=True) as files:
        plan = files.plan
        num_samples = len(plan.indices_of(shard)) if shard < plan.num_shards else 0
        if isinstance(files, LMDBCache) or shard >= plan.num_shards:
            return BuiltShard(shard, num_shards, num_samples, is_joined=isinstance(files, LMDBCache))
        if name is not None:
            files.what_is_kept = f"Finished shards are kept at {name}"
        left_out = files.finished(shard)
        was_built = left_out is None
        if left_out is None:
            title = f"shard {shard + 1} of {plan.num_shards} of {name or path}"
            try:
                build.write([shard], num_workers, f"building {title}", shown=progress)
            except CacheError as error:
                if not _is_published(path, plan):  # else another process finished this shard and joined
                    raise files.removed() if files.was_removed(shard, error) else error from error.__cause__
            build.log_shapes(title)
            left_out = files.left_out(shard)
            if left_out and name is None:
                log.warning(
                    "%s: %d of %d samples of shard %d could not be read and are left out: 'fastload cache "
                    "join' writes the report",
                    *(path, len(left_out), num_samples, shard + 1),
                )
        elif left_out and on_error == "raise":
            raise files.leaves_out(shard, len(left_out))
        nbytes = files.shard_nbytes(shard)
        return BuiltShard(
            shard, num_shards, num_samples, left_out, nbytes or 0, was_built, is_joined=nbytes is None
        )


@dataclass
class Build:
    """One process's part in the build of a cache; the arguments and errors are those of `build_lmdb`.

    Args:
        dataset: Map-style and deterministic.
        path: The absolute path of the cache.
        num_shards: Number of files; None accepts any number of a finished cache, and builds one.
        probed: Samples that were already read, by index; sample 0 is added.
        codec: How arrays are encoded.
        quality: Of a lossy codec.
        on_error: What happens if a sample cannot be read.
        error_budget: The maximum number or share of samples that are left out.
        fingerprint: Of the samples.
    """

    dataset: Any
    path: str
    num_shards: int | None
    probed: dict[int, Any]
    codec: str | None
    quality: int | None
    on_error: str
    error_budget: int | float
    fingerprint: Fingerprint | None

    def __post_init__(self) -> None:
        self._built_quality = check_arguments(
            self.codec, self.quality, self.num_shards, self.on_error, self.error_budget
        )
        self.dataset, self.fingerprint = as_stored(self.dataset, self.fingerprint, self.codec)
        self._skips = self.on_error == "skip"
        self._shapes = SeenShapes()
        self._written: list[range] = []  # the samples that this object wrote
        self._has_stored = False  # this build or an earlier one has committed a sample
        self._failed: Exception | None = None  # the error of a sample

    @contextlib.contextmanager
    def files(self, *, is_shared: bool) -> Iterator[Unfinished | LMDBCache]:
        """The directory of the unfinished cache, with its plan; or the cache, if it is finished.

        Args:
            is_shared: Whether several machines may follow the plan; otherwise the caller holds the lock.
        """
        with contextlib.closing(Unfinished(self.path)) as files:
            if not os.path.lexists(self.path):
                plan = make_plan(
                    self.dataset,
                    self.probed,
                    codec=self.codec or "raw",
                    quality=self._built_quality,
                    shards=self.num_shards or 1,
                    skips=self._skips,
                    fingerprint=self.fingerprint,
                )
                files.begin(plan, self.error_budget, is_shared=is_shared)
                if not os.path.lexists(self.path):
                    self._files = files
                    yield files
                    return
                # The shards were joined after this process had looked for the cache.
                if files.plan.build_id == plan.build_id:
                    files.remove_plan()
            form = self.codec, self.quality, self.num_shards
            yield open_finished(self.path, self.dataset, self.probed, *form, self.fingerprint)

    def write_all(self, num_workers: int | None, title: str, *, shown: bool) -> int:
        """Write all missing shards; returns the number of samples that an earlier build wrote."""
        plan, files = self._files.plan, self._files
        missing = []
        for shard in range(plan.num_shards):
            left_out = files.finished(shard)
            if left_out and not self._skips:
                files.forget(shard)
                left_out = None
            if left_out is None:
                missing.append(shard)
            else:
                files.skipped |= {sample.index: sample for sample in left_out}
        return self.write(missing, num_workers, title, shown=shown, total=plan.num_samples)

    def write(
        self,
        shards: Sequence[int],
        num_workers: int | None,
        title: str,
        *,
        shown: bool,
        total: int | None = None,
    ) -> int:
        """Write the samples of some shards; returns the number of samples that were there already.

        Args:
            shards: The shards to write, one after another.
            num_workers: Processes that decode, as `build_lmdb` takes it.
            title: The name of the work, for the progress.
            shown: Draw a bar, if standard error is a terminal.
            total: The number of samples that the progress counts; None for those of the shards.
        """
        plan = self._files.plan
        try:
            spans = [
                range(self._files.take_over(shard, skips=self._skips), plan.indices_of(shard).stop)
                for shard in shards
            ]
            if total is None:
                total = sum(len(plan.indices_of(shard)) for shard in shards)
            num_left = sum(map(len, spans))
            if num_left < total:
                self._has_stored = True
                log.info("%s: continues at sample %d of %d", title, total - num_left, total)
            num_processes = processes.choose_workers(num_workers, num_left)
            example_bytes = len(encode(self.probed[0])) if 0 in self.probed else _GUESSED_BYTES
            ranges, slots = plan_tasks(spans, example_bytes, num_processes)
            form = plan.codec, self._built_quality, self._skips
            tasks = RecordTasks(self.dataset, ranges, self.probed, *form, slots)
            with contextlib.closing(slots):
                # Workers start before a file is opened, because they must not inherit LMDB environments.
                answers = processes.run(tasks, tasks.orders(), num_processes, ahead=TASKS_A_WORKER)
                try:
                    with BuildProgress(title, total, shown=shown, done=total - num_left) as progress:
                        values = self._values(tasks, answers, progress)
                        for shard, span in zip(shards, spans, strict=True):
                            self._write_shard(shard, span, values)
                finally:
                    processes.stop(answers)
        except (Exception, KeyboardInterrupt) as error:
            if not self._has_stored and not self._files.skipped:
                self._files.remove_unused()
            self._note_what_is_kept(error)
            raise
        return total - num_left

    def _values(
        self, tasks: RecordTasks, answers: Iterator[Answer], progress: BuildProgress
    ) -> Iterator[tuple[int, bytes | memoryview | FailedSample]]:
        """The index of each sample with its value, valid until the next one, or with why it has none."""
        for indices, (values, slot) in zip(tasks.ranges, answers, strict=False):
            memory = tasks.slots.memory(slot)
            nbytes = 0
            for index, value in zip(indices, values, strict=False):  # fewer values, if the last one failed
                if isinstance(value, Failed):
                    raise self._explained(value)
                if isinstance(value, FailedSample):
                    yield index, value
                    continue
                content = memory[value[0] : sum(value)] if isinstance(value, tuple) else value
                nbytes += len(content)
                yield index, content
            tasks.slots.free(slot)
            progress.advance(nbytes, len(values))

    def _write_shard(
        self, shard: int, span: range, values: Iterator[tuple[int, bytes | memoryview | FailedSample]]
    ) -> None:
        files = self._files
        most_left_out = most_failures(self.error_budget, files.plan.num_samples)
        writer = ShardWriter(files.shard_path(shard))
        try:
            for index, value in itertools.islice(values, len(span)):
                if not isinstance(value, FailedSample):
                    writer.put(index, value)
                    self._shapes.add(memoryview(value)[VALUE_HEADER_BYTES:])
                    continue
                files.report(shard, value)
                if len(files.skipped) > most_left_out:
                    raise budget_exceeded(
                        len(files.skipped),
                        most_left_out,
                        files.plan.num_samples,
                        value,
                        f"{files.what_is_kept}: raise the budget or repair the files, and build again to "
                        "resume",
                    )
            left_out = [sample.index for sample in files.left_out(shard)]
            writer.finish(Description(files.plan, shard, runs_of(left_out)))
        except BaseException as error:
            if error is self._failed or isinstance(error, (ErrorBudgetError, KeyboardInterrupt)):
                writer.commit()
            raise
        finally:
            writer.close()
            self._has_stored |= writer.num_records > 0
        files.complete(shard)
        self._written.append(span)

    def report_shapes(self, cache: LMDBCache) -> None:
        """Log if samples differ in shape, which would fail in the first training batch; store the number."""
        self._shapes.add_stored(cache.path, self._written)  # samples of an earlier build
        cache.num_shapes = self._shapes.number
        self.log_shapes(cache.path)

    def log_shapes(self, title: str) -> None:
        """Log if the samples that were written differ in shape."""
        explanation = self._shapes.explain()
        if explanation is not None:
            log.info("%s: %s", title, explanation)

    def _explained(self, failed: Failed) -> Exception:
        error = failed.error
        add_note(error, f"in sample {failed.index} of the dataset")
        if error.__traceback__ is None:  # it comes from a worker
            add_note(error, f"raised in a worker process:\n{failed.trace}")
        self._failed = error
        return error

    def _note_what_is_kept(self, error: BaseException) -> None:
        if not os.path.isdir(self._files.path):
            return
        can_be_skipped = error is self._failed and not isinstance(error, UnsupportedSampleError)
        way_out = ', with on_error="skip" to leave such samples out' if can_be_skipped else ""
        add_note(error, f"{self._files.what_is_kept}: build again to resume{way_out}")


# --- the end ---------------------------------------------------------------------------------------------


def join(path: str | os.PathLike[str], *, error_budget: int | float | None = None) -> LMDBCache:
    """The cache at `path`, made from its finished shards; opened if it was joined before.

    Args:
        path: The path that was given to `build_shard`.
        error_budget: The maximum number or share of samples that are left out; None for the budget of the
            process that made the plan.

    Raises:
        FileNotFoundError: There is neither a cache nor a shard.
        CacheMismatchError: The shards are of another release.
        CacheError: Shards are missing; the error names them. Or the files could not be written.
        CacheBusyError: Another process joins the shards, or removes them.
        ErrorBudgetError: More samples than the budget are left out; all shards are kept.
        ValueError: `error_budget` is not valid.
    """
    if error_budget is not None:
        check_error_budget(error_budget)
    path = os.path.abspath(os.fspath(path))
    if not os.path.lexists(f"{path}.partial"):
        return _joined_before(path)
    with only_builder(path), contextlib.closing(Unfinished(path)) as files:
        if not files.open():
            if os.path.lexists(path):
                return _joined_before(path)
            raise FileNotFoundError(f"there is neither a cache nor a shard of one at {path}")
        if os.path.lexists(path) and _is_published(path, files.plan):
            files.remove()  # a process was killed while it joined one shard
            return _joined_before(path)
        reason = f"joined now, from {files.plan.num_shards} shards"
        return _publish(files, path, files.error_budget if error_budget is None else error_budget, reason)


def _joined_before(path: str) -> LMDBCache:
    try:
        cache = LMDBCache(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is neither a cache nor a shard of one at {path}") from None
    cache.reason = "opened, as its shards were joined before"
    return cache


def _is_published(path: str, plan: Plan) -> bool:
    """Whether the finished cache of this plan is at its path."""
    try:
        return LMDBCache(path).plan.build_id == plan.build_id
    except (OSError, CacheMismatchError):  # CacheCorruptError is an OSError
        return False


def _publish(files: Unfinished, path: str, error_budget: int | float, reason: str) -> LMDBCache:
    """The finished cache of a directory whose shards are all finished.

    Raises:
        CacheError: Shards are missing.
        ErrorBudgetError: More samples than the budget are left out.
    """
    plan = files.plan
    found = [files.finished(shard) for shard in range(plan.num_shards)]
    if None in found:
        raise CacheError(_what_is_missing(files, [k for k, one in enumerate(found) if one is None], path))
    left_out = [sample for one in found for sample in one or ()]
    check_left_out(
        left_out,
        error_budget,
        plan.num_samples,
        f"All shards are kept at {files.path}, with their reports: join with a larger error budget, or "
        f"remove the shards with 'fastload cache rm {shlex.quote(path)}', repair the files, and build them "
        "again",
    )
    files.publish(left_out)
    if left_out:
        log.warning(
            "%s: %d of %d samples could not be read and are left out: see %s.errors.jsonl",
            *(path, len(left_out), plan.num_samples, path),
        )
    cache = LMDBCache(path)
    cache.reason = reason
    return cache


def _what_is_missing(files: Unfinished, missing: list[int], path: str) -> str:
    num_shards = files.plan.num_shards
    commands = ", ".join(
        f"'fastload cache build-shard SOURCE {shlex.quote(path)} {shard + 1}/{num_shards}'"
        for shard in missing[:_MAX_LISTED]
    )
    more = f", and so on for all {len(missing)}" if len(missing) > _MAX_LISTED else ""
    unusable = [shard for shard in missing if files.has_file(shard)]
    reason = ""
    if unusable:
        reason = f" (the file of {_listed(unusable)} is damaged, or from another build, and will be replaced)"
    return (
        f"{'shards' if len(missing) > 1 else 'shard'} {_listed(missing)} of {num_shards} "
        f"{'are' if len(missing) > 1 else 'is'} missing{reason}: with the SOURCE and the options of "
        f"the other shards, run {commands}{more}; then join again"
    )


def _listed(shards: Sequence[int]) -> str:
    """Shards in a message, counted from 1."""
    named = ", ".join(str(shard + 1) for shard in shards[:_MAX_LISTED])
    return named + (", ..." if len(shards) > _MAX_LISTED else "")
