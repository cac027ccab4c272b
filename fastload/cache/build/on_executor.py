"""Builds the shards of a cache in the tasks of an executor, such as a cluster.

The driver is the user's process. An executor with `concurrent.futures`' interface (a process pool, or
`integrations.ray` for a cluster) runs a task for each missing shard, anywhere and in any order. Rules:

1. The driver makes the plan, counts results, and publishes the cache. It can die at any time: the next driver
   builds only the missing shards. A task follows the plan, after comparing it with its own dataset.
2. A task returns permanent failures, such as a damaged sample, as text, because errors of users' own classes
   might not be picklable. It raises TransientTaskError for failures that can go away on another machine,
   such as a full disk.
3. A failed shard does not end the build: the others are finished and kept, and one error at the end names all
   failures. If more samples are skipped than `max_errors` allows, the build ends at once.
"""

from __future__ import annotations

import os
import socket
from concurrent.futures import as_completed
from contextlib import chdir
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.batch.failures import max_failures, too_many_failures
from fastload.cache.build.build import RETRY, Build
from fastload.cache.build.plan import MAX_SHARDS
from fastload.cache.build.random_check import reject_random
from fastload.cache.build.staging import StagingDirectory
from fastload.cache.format.fingerprint import fingerprint_of
from fastload.cache.format.progress import BuildProgress
from fastload.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from fastload.cache.lmdb.lmdb_cache import LMDBCache

SHARDS_PER_CPU = 4  # so machines of different speed finish at about the same time
_MAX_FAILURES = 10  # that an error lists
_MAX_LETTERS = 500  # of a failure


class TransientTaskError(Exception):
    """A task failed for a transient reason, or one that another machine might not have."""


@dataclass(frozen=True)
class Task:
    """Builds one shard where it is called; pickles as a handle.

    Attributes:
        open_dataset: Makes the dataset, on the machine of the task.
        path: The absolute path of the cache.
        settings: `on_error` and `max_errors`, as in `Build`.
    """

    open_dataset: Callable[[], Any]
    path: str
    settings: dict[str, Any]

    def __call__(self, shard: int) -> tuple[int, int] | str:
        """Build a shard; returns how many samples it leaves out and its bytes, or why it cannot be built.

        Raises:
            TransientTaskError: The shard could not be written here.
        """
        try:
            # `open_dataset` can change the working directory; the process continues with other tasks.
            with chdir(os.curdir):
                return self._build(shard)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's code; the driver reports it
            failure = f"on {socket.gethostname()}: {_in_one_line(error)}"
            if type(error) is CacheError:  # a file could not be written
                raise TransientTaskError(failure) from None
            return failure

    def _build(self, shard: int) -> tuple[int, int]:
        source = self.open_dataset()
        files = StagingDirectory(self.path)
        if not files.open():
            raise CacheError(f"{files.path} was removed while the cache was built: build again")
        build = Build(
            source,
            self.path,
            fingerprint=fingerprint_of(source),
            num_workers=0,
            progress=False,
            **self.settings,
        )
        files.check(build.plan(files.plan))
        title = f"building shard {shard + 1} of {files.plan.num_shards} of {self.path}"
        build.write(files, [shard], title)
        return len(build.left_out), os.path.getsize(files.path_of(shard))


def _in_one_line(error: BaseException) -> str:
    """An error, with its sample."""
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith("in sample ")]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return "; ".join([text[:_MAX_LETTERS], *notes])


def build_on(
    executor: Executor,
    open_dataset: Callable[[], Any],
    path: str | os.PathLike[str],
    *,
    num_cpus: int,
    shards: int | None = None,
    **options: Any,
) -> LMDBCache:
    """The cache of a dataset at `path`, whose shards an executor's tasks build; opened if finished.

    Args:
        executor: Runs the tasks. It is shut down if the build ends early.
        open_dataset: As in `Task`.
        path: The path of the cache, on a file system that all machines share.
        num_cpus: How many tasks run at the same time.
        shards: Number of shards; None for the number of an unfinished build, or else for a few per CPU, at
            most 128.
        **options: `on_error`, `max_errors` and `progress`, as in `Build`.

    Raises:
        CacheError: Shards could not be built; the error names them, with reasons and machines. Also as
            `build_lmdb`.
        TooManyFailuresError: More samples than `max_errors` allows could not be read. The finished shards are
            kept.
    """
    path = os.path.abspath(path)
    dataset = open_dataset()
    reject_random(dataset)
    if shards is None and not os.path.lexists(path) and not StagingDirectory(path).open():
        shards = max(1, min(MAX_SHARDS, SHARDS_PER_CPU * num_cpus))
    build = Build(dataset, path, shards, fingerprint=fingerprint_of(dataset), **options)
    settings: dict[str, Any] = {"on_error": build.on_error}
    if build.on_error == "skip":
        settings["max_errors"] = 1.0  # this process counts over all shards
    return build.cache(lambda files: _run(executor, Task(open_dataset, path, settings), files, build))


def _run(executor: Executor, task: Task, files: StagingDirectory, build: Build) -> None:
    """Build the missing shards."""
    plan = files.plan
    maximum = max_failures(build.max_errors, plan.num_samples)
    failed: dict[int, str] = {}
    finished = build.finished(files, range(plan.num_shards))
    num_left_out = len(build.left_out)
    done = sum(len(plan.indices_of(shard)) for shard in finished)
    missing = [shard for shard in range(plan.num_shards) if shard not in finished]
    try:
        futures = {executor.submit(task, shard): shard for shard in missing}
        with BuildProgress(
            f"building {task.path}", plan.num_samples, shown=build.progress, done=done
        ) as progress:
            for future in as_completed(futures):
                try:
                    result = future.result()
                except TransientTaskError as error:
                    result = str(getattr(error, "cause", error))  # Ray's has the whole traceback for a text
                except Exception as error:  # noqa: BLE001 - of the executor: a process or a machine has died
                    result = f"failed: {_in_one_line(error)}"
                if isinstance(result, str):
                    failed[futures[future]] = result
                    continue
                left_out_here, nbytes = result
                progress.advance(nbytes, len(plan.indices_of(futures[future])))
                num_left_out += left_out_here
                if num_left_out > maximum:
                    raise too_many_failures(num_left_out, build.max_errors, plan.num_samples, None, RETRY)
    except BaseException:
        executor.shutdown(cancel_futures=True)
        raise
    if failed:
        listed = [f"shard {k + 1}/{plan.num_shards} {why}" for k, why in sorted(failed.items())]
        more = [f"and {len(failed) - _MAX_FAILURES} more"] if len(failed) > _MAX_FAILURES else []
        raise CacheError(
            f"{len(failed)} of {plan.num_shards} shards were not built: "
            f"{'; '.join(listed[:_MAX_FAILURES] + more)}. Repair the cause, and build again to build "
            'the others, with on_error="skip" to leave out samples that cannot be read'
        )
