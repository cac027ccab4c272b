"""Builds the shards of a cache by the tasks of an executor, such as a cluster, and joins them.

The driver is the user's process. An executor of `concurrent.futures`' interface (a pool of processes, or
`integrations.ray_build` for a cluster) runs a task for each shard that is missing, anywhere and in any order.
Rules:

1. The driver makes the plan, counts results, and joins. It may die at any time: the next driver builds only
   the shards that are missing.
2. A task returns failures that would happen again, such as a damaged sample, as text, because errors of
   users' own classes may not be picklable. It raises TransientTaskError for failures that may pass on another
   machine, such as a full disk.
3. A failed shard does not end the build: the others are finished and kept, and one error in the end names all
   failures. If more samples are skipped than the error budget allows, the build ends at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from concurrent.futures import as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.batch.failures import most_failures
from fastload.cache.build.build import Build, build_shard, join
from fastload.cache.build.plan import source_of_build
from fastload.cache.build.unfinished import Unfinished
from fastload.cache.lmdb.files import check_openable
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.progress import BuildProgress
from fastload.cache.random_check import refuse_random
from fastload.errors import CacheError, ErrorBudgetError, add_note

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

SHARDS_PER_CPU = 4  # so that machines of different speed finish at about the same time
# An open shard takes two descriptors, one of them for its mapping. Many systems give a process 1024.
_MAX_SHARDS = 128
_MAX_FAILURES = 10  # that an error lists
_MAX_LETTERS = 500  # of a failure


class TransientTaskError(Exception):
    """A task failed for a reason that may pass, or that another machine may not have."""


@dataclass(frozen=True)
class Outcome:
    """The end of the task of one shard.

    Attributes:
        node: The machine, for messages; an empty string if it is unknown.
        num_left_out: Samples of the shard that are left out.
        nbytes: Size of its file.
        failure: Why the shard was not built; None if it is finished.
        is_over_budget: Whether the shard alone leaves out more samples than the budget of the cache allows.
    """

    node: str
    num_left_out: int = 0
    nbytes: int = 0
    failure: str | None = None
    is_over_budget: bool = False


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
            TransientTaskError: The shard could not be written here.
        """
        node = socket.gethostname()
        try:
            # `open_dataset` may change the working directory; the process goes on to other tasks.
            with contextlib.chdir(os.curdir):
                source, fingerprint = source_of_build(self.open_dataset(), self.codec)
                built = build_shard(
                    source,
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
                raise TransientTaskError(f"on {node}: {_in_one_line(error)}") from None
            return Outcome(node, failure=_in_one_line(error))
        except ErrorBudgetError as error:
            return Outcome(node, failure=str(error), is_over_budget=True)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's code; the driver reports it
            return Outcome(node, failure=_in_one_line(error))
        return Outcome(node, built.num_left_out, built.nbytes)


def _in_one_line(error: BaseException) -> str:
    """An error with the sample that it belongs to."""
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith("in sample ")]
    text = " ".join(": ".join([type(error).__name__, *([str(error)] if str(error) else [])]).split())
    return "; ".join([text[:_MAX_LETTERS], *notes])


def build_on(
    executor: Executor,
    open_dataset: Callable[[], Any],
    path: str | os.PathLike[str],
    *,
    num_cpus: int,
    shards: int | None = None,
    codec: str | None = None,
    quality: int | None = None,
    on_error: str = "raise",
    error_budget: int | float = 1.0,
    progress: bool = True,
) -> LMDBCache:
    """The cache of a dataset at `path`, whose shards an executor's tasks build; opened if it is finished.

    Args:
        executor: Runs the tasks. It is shut down if the build ends early.
        open_dataset: As in `Task`.
        path: The path of the cache, on a file system that all machines share.
        num_cpus: How many tasks run at the same time.
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
    refuse_random(dataset)
    if shards is None and not os.path.lexists(path):
        shards = _shards_of_unfinished(path) or max(1, min(_MAX_SHARDS, SHARDS_PER_CPU * num_cpus))
    if not os.path.lexists(path):
        check_openable(min(shards or 1, len(dataset)))
    source, fingerprint = source_of_build(dataset, codec)
    build = Build(source, path, shards, {}, codec, quality, on_error, error_budget, fingerprint)
    with build.files(is_shared=True) as files:
        if isinstance(files, LMDBCache):
            files.reason = "opened, as it matches the dataset"
            return files
        task = Task(open_dataset, path, files.plan.num_shards, codec, quality, on_error, error_budget)
        try:
            _run(executor, task, files, shown=progress)
        except KeyboardInterrupt as error:
            add_note(error, f"{files.what_is_kept}: build again to build the others")
            raise
    return join(path, error_budget=error_budget)


def _shards_of_unfinished(path: str) -> int | None:
    with contextlib.closing(Unfinished(path)) as files:
        return files.plan.num_shards if files.open() else None


def _run(executor: Executor, task: Task, files: Unfinished, *, shown: bool) -> None:
    """Build the missing shards."""
    plan, finished = files.plan, {}
    for shard in range(plan.num_shards):
        left_out = files.finished(shard)
        # A finished shard that leaves samples out is an error without "skip", and its task says so.
        if left_out is not None and (not left_out or task.on_error == "skip"):
            finished[shard] = len(left_out)
    num_left_out = sum(finished.values())
    most = most_failures(task.error_budget, plan.num_samples)
    done = sum(len(plan.indices_of(shard)) for shard in finished)
    missing = [shard for shard in range(plan.num_shards) if shard not in finished]
    failed: dict[int, Outcome] = {}
    try:
        futures = {executor.submit(task, shard): shard for shard in missing}
        with BuildProgress(f"building {task.path}", plan.num_samples, shown=shown, done=done) as progress:
            for future in as_completed(futures):
                shard, outcome = futures[future], _outcome_of(future)
                if outcome.is_over_budget:
                    raise ErrorBudgetError(f"shard {shard + 1}/{plan.num_shards}: {outcome.failure}")
                if outcome.failure is not None:
                    failed[shard] = outcome
                    continue
                progress.advance(outcome.nbytes, len(plan.indices_of(shard)))
                num_left_out += outcome.num_left_out
                if num_left_out > most:
                    raise ErrorBudgetError(
                        f"{num_left_out:,} samples could not be read, and the error budget allows "
                        f"{most:,} of {plan.num_samples:,}. {files.what_is_kept}, with reports: raise the "
                        "budget or repair the files, and build again to resume"
                    )
    except BaseException:
        executor.shutdown(cancel_futures=True)
        raise
    if failed:
        raise CacheError(_what_failed(failed, plan.num_shards, files.what_is_kept))


def _outcome_of(future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except TransientTaskError as error:
        return Outcome("", failure=str(error))
    except Exception as error:  # noqa: BLE001 - of the executor: a process or a machine has died
        return Outcome("", failure=_in_one_line(error))


def _what_failed(failed: dict[int, Outcome], num_shards: int, what_is_kept: str) -> str:
    described = [
        f"shard {shard + 1}/{num_shards}{f' on {one.node}' if one.node else ''}: {one.failure}"
        for shard, one in sorted(failed.items())[:_MAX_FAILURES]
    ]
    if len(failed) > _MAX_FAILURES:
        described.append(f"and {len(failed) - _MAX_FAILURES} more")
    return (
        f"{len(failed)} of {num_shards} shards were not built: {'; '.join(described)}. {what_is_kept}: "
        'repair the cause, and build again to build the others, with on_error="skip" to leave out samples '
        "that cannot be read"
    )
