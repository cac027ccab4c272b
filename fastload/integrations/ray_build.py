"""Builds a cache on disk by a Ray cluster: one task for each shard.

Importing this file does not import Ray. Ray schedules the tasks, repeats them, and notices machines that die;
there is no such code here. The rest of the driver is in `cache.build.on_cluster`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastload.cache.build.on_cluster import MayPassError, Outcome, Task, build_on

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Sequence

    from fastload.cache.lmdb.lmdb_cache import LMDBCache

_POLL_S = 1.0  # so that Ctrl-C is noticed; outcomes come at once
_CANCEL_S = 10.0  # for tasks to remove their unfinished files


def build(
    open_dataset: Callable[[], Any],
    path: str | os.PathLike[str],
    *,
    address: str | None = None,
    shards: int | None = None,
    codec: str | None = None,
    quality: int | None = None,
    on_error: str = "raise",
    error_budget: int | float = 1.0,
    max_retries: int = 3,
    progress: bool = True,
) -> LMDBCache:
    """The finished cache of a dataset at ``path``: opened if it exists, else built by a Ray cluster.

    Each task builds one shard on one CPU. All machines, and this one, must see ``path`` and the files of the
    dataset at the same places. If tasks fail, the other shards are finished and kept. Call it again to build
    only those that are missing, also after this process was killed.

    Args:
        open_dataset: A function without arguments that makes the dataset; each task calls it on its machine.
            A function of an importable module or of the main script.
        path: The cache, a directory; with one shard, a file.
        address: As in ``ray.init``; not used if Ray is connected already.
        shards: Number of shards; None for the number of an unfinished build at ``path``, or else for four per
            CPU, at most 128.
        codec: How images are stored: ``"raw"``, ``"png"``, ``"jpeg"``, ``"webp"`` or ``"source"``; None for
            raw.
        quality: Quality of jpeg and webp, 1 to 100; None for 95.
        on_error: ``"raise"``, or ``"skip"`` to leave out samples that cannot be read, with a report in
            PATH.errors.jsonl.
        error_budget: The most samples of the whole that ``"skip"`` may leave out: a number, or a share as a
            float.
        max_retries: How often Ray repeats a task whose machine died, or that could not write its file.
        progress: Show a bar, if standard error is a terminal.

    Returns:
        The cache.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: There is no Ray cluster at ``address``.
        CacheError: Shards could not be built; the message names them, with reasons and machines.
        CacheMismatchError: The cache or the unfinished build at ``path`` is of other samples or settings.
        ErrorBudgetError: More samples than the budget could not be read; finished shards are kept.
    """
    ray = imported()
    is_own = not ray.is_initialized()
    if is_own:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
        except ConnectionError as error:
            where = "" if address is None else f" at {address!r}"
            raise ConnectionError(
                f"there is no Ray cluster{where}: start one with 'ray start --head', give its address, or "
                '"local" for the CPUs of this machine'
            ) from error
    try:
        return build_on(
            _Ray(ray, max_retries),
            open_dataset,
            path,
            shards=shards,
            codec=codec,
            quality=quality,
            on_error=on_error,
            error_budget=error_budget,
            progress=progress,
        )
    finally:
        if is_own:
            ray.shutdown()


def imported() -> Any:
    """Ray.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ImportError(
            'a build on a cluster needs Ray, which is not installed: pip install "fastload-torch[ray]"'
        ) from error
    return ray


class _Ray:
    """Runs tasks by Ray; see `on_cluster.Engine`."""

    def __init__(self, ray: Any, max_retries: int) -> None:
        self._ray = ray
        self._max_retries = max_retries

    def num_cpus(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 0))

    def run(self, task: Task, shards: Sequence[int]) -> Generator[Outcome, None, None]:
        ray = self._ray
        options = {
            "num_cpus": 1,
            "max_retries": self._max_retries,
            "retry_exceptions": [MayPassError],
            "scheduling_strategy": "SPREAD",  # a task is repeated on another machine, if there is one
        }
        remote = ray.remote(_call)
        handle = ray.put(task)
        shard_of = {}
        for shard in shards:
            name = f"fastload shard {shard + 1}/{task.num_shards}"
            shard_of[remote.options(name=name, **options).remote(handle, shard)] = shard
        try:
            while shard_of:
                ready, _ = ray.wait(list(shard_of), num_returns=1, timeout=_POLL_S)
                for reference in ready:
                    yield self._outcome(reference, shard_of.pop(reference))
        finally:
            for reference in shard_of:
                ray.cancel(reference)
            if shard_of:
                ray.wait(list(shard_of), num_returns=len(shard_of), timeout=_CANCEL_S)

    def _outcome(self, reference: Any, shard: int) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, MayPassError):
                return Outcome(shard, "", failure=f"{cause} ({1 + self._max_retries} attempts)")
            return Outcome(shard, "", failure=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return outcome


def _call(task: Task, shard: int) -> Outcome:
    return task(shard)
