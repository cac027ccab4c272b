"""Builds all shards of a cache by the tasks of a cluster, and joins them.

The driver is the user's process. An engine (see `integrations.ray_build`) runs a task for each shard that is
missing, anywhere and in any order, and repeats tasks whose machine has died. Nothing here names the engine's
software. Rules:

1. The driver makes the plan, counts results, and joins. It may die at any time: the next driver builds only
   the shards that are missing.
2. A task returns failures that would happen again, such as a damaged sample, as text, because errors of
   users' own classes may not be picklable. It raises MayPassError for failures that may pass on another
   machine, such as a full disk.
3. A failed shard does not end the build: the others are finished and kept, and one error in the end names all
   failures. If more samples are skipped than the error budget allows, the build ends at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fastload.batch.failures import most_failures
from fastload.cache.build.sharded import build_shard, join, started
from fastload.cache.build.unfinished_shards import ShardFiles
from fastload.cache.codecs import SOURCE
from fastload.cache.fingerprint import fingerprint_of
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.progress import BuildProgress
from fastload.cache.random_check import refuse_random
from fastload.cache.sources import decoded_source
from fastload.errors import CacheError, ErrorBudgetError, add_note
from fastload.images.folder import ImageFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from fastload.cache.lmdb.description import Plan

SHARDS_A_CPU = 4  # so that machines of different speed finish at about the same time
# An open shard takes two descriptors, one of them for its mapping. Many systems give a process 1024.
_MOST_SHARDS = 128
_MOST_FAILURES = 10  # that an error lists
_MOST_LETTERS = 500  # of a failure


class MayPassError(Exception):
    """A task failed for a reason that may pass, or that another machine may not have."""


@dataclass(frozen=True)
class Outcome:
    """The end of the task of one shard.

    Attributes:
        shard: Its number, from 0.
        node: The machine, for messages; an empty string if it is unknown.
        num_left_out: Samples of the shard that are left out.
        nbytes: Size of its file.
        failure: Why the shard was not built; None if it is finished.
        is_over_budget: Whether the shard alone leaves out more samples than the budget of the cache allows.
    """

    shard: int
    node: str
    num_left_out: int = 0
    nbytes: int = 0
    failure: str | None = None
    is_over_budget: bool = False


class Engine(Protocol):
    """Runs tasks on a cluster."""

    def num_cpus(self) -> int:
        """The number of CPUs of the cluster."""

    def run(self, task: Task, shards: Sequence[int]) -> Generator[Outcome, None, None]:
        """Run `task(shard)` for each shard, and give the outcomes as they come.

        Closing the generator ends all tasks.
        """


@dataclass(frozen=True)
class Task:
    """Builds one shard where it is called; pickles as a handle.

    Attributes:
        open_dataset: Makes the dataset, on the machine of the task.
        path: The absolute path of the cache.
        num_shards: Number of shards.
        codec: As in `build_lmdb`.
        quality: As in `build_lmdb`.
        on_error: As in `build_lmdb`.
        error_budget: As in `build_shard`.
    """

    open_dataset: Callable[[], Any]
    path: str
    num_shards: int
    codec: str | None
    quality: int | None
    on_error: str
    error_budget: int | float

    def __call__(self, shard: int) -> Outcome:
        """Build a shard.

        Raises:
            MayPassError: The shard could not be written here.
        """
        node = socket.gethostname()
        try:
            # `open_dataset` may change the working directory; the process goes on to other tasks.
            with contextlib.chdir(os.curdir):
                dataset = self.open_dataset()
                fingerprint = fingerprint_of(dataset)
                built = build_shard(
                    dataset if self.codec == SOURCE else decoded_source(dataset),
                    self.path,
                    shard,
                    self.num_shards,
                    num_workers=0,
                    progress=False,
                    codec=self.codec,
                    quality=self.quality,
                    on_error=self.on_error,
                    error_budget=self.error_budget,
                    fingerprint=fingerprint,
                )
        except CacheError as error:
            if type(error) is CacheError:  # the file system has refused
                raise MayPassError(f"on {node}: {_told(error)}") from None
            return Outcome(shard, node, failure=_told(error))
        except ErrorBudgetError as error:
            return Outcome(shard, node, failure=str(error), is_over_budget=True)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's code; the driver reports it
            return Outcome(shard, node, failure=_told(error))
        return Outcome(shard, node, built.num_left_out, built.nbytes)


def _told(error: BaseException) -> str:
    """An error in one line, with the sample that it belongs to."""
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith("in sample ")]
    text = " ".join(": ".join([type(error).__name__, *([str(error)] if str(error) else [])]).split())
    return "; ".join([text[:_MOST_LETTERS], *notes])


def build_on(
    engine: Engine,
    open_dataset: Callable[[], Any],
    path: str | os.PathLike[str],
    *,
    shards: int | None = None,
    codec: str | None = None,
    quality: int | None = None,
    on_error: str = "raise",
    error_budget: int | float = 1.0,
    progress: bool = True,
) -> LMDBCache:
    """The cache of a dataset at `path`, whose shards the tasks of a cluster build; opened if it is finished.

    Args:
        engine: Runs the tasks.
        open_dataset: As in `Task`.
        path: The path of the cache, on a file system that all machines share.
        shards: Number of shards; None for the number of an unfinished build, or else for a few per CPU, at
            most 128.
        codec: As in `build_lmdb`.
        quality: As in `build_lmdb`.
        on_error: As in `build_lmdb`.
        error_budget: As in `build_lmdb`; it holds for the whole cache.
        progress: As in `build_lmdb`.

    Raises:
        CacheError: Shards could not be built; the error names them, with reasons and machines. Also as
            `build_shard`.
        ErrorBudgetError: More samples than the budget could not be read. The finished shards are kept.
    """
    path = os.path.abspath(os.fspath(path))
    dataset = open_dataset()
    if not isinstance(dataset, ImageFolder):
        refuse_random(dataset)
    fingerprint = fingerprint_of(dataset)
    if shards is None and not os.path.lexists(path):
        shards = _shards_of_unfinished(path) or max(1, min(_MOST_SHARDS, SHARDS_A_CPU * engine.num_cpus()))
    with started(
        dataset if codec == SOURCE else decoded_source(dataset),
        path,
        shards,
        codec=codec,
        quality=quality,
        on_error=on_error,
        error_budget=error_budget,
        fingerprint=fingerprint,
    ) as start:
        if start.files is None:
            cache = LMDBCache(path)
            cache.reason = "opened, as it matches the dataset"
            return cache
        task = Task(open_dataset, path, start.plan.num_shards, codec, quality, on_error, error_budget)
        most = most_failures(error_budget, start.plan.num_samples)
        try:
            _run(engine, task, start.plan, start.files, most, shown=progress)
        except KeyboardInterrupt as error:
            add_note(error, f"{start.files.what_is_kept}: build again to build the others")
            raise
    return join(path, error_budget=error_budget)


def _shards_of_unfinished(path: str) -> int | None:
    files = ShardFiles(path)
    try:
        return files.plan.num_shards if files.open() else None
    finally:
        files.close()


def _run(
    engine: Engine, task: Task, plan: Plan, files: ShardFiles, most_left_out: int, *, shown: bool
) -> None:
    """Build the missing shards."""
    finished = {shard: files.finished(shard) for shard in range(plan.num_shards)}
    # A finished shard that leaves samples out is an error without "skip", and its task says so.
    left = [
        shard
        for shard, left_out in finished.items()
        if left_out is None or (left_out and task.on_error == "raise")
    ]
    done = sum(len(plan.indices_of(shard)) for shard in finished if shard not in set(left))
    num_left_out = sum(len(finished[shard] or []) for shard in finished if shard not in set(left))
    failed: list[Outcome] = []
    outcomes = engine.run(task, left)
    try:
        title = f"building {task.path}"
        with BuildProgress(title, plan.num_samples, shown=shown, done=done) as progress:
            for outcome in outcomes:
                if outcome.is_over_budget:
                    raise ErrorBudgetError(f"shard {outcome.shard + 1}/{plan.num_shards}: {outcome.failure}")
                if outcome.failure is not None:
                    failed.append(outcome)
                    continue
                progress.advance(outcome.nbytes, len(plan.indices_of(outcome.shard)))
                num_left_out += outcome.num_left_out
                if num_left_out > most_left_out:
                    raise ErrorBudgetError(
                        f"{num_left_out:,} samples could not be read, and the error budget allows "
                        f"{most_left_out:,} of {plan.num_samples:,}. {files.what_is_kept}, with their "
                        "reports: raise the budget or repair the files, and build again to resume"
                    )
    finally:
        outcomes.close()
    if failed:
        raise CacheError(_what_failed(failed, plan.num_shards, files.what_is_kept))


def _what_failed(failed: list[Outcome], num_shards: int, what_is_kept: str) -> str:
    failed = sorted(failed, key=lambda outcome: outcome.shard)
    told = [
        f"shard {one.shard + 1}/{num_shards}{f' on {one.node}' if one.node else ''}: {one.failure}"
        for one in failed[:_MOST_FAILURES]
    ]
    if len(failed) > _MOST_FAILURES:
        told.append(f"and {len(failed) - _MOST_FAILURES} more")
    return (
        f"{len(failed)} of {num_shards} shards were not built: {'; '.join(told)}. {what_is_kept}: repair the "
        "cause, and "
        'build again to build the others, with on_error="skip" to leave out samples that cannot be read'
    )
