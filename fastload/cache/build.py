"""Build an LMDB cache: decode a dataset in parallel, write it in one place, show it only when finished.

Called in the parent by `dataset` and by users. The file grows at PATH.partial under an exclusive lock on
PATH.lock, and is renamed to PATH when it is complete and on disk: whoever sees PATH sees all of it. What a
killed builder left at PATH.partial is removed by the next one. Decoding runs in torch's own DataLoader.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import zlib
from typing import TYPE_CHECKING, Any

import lmdb
import torch
import torch.utils.data

from fastload.cache.lmdb import LMDBCache
from fastload.cache.lmdb_format import Meta, pack_key, pack_value, write_description
from fastload.cache.locks import try_lock
from fastload.cache.progress import BuildProgress
from fastload.cache.record import encode, spec_of
from fastload.errors import CacheBusyError, CacheError, CacheMismatchError, UnsupportedSampleError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PY_LMDB_MAJOR = int(lmdb.__version__.partition(".")[0])
_FIRST_MAP_BYTES = 64 << 20  # doubled whenever it is full
_COMMIT_BYTES = 64 << 20  # records are held this long: a transaction that meets a full map is written again
_COMMIT_RECORDS = 4096
_MOST_WORKERS = 16
_WORTH_WORKERS = 64  # samples; fewer are decoded before workers have started


def build_lmdb(
    dataset: Any,
    path: str | os.PathLike[str],
    *,
    num_workers: int | None = None,
    progress: bool = True,
    probed: Mapping[int, Any] | None = None,
) -> LMDBCache:
    """The finished cache of a dataset at `path`: opened if it is there, else built.

    Args:
        dataset: Map-style and deterministic.
        path: The file.
        num_workers: Processes that decode; None for one a core, 0 for none.
        progress: Show a bar if standard error is a terminal; progress is logged otherwise.
        probed: Samples that were read already, by index; they are not read again.

    Raises:
        CacheMismatchError: The cache at `path` was made from something else.
        CacheBusyError: Another process is building it.
        UnsupportedSampleError: A sample holds something that cannot be cached.
        CacheError: The file could not be written.
    """
    path = os.path.abspath(os.fspath(path))
    probed = probed or {}
    if os.path.exists(path):
        return _opened(dataset, path, probed)
    with _only_builder(path):
        if os.path.exists(path):  # another builder finished between the look and the lock
            return _opened(dataset, path, probed)
        _build(dataset, path, probed, num_workers, progress)
    return LMDBCache(path)


def _opened(dataset: Any, path: str, probed: Mapping[int, Any]) -> LMDBCache:
    cache = LMDBCache(path)
    num_samples = len(dataset)
    first = None if not num_samples else probed[0] if 0 in probed else dataset[0]
    check_source(cache, num_samples, first)
    return cache


def check_source(cache: LMDBCache, num_samples: int, first: Any) -> None:
    """Check that a cache was made from a dataset of this length and first sample.

    Raises:
        CacheMismatchError: It was not; says what differs and what to do.
    """
    expected = _describe(num_samples, _record(first, 0) if num_samples else None)
    names = {
        "num_samples": "number of samples",
        "spec": "structure of sample 0",
        "crc32": "content of sample 0",
    }
    for field, name in names.items():
        stored, wanted = getattr(cache.meta, field), getattr(expected, field)
        if stored != wanted:
            raise CacheMismatchError(
                f"{cache.path} was made from another dataset, or from an earlier state of this one: "
                f"the {name} is {stored} in the cache and {wanted} in the dataset. "
                "Delete the file to build it again, or give another path"
            )


def _describe(num_samples: int, first_record: bytes | None) -> Meta:
    if first_record is None:
        return Meta(num_samples, None, None)
    return Meta(num_samples, spec_of(first_record).text.decode("ascii"), zlib.crc32(first_record))


# --- decoding --------------------------------------------------------------------------------------------


class _Records(torch.utils.data.Dataset[bytes]):
    """A dataset's samples as records, so that workers encode what they decode."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self.dataset = dataset
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> bytes:
        return _record(self.dataset[self.indices[position]], self.indices[position])


def _record(sample: Any, index: int) -> bytes:
    try:
        return encode(sample)
    except UnsupportedSampleError as error:
        error.add_note(f"in sample {index} of the dataset")
        raise


def _unchanged(record: Any) -> Any:
    return record


def _quiet_worker(_: int) -> None:
    if "cv2" in sys.modules:  # one thread a worker: pools that fight for cores cost far more than they give
        sys.modules["cv2"].setNumThreads(0)


def _decoded(dataset: Any, indices: Sequence[int], num_workers: int) -> Iterator[bytes]:
    """The records of these samples, in order."""
    loader = torch.utils.data.DataLoader(
        _Records(dataset, indices),
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_unchanged,
        worker_init_fn=_quiet_worker if num_workers else None,
        generator=torch.Generator(),  # leave torch's global random state alone
    )
    return iter(loader)


def _stop_workers(records: Iterator[bytes]) -> None:
    # After an error the traceback keeps torch's iterator alive, and the garbage collector, which takes the
    # queues before their owner, then waits five seconds for each worker (torch 2.13).
    stop = getattr(records, "_shutdown_workers", None)
    if stop is not None:
        stop()


def _choose_workers(num_workers: int | None, num_samples: int) -> int:
    if num_workers is not None:
        return num_workers
    # A worker of torch's loader is a daemon, which may not have children.
    if num_samples < _WORTH_WORKERS or multiprocessing.current_process().daemon:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_WORKERS)


# --- writing ---------------------------------------------------------------------------------------------


class _Writer:
    """Writes keys in order into a new file, which grows as needed; commits now and then."""

    def __init__(self, path: str) -> None:
        options: dict[str, Any] = {}
        if _PY_LMDB_MAJOR >= 3:
            options["lib_version"] = 0  # LMDB 0.9's data format, which every release reads
        self._map_bytes = _FIRST_MAP_BYTES
        self._environment = lmdb.open(
            path, subdir=False, map_size=self._map_bytes, lock=False, sync=False, meminit=False, **options
        )
        self._pending: list[tuple[bytes, bytes]] = []
        self._pending_bytes = 0

    def put(self, key: bytes, value: bytes) -> None:
        self._pending.append((key, value))
        self._pending_bytes += len(value)
        if self._pending_bytes >= _COMMIT_BYTES or len(self._pending) >= _COMMIT_RECORDS:
            self._commit()

    def _commit(self) -> None:
        while True:
            try:
                with self._environment.begin(write=True) as transaction:
                    for key, value in self._pending:
                        transaction.put(key, value, append=True)
                break
            except lmdb.MapFullError:
                self._map_bytes *= 2
                self._environment.set_mapsize(self._map_bytes)
        self._pending.clear()
        self._pending_bytes = 0

    def finish(self) -> int:
        """Bring everything into the file; says how many bytes a page has."""
        self._commit()
        self._environment.sync(True)
        return int(self._environment.stat()["psize"])

    def close(self) -> None:
        self._environment.close()


def _build(dataset: Any, path: str, probed: Mapping[int, Any], num_workers: int | None, shown: bool) -> None:
    partial = f"{path}.partial"
    num_samples = len(dataset)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)
    indices = [index for index in range(num_samples) if index not in probed]
    # Workers start before the file is open: they must not inherit its environment.
    records = _decoded(dataset, indices, _choose_workers(num_workers, len(indices)))
    first: bytes | None = None
    try:
        with (
            BuildProgress(f"building {path}", num_samples, shown=shown) as progress,
            _writing(partial) as writer,
        ):
            for index in range(num_samples):
                record = _record(probed[index], index) if index in probed else next(records)
                first = record if index == 0 else first
                writer.put(pack_key(index), pack_value(index, record))
                progress.advance(len(record))
            page_bytes = writer.finish()
        write_description(partial, _describe(num_samples, first), page_bytes)
        os.rename(partial, path)
        _sync_directory(os.path.dirname(path))
    finally:
        _stop_workers(records)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


@contextlib.contextmanager
def _writing(partial: str) -> Iterator[_Writer]:
    try:
        writer = _Writer(partial)
        try:
            yield writer
        finally:
            writer.close()
    except lmdb.Error as error:
        raise CacheError(f"cannot write the cache {partial}: {error}") from error


def _sync_directory(directory: str) -> None:
    """Make the rename itself durable."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _only_builder(path: str) -> Iterator[None]:
    """Hold PATH.lock, which is removed at the end; never waits."""
    name = f"{path}.lock"
    while True:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not try_lock(fd):
            holder = os.read(fd, 32).decode("ascii", "replace").strip()
            os.close(fd)
            builder = f"process {holder}" if holder else "another process"
            raise CacheBusyError(
                f"{path} is being built by {builder}: wait until it has finished. "
                "If it was killed just now, its workers hold the lock for some seconds more"
            )
        if _is_same_file(fd, name):
            break
        os.close(fd)  # the last holder removed this file between our open and our lock
    try:
        os.truncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode("ascii"), 0)
        yield
    finally:
        os.unlink(name)
        os.close(fd)


def _is_same_file(fd: int, name: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(name))
    except FileNotFoundError:
        return False
