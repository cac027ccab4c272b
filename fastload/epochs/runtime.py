"""What is alive of a loader, beside its settings: iterators, position, figures, buffers, streams."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastload.batch.access import inside_subsets
from fastload.cache.ram.registry import put_back
from fastload.epochs.order import length_or_zero
from fastload.epochs.stats import Counts, Meter
from fastload.readers import reasons
from fastload.readers.reasons import FULL
from fastload.readers.request import CACHE_VARIABLE, requested_cache
from fastload.system.logs import log, say_once
from fastload.system.torch_private import is_data_pipe

if TYPE_CHECKING:
    from fastload.batch.failures import FailedSample
    from fastload.cache.file_cache import FileCache
    from fastload.device.devices import Backend
    from fastload.memory.lease import BufferPool

_process: object = object()  # another one in a fork; asking for the pid takes microseconds
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=lambda: globals().update(_process=object()))


@dataclass(eq=False)
class LoaderRuntime:
    """What is alive of one loader; each group of fields belongs to the file named above it."""

    owner: weakref.ref[Any] | None = None  # the loader; see `runtime_of`
    process: object = field(default_factory=lambda: _process)  # that the next two belong to
    lock: Any = field(default_factory=threading.RLock)  # held by the thread that begins an epoch
    meter: Meter = field(default_factory=Meter)

    # loader.py. close() closes these; `keyrefs()` copies them atomically.
    iterators: weakref.WeakKeyDictionary[Any, None] = field(default_factory=weakref.WeakKeyDictionary)
    has_searched_generators: bool = False  # for a warning about generators that cannot be seeded
    has_new_settings: bool = False  # since the last iter(loader)

    # position.py
    position: Any = None  # a `Position`: of the epoch that an iterator began last
    loaded: Any = None  # the one that is set by load_state_dict(), until the next iter(loader)
    skips_empty_rest: bool = False  # whether iter(loader) begins the epoch after a loaded one without a rest
    next_epoch: int = 0
    set_epoch: int | None = None  # the number that the user gave last, if any
    sample_seed: int | None = None  # of the run that was loaded

    # batch/failures.py: of all epochs, in the order in which the caller received the batches
    failed_samples: list[FailedSample] = field(default_factory=list)

    # on_device.py: by device, its backend and the one stream that all epochs copy on
    copy_streams: dict[str, tuple[Backend, Any]] = field(default_factory=dict)

    # inline_pool.py: buffers whose pages stay warm between epochs, and their current user
    buffers: tuple[BufferPool, weakref.ref[Any]] | None = None

    # What `cache=` has opened; closed by close()
    file_cache: FileCache | None = None
    judged: Counts | None = None  # the figures when `look_at_cache` last judged it; None: it has not

    def __reduce__(self) -> tuple[Any, ...]:
        return LoaderRuntime, ()  # without an owner: an unpickled or deeply copied loader begins anew


_NAME = "_fastload_runtime"


def runtime_of(loader: Any) -> LoaderRuntime:
    """What is alive of this loader object; a new one if it has none yet."""
    # Frameworks copy the attributes of a loader into another one, and loaders are pickled: neither may carry
    # workers, streams or a position along, so it knows its owner. It is an attribute all the same: what
    # users' samplers gave can refer to the loader, and a WeakKeyDictionary would then keep both forever.
    attributes = vars(loader)
    runtime: LoaderRuntime | None = attributes.get(_NAME)
    if runtime is None:  # setdefault: threads can ask for the first time together
        runtime = attributes.setdefault(_NAME, LoaderRuntime(weakref.ref(loader)))
    if runtime.owner is None or runtime.owner() is not loader:
        runtime = attributes[_NAME] = LoaderRuntime(weakref.ref(loader))
    if runtime.process is not _process:  # in a fork, whose parent can hold the lock
        runtime.process, runtime.lock, runtime.meter = _process, threading.RLock(), Meter()
    return runtime


def file_cache_of(loader: Any) -> FileCache | None:
    """What the `cache=` of this loader, or FASTLOAD_CACHE, has opened in this process."""
    if (cache := requested_cache(loader.cache)) is None:
        return None
    runtime = runtime_of(loader)
    with runtime.lock:
        if runtime.file_cache is None:
            from fastload.cache.file_cache import open_file_cache  # here: it brings LMDB

            runtime.file_cache = open_file_cache(cache)
            log.info("cache: %s", runtime.file_cache.explain())
        return runtime.file_cache


def explain_cache(loader: Any) -> str:
    """What the `cache=` of a loader does and has done, for the user."""
    file_cache = file_cache_of(loader)
    if file_cache is None:
        if loader.cache is not None:
            return f"cache: {CACHE_VARIABLE}=off turns it off"
        from fastload.cache.dataset import CachedDataset  # here: a loader of other datasets does not need it

        if isinstance(dataset := inside_subsets(loader.dataset)[0], CachedDataset):
            return f"cache of the dataset: {dataset.explain()}"
        return 'cache: none; with cache="ram", the files that the dataset decodes are remembered'
    counts = runtime_of(loader).meter.copied_counts()
    if is_data_pipe(loader.dataset):
        so_far = ["nothing is remembered, because torch's own loader reads DataPipes"]
    elif not counts.num_batches and not counts.cache_misses:
        so_far = ["nothing was read"]
    else:
        so_far = reasons.report(counts.cache_hits, counts.cache_misses, +counts.miss_reasons)
    return "\n".join([file_cache.explain(), f"so far: {so_far[0]}", *so_far[1:]])


def look_at_cache(runtime: LoaderRuntime, dataset: Any, has_ended: bool) -> None:
    """Warn once of what has no room in a cache, and of one that does not serve half of what a loader reads.

    Judges what was read since it last judged: an epoch that has ended, or as many samples as the dataset has.
    So samplers without an end are judged, and iterators that are made and dropped are no epochs.

    Args:
        runtime: Of the loader.
        dataset: Of the loader.
        has_ended: Whether an epoch has ended.
    """
    if has_ended:
        put_back()
    if (cache := runtime.file_cache) is None or cache.is_given_up:
        return
    size = length_or_zero(dataset)
    counts, before = runtime.meter.copied_counts(), runtime.judged or Counts()
    since = counts.since(before)
    if not since.num_samples or not (has_ended or since.num_samples >= size > 0):
        return
    runtime.judged = counts
    cache.end_epoch()
    misses = +since.miss_reasons
    # Of all samples, where this is a part of an epoch, or of the ranks.
    num_refused = round(misses[FULL] * max(1.0, size / since.num_samples))
    if num_refused and (line := cache.shortage(num_refused)) is not None:
        del misses[FULL]
        if not before.miss_reasons[FULL]:
            log.warning("cache: %s", line)
    amounts = since.cache_hits, since.cache_misses, misses
    unread = max(1, size) - before.num_samples
    why = reasons.complaint(type(dataset).__name__, *amounts, unread=unread, before=before.miss_reasons)
    if why is not None:
        say_once(f"cache: {why}")
