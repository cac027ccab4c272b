"""Builds caches on a Ray cluster. Importing this file does not import Ray."""

from __future__ import annotations

from concurrent import futures
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from fastload.cache.build.on_executor import TransientTaskError, build_on

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from concurrent.futures import Future

    from fastload.cache.lmdb.lmdb_cache import LMDBCache

__all__ = ["build_cache"]

_CANCEL_S = 10.0  # for tasks to remove their unfinished files


def __dir__() -> list[str]:
    return __all__


def build_cache(
    open_dataset: Callable[[], Any],
    path: str | os.PathLike[str],
    *,
    address: str | None = None,
    shards: int | None = None,
    on_error: str = "raise",
    max_errors: int | float = 0.01,
    max_retries: int = 3,
    progress: bool = True,
    wait: bool = True,
) -> LMDBCache:
    """The finished cache of a dataset at ``path``: opened if it exists, else built on a Ray cluster.

    Each task builds one shard on one CPU. All machines, including this one, must see ``path`` and the files
    of the dataset at the same paths. If tasks fail, the other shards are finished and kept. Call it again to
    build only the missing ones, also after this process was killed.

    Args:
        open_dataset: A function without arguments that makes the dataset; each task calls it on its machine.
            A function of an importable module or of the main script.
        path: The cache, a directory; with one shard, a file.
        address: As in ``ray.init``; not used if Ray is connected already.
        shards: Number of shards; None for the number of an unfinished build at ``path``, or else for four per
            CPU, at most 128.
        on_error: ``"raise"``, or ``"skip"`` to leave out samples that cannot be read, with a report in
            PATH.errors.jsonl.
        max_errors: The maximum number of samples that ``"skip"`` leaves out of the whole cache (an int), or
            their share (a float).
        max_retries: How often Ray repeats a task whose machine died, or that could not write its file.
        progress: Show a bar, if standard error is a terminal.
        wait: Wait while another process builds the cache, and then open it.

    Returns:
        The cache.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: There is no Ray cluster at ``address``.
        CacheError: Shards could not be built; the message names them, with reasons and machines.
        CacheMismatchError: The cache or the unfinished build at ``path`` has different samples or settings.
        TooManyFailuresError: More samples than `max_errors` allows could not be read; finished shards are
            kept.
    """
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ImportError(
            'a build on a cluster needs Ray, which is not installed: pip install "fastload-torch[ray]"'
        ) from error
    is_own = not ray.is_initialized()
    if is_own:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
        except ConnectionError as error:
            where = "" if address is None else f" at {address!r}"
            raise ConnectionError(
                f"there is no Ray cluster{where}: start one with 'ray start --head', pass its address, or "
                '"local" for the CPUs of this machine'
            ) from error
    try:
        return build_on(
            RayExecutor(ray, max_retries),
            open_dataset,
            path,
            num_cpus=int(ray.cluster_resources().get("CPU", 0)),
            shards=shards,
            on_error=on_error,
            max_errors=max_errors,
            progress=progress,
            wait=wait,
        )
    finally:
        if is_own:
            ray.shutdown()


class RayExecutor(Executor):
    """Runs calls as Ray tasks of one CPU each.

    Args:
        ray: The module, connected to a cluster.
        max_retries: How often to repeat a task whose machine died, or that raised TransientTaskError.
    """

    def __init__(self, ray: Any, max_retries: int) -> None:
        self._ray = ray
        self._remote = ray.remote(_call).options(
            num_cpus=1,
            max_retries=max_retries,
            retry_exceptions=[TransientTaskError],
            scheduling_strategy="SPREAD",  # a task is repeated on a different machine, if there is one
        )
        self._function: tuple[Any, Any] = None, None  # the last one, and its handle in the object store
        self._futures: list[Any] = []

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call on the cluster; the function is sent there once."""
        if self._function[0] is not function:
            self._function = function, self._ray.put(function)
        future = self._remote.remote(self._function[1], *args, **kwargs).future()
        self._futures.append(future)
        return future  # type: ignore[no-any-return]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for all tasks; with ``cancel_futures``, cancel those that are not finished."""
        if cancel_futures:
            for future in self._futures:
                if not future.done():
                    self._ray.cancel(future.object_ref)
        if wait:
            futures.wait(self._futures, _CANCEL_S if cancel_futures else None)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
