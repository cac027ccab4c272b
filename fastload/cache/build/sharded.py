"""Builds one shard of a cache per process, on any number of machines, and joins the shards.

Each process calls `build_shard` for one shard; in the end one process calls `join`. They share nothing but
the files in DEST.partial (see `unfinished_shards`). The result is the same as that of a build by one process,
byte for byte, but for the facts that are new for each cache: its id and the time of its build.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.batch.failures import budget_exceeded, check_error_budget, most_failures
from fastload.cache.build.build import Build, as_stored, check_arguments, open_finished
from fastload.cache.build.build_lock import only_builder_or_no_locks
from fastload.cache.build.unfinished import Partial
from fastload.cache.build.unfinished_shards import ShardFiles, is_published, listed
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheError, CacheMismatchError, ErrorBudgetError
from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fastload.batch.failed_sample import FailedSample
    from fastload.cache.fingerprint import Fingerprint
    from fastload.cache.lmdb.description import Plan

_MOST_COMMANDS = 10  # that an error lists


@dataclass(frozen=True)
class BuiltShard:
    """A finished shard, or a shard of a cache that is finished.

    Attributes:
        shard: Its number, from 0.
        num_shards: Number of shards that were asked for.
        num_samples: Samples of this shard, including samples that are left out.
        num_left_out: Samples of this shard that are left out.
        nbytes: Size of its file.
        was_built: Whether this call built it; it was finished before otherwise.
        is_joined: Whether the finished cache exists already.
    """

    shard: int
    num_shards: int
    num_samples: int
    num_left_out: int
    nbytes: int
    was_built: bool
    is_joined: bool


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

    Any process on any machine may build any shard at any time, as long as all see PATH on one file system.
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
        error_budget: The most samples of the whole cache that may be left out. A shard that leaves out more
            ends its build; `join` counts all shards.
        fingerprint: As in `build_lmdb`.
        name: The place of the finished cache in messages, if the shards are moved there; None for `path`.

    Raises:
        CacheMismatchError: The shards at `path` are made from other samples, or with other settings; or this
            shard leaves out samples, and `on_error` is `"raise"`.
        CacheBusyError: One process builds this cache, without shards.
        UnsupportedSampleError: A value in a sample cannot be cached.
        CacheError: The files could not be written.
        ErrorBudgetError: The shard leaves out more samples than the budget allows.
        ValueError: An argument has none of the forms above.
    """
    check_arguments(codec, quality, num_shards, on_error, error_budget)
    if isinstance(shard, bool) or not isinstance(shard, int) or not 0 <= shard < num_shards:
        raise ValueError(f"shard should be an int from 0 to {num_shards - 1}, but got {shard!r}")
    with started(
        dataset,
        path,
        num_shards,
        probed=probed,
        codec=codec,
        quality=quality,
        on_error=on_error,
        error_budget=error_budget,
        fingerprint=fingerprint,
    ) as start:
        plan = start.plan
        if shard >= plan.num_shards:
            return BuiltShard(shard, num_shards, 0, 0, 0, was_built=False, is_joined=start.files is None)
        indices = plan.indices_of(shard)
        if start.files is None:
            return BuiltShard(shard, num_shards, len(indices), 0, 0, was_built=False, is_joined=True)
        files = start.files
        if name is not None:
            files.what_is_kept = f"Finished shards are kept at {name}"
            files.way_to_resume = "build again to resume"
        left_out = files.finished(shard)
        was_built = left_out is None
        if left_out is None:
            files.remove_leftovers(shard)
            path = os.path.abspath(os.fspath(path))
            _write(start.build, files, shard, num_workers, path, name or path, shown=progress)
            left_out = list(files.skipped.values())
        elif left_out and on_error == "raise":
            raise CacheMismatchError(
                f'shard {shard + 1} of {plan.num_shards} was built before with on_error="skip", and leaves '
                f'out {len(left_out):,} samples: build it with on_error="skip" too, or remove all shards '
                "with "
                f"'fastload cache rm {os.path.abspath(os.fspath(path))}'"
            )
        nbytes = files.shard_nbytes(shard)
        is_joined = nbytes is None
        return BuiltShard(shard, num_shards, len(indices), len(left_out), nbytes or 0, was_built, is_joined)


def _write(
    build: Build, files: ShardFiles, shard: int, num_workers: int | None, path: str, name: str, *, shown: bool
) -> None:
    plan = files.plan
    indices = plan.indices_of(shard)
    try:
        build.write(
            plan,
            range(shard, shard + 1),
            indices,
            indices.start,
            num_workers,
            title=f"building shard {shard + 1} of {plan.num_shards} of {name}",
            shown=shown,
            finish=lambda: files.complete(shard),
        )
    except CacheError as error:
        if is_published(path, plan):
            return  # another process finished this shard, and the cache was joined
        if files.was_removed(shard, error):
            raise files.removed() from error
        raise
    finally:
        files.discard()
    build.log_shapes(f"shard {shard + 1} of {name}")
    if files.skipped and name == path:
        log.warning(
            "%s: %d of %d samples of shard %d could not be read and are left out: 'fastload cache join' "
            "writes the report",
            path,
            len(files.skipped),
            len(indices),
            shard + 1,
        )


@dataclass(frozen=True)
class Started:
    """A build of shards, ready to build any of them.

    Attributes:
        plan: The plan of the cache.
        build: Writes samples; it also knows the dataset.
        files: The directory of the shards; None if the cache is finished.
    """

    plan: Plan
    build: Build
    files: ShardFiles | None


@contextlib.contextmanager
def started(
    dataset: Any,
    path: str | os.PathLike[str],
    num_shards: int | None,
    *,
    probed: Mapping[int, Any] | None = None,
    codec: str | None = None,
    quality: int | None = None,
    on_error: str = "raise",
    error_budget: int | float = 1.0,
    fingerprint: Fingerprint | None = None,
) -> Iterator[Started]:
    """Make the plan of a build of shards, or follow the plan that another process made.

    The arguments and errors are those of `build_shard`. If the cache is finished, a number of shards of None
    accepts any.
    """
    built_quality = check_arguments(codec, quality, num_shards, on_error, error_budget)
    path = os.path.abspath(os.fspath(path))
    probed = dict(probed or {})
    dataset, fingerprint = as_stored(dataset, fingerprint, codec)
    with contextlib.closing(ShardFiles(path)) as files:
        build = Build(
            dataset,
            path,
            files,
            probed,
            skips=on_error == "skip",
            error_budget=error_budget,
            quality=built_quality,
            lock=None,
        )
        if not os.path.lexists(path):
            plan = build.make_plan(codec or "raw", num_shards or 1, fingerprint)
            files.begin(plan, error_budget)
            if not os.path.lexists(path):
                yield Started(files.plan, build, files)
                return
            # The shards were joined after this process had looked for the cache.
            if files.plan.build_id == plan.build_id:
                files.remove_plan()
        cache = open_finished(path, dataset, probed, codec, quality, num_shards, fingerprint)
        yield Started(cache.plan, build, None)


# --- joining ---------------------------------------------------------------------------------------------


def join(path: str | os.PathLike[str], *, error_budget: int | float | None = None) -> LMDBCache:
    """The cache at `path`, made from its finished shards; opened if it was joined before.

    Args:
        path: The path that was given to `build_shard`.
        error_budget: The most samples that may be left out; None for the budget of the process that made the
            plan.

    Raises:
        FileNotFoundError: There is neither a cache nor a shard.
        CacheMismatchError: An unfinished build by one process is there, or shards of another release.
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
    with only_builder_or_no_locks(path), contextlib.closing(ShardFiles(path)) as files:
        if not files.open():
            if os.path.lexists(path):
                return _joined_before(path)
            raise FileNotFoundError(f"there is neither a cache nor a shard of one at {path}")
        plan = files.plan
        partial = Partial(path)
        if os.path.lexists(path) and is_published(
            path, plan
        ):  # a process was killed while it joined one shard
            partial.remove()
            return _joined_before(path)
        left_out = _collect(files, path)
        most = most_failures(files.error_budget if error_budget is None else error_budget, plan.num_samples)
        if len(left_out) > most:
            raise _over_budget(files, left_out, most, path)
        partial.skipped = {sample.index: sample for sample in left_out}
        partial.publish(plan)
    cache = LMDBCache(path)
    cache.reason = f"joined now, from {plan.num_shards} shards"
    if left_out:
        log.warning(
            "%s: %d of %d samples could not be read and are left out: see %s.errors.jsonl",
            path,
            len(left_out),
            plan.num_samples,
            path,
        )
    return cache


def _joined_before(path: str) -> LMDBCache:
    try:
        cache = LMDBCache(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is neither a cache nor a shard of one at {path}") from None
    cache.reason = "opened, as its shards were joined before"
    return cache


def _collect(files: ShardFiles, path: str) -> list[FailedSample]:
    """The samples that all shards leave out, in the order of their indices.

    Raises:
        CacheError: Shards are missing.
    """
    plan = files.plan
    left_out: list[FailedSample] = []
    missing, unusable = [], []
    for shard in range(plan.num_shards):
        found = files.finished(shard)
        left_out += found or []
        if found is None:
            missing.append(shard)
            if files.has_file(shard):
                unusable.append(shard)
    if missing:
        raise CacheError(_what_is_missing(plan, missing, unusable, path))
    return left_out


def _what_is_missing(plan: Plan, missing: list[int], unusable: list[int], path: str) -> str:
    commands = ", ".join(
        f"'fastload cache build SOURCE {path} --shard {shard + 1}/{plan.num_shards}'"
        for shard in missing[:_MOST_COMMANDS]
    )
    more = f", and so on for all {len(missing)}" if len(missing) > _MOST_COMMANDS else ""
    are = "shards" if len(missing) > 1 else "shard"
    verb = "are" if len(missing) > 1 else "is"
    reason = ""
    if unusable:
        reason = f" (the file of {listed(unusable)} is damaged, or from another build, and will be replaced)"
    return (
        f"{are} {listed(missing)} of {plan.num_shards} {verb} missing{reason}: with the SOURCE and the "
        f"options of the other shards, run {commands}{more}; then join again"
    )


def _over_budget(files: ShardFiles, left_out: list[FailedSample], most: int, path: str) -> ErrorBudgetError:
    return budget_exceeded(
        len(left_out),
        most,
        files.plan.num_samples,
        left_out[-1],
        f"All shards are kept at {files.path}, with their reports: join with a larger error budget, or "
        f"remove the shards with 'fastload cache rm {path}', repair the files, and build them again",
    )
