"""Builds a cache in a file: fills an unfinished file, and finishes it.

Rules:

1. The unfinished file is PATH.partial. When it has all samples and is on the disk, it is moved to PATH: a
   process that sees PATH sees the whole cache.
2. What a build that ends early has stored stays there, and the next build of the same samples continues.
3. Nothing that another program has put at these paths is changed or removed.
4. One build of a path at a time: see `inventory`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image

from fastload.batch.failures import FailedSample
from fastload.batch.source import expect, expects
from fastload.cache.decoded_files import open_files
from fastload.cache.file_cache import FileCache
from fastload.cache.fill import Failure, check_options, fill
from fastload.cache.finished import KIND, Description, LMDBCache, check_source, described
from fastload.cache.inventory import BESIDE, NEW_BYTES, PARTIAL, REPORT, is_ours, only_builder
from fastload.cache.lmdb_store import LmdbStore, open_store, usable
from fastload.cache.random_check import probe, read_unnoticed
from fastload.cache.samples import StoredSamples
from fastload.errors import (
    CacheCorruptError,
    CacheError,
    CacheMismatchError,
    NondeterministicDatasetError,
    TooManyFailuresError,
    UnsupportedSampleError,
)
from fastload.nested.tree import leaves
from fastload.rng.draws import DrawWatch
from fastload.system.disk import sync_directory, write_new
from fastload.system.humanize import fastload_command
from fastload.system.logs import log
from fastload.system.notes import add_note
from fastload.system.os_errors import write_errors_as

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from fastload.cache.fingerprint import Fingerprint

_REPORTED = ("index", "path", "type", "reason", "worker")


def build_lmdb(
    dataset: Any,
    path: str | os.PathLike[str],
    *,
    num_workers: int | None = None,
    progress: bool = True,
    probed: Mapping[int, Any] | None = None,
    on_error: str = "raise",
    max_errors: int | float = 0.01,
    wait: bool = True,
    force: bool = False,
    fingerprint: Fingerprint | None = None,
) -> LMDBCache:
    """The finished cache of a dataset at `path`: opened if it exists, else built.

    Args:
        dataset: Map-style and deterministic.
        path: The file.
        num_workers: Number of decoding processes; None for one per usable CPU, 0 for none.
        progress: Show a bar if standard error is a terminal; progress is logged otherwise.
        probed: Samples that were already read, by index; they are not read again.
        on_error: `"raise"` ends the build at the first sample that cannot be read; `"skip"` leaves such a
            sample out and writes a line about it to PATH.errors.jsonl.
        max_errors: The maximum number of left-out samples (an int), or their share (a float).
        wait: Wait while another process builds the cache, and then open it.
        force: Build it also if it exists, and replace it at the end.
        fingerprint: Of the samples; identifies a cache without reading a sample.

    Raises:
        CacheMismatchError: The cache at `path`, or the unfinished one, was made from other samples.
        CacheBusyError: Another process is building it, and `wait` is False; or another thread is.
        UnsupportedSampleError: A value in a sample cannot be cached.
        CacheError: The file could not be written.
        TooManyFailuresError: More samples than `max_errors` allows could not be read.
        ValueError: An argument is invalid.
    """
    if on_error == "replace":  # the word of DataLoader
        raise ValueError('a build replaces no samples: write on_error="skip", which leaves them out')
    check_options(num_workers, on_error, max_errors)
    path, known = os.path.abspath(path), dict(probed or {})

    if os.path.lexists(path) and not force:
        return compared(_opened(path), dataset, known, fingerprint)
    with only_builder(path, wait=wait):
        if os.path.lexists(path) and not force:  # another process has just built it
            return compared(_opened(path), dataset, known, fingerprint)
        _probe(dataset, known, on_error)
        here = Description.of(dataset, known, fingerprint)
        store = _begin(path, here, force=force)
        try:
            if not store.meta["finished"]:  # else the build was killed in its last steps
                samples = StoredSamples(store, len(dataset))
                for index in known:
                    samples.put(index, known[index])
                source = _Samples(dataset, samples)
                failed = _fill(source, path, num_workers, on_error, max_errors, progress)
                indices = [sample.index for sample in failed]
                if samples.missing().tolist() != indices:
                    raise CacheError(f"cannot write the cache {path}: {store.problem or store.full_reason}")
                store.finish({KIND: asdict(replace(here, left_out=indices))})
            _publish(path, force=force)
            store.path = path
        except BaseException as error:
            _leave(store, path, len(dataset), error)
            raise
    cache = LMDBCache(path)
    cache.reason = "built now, as it did not exist"
    _warn(path, cache.num_samples - cache.num_cached, cache.num_samples)
    return cache


def compared(
    cache: LMDBCache, dataset: Any, known: dict[int, Any], fingerprint: Fingerprint | None
) -> LMDBCache:
    """The cache, after it was compared with a dataset, by fingerprints or else by sample 0.

    Args:
        cache: The cache.
        dataset: Map-style.
        known: Samples that were already read, by index.
        fingerprint: Of the samples.

    Raises:
        CacheMismatchError: It was made from other samples.
    """
    is_told = fingerprint is not None and not fingerprint.needs_key and cache.description.parts is not None
    if not is_told and 0 not in known and 0 in cache and len(dataset):
        with contextlib.suppress(Exception):  # it may have gone since the build
            known[0] = read_unnoticed(dataset, 0)
    check_source(cache, Description.of(dataset, known, fingerprint))
    return cache


def _opened(path: str) -> LMDBCache:
    try:
        return LMDBCache(path)
    except (CacheCorruptError, CacheMismatchError) as error:
        add_note(error, "To build a cache, use a path that does not exist yet")
        raise


class _Samples:
    """The samples of a dataset, on the way to their store."""

    def __init__(self, dataset: Any, cache: StoredSamples) -> None:
        self.dataset, self.cache = dataset, cache
        self._watch = DrawWatch(dataset)

    @property
    def _expect(self) -> Callable[[Sequence[Any]], None] | None:
        return functools.partial(expect, self.dataset) if expects(self.dataset) else None

    def _store(self, index: int) -> bool:
        sample, drawn = self._watch.read(self.dataset, index)
        if drawn:
            raise NondeterministicDatasetError(
                f"the sample is random (drawn from {', '.join(drawn)}), unlike those that were checked "
                "first. A cache would freeze one draw: move the random part of the dataset to the transform"
            )
        if not self.cache.put(index, sample):  # others are committing: unlike training, a build waits
            self.cache.flush()
            return self.cache.put(index, sample)
        return True


def _probe(dataset: Any, known: dict[int, Any], on_error: str) -> None:
    """Examine a few samples, unless this was done."""
    if known or not len(dataset):
        return
    try:
        known |= probe(dataset)
    except (NondeterministicDatasetError, UnsupportedSampleError):
        raise
    except Exception as error:  # noqa: BLE001 - it is raised, unless such samples are left out
        if on_error == "raise":
            Failure.of(0, error).reraise()


def _begin(path: str, here: Description, *, force: bool) -> LmdbStore:
    """The unfinished file of a build, with what an earlier build of the same samples has stored."""
    partial = path + PARTIAL
    if force:
        is_ours(path)  # raises if it is something else
    with write_errors_as(CacheError, "the cache", partial):
        if is_ours(partial) and os.path.getsize(partial) > NEW_BYTES:
            store = usable(open_store(partial))
            there = described(store)
            why = there.difference(here)
            if why is None and (there.parts is not None or not force):
                log.info("%s: continues with the %d samples in it", partial, store.num_records)
                return store
            if not force:
                raise CacheMismatchError(
                    f"{partial} is left of a build of other samples, or of an earlier state of them: {why} "
                    "(here: the dataset, there: the file). Remove it with "
                    f"{fastload_command('cache', 'rm', path)}, or build with --force on the command line"
                )
        _remove(partial)
        return open_store(partial, {"kind": KIND, KIND: asdict(here)})


def _remove(partial: str) -> None:
    for beside in BESIDE:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial + beside)


def _leave(store: LmdbStore, path: str, num_samples: int, error: BaseException) -> None:
    """Keep what an interrupted build has stored, and let its error say how to continue."""
    if store.meta["finished"]:
        return
    store.close()
    if num_stored := store.num_records:
        kept = f"{num_stored:,} of {num_samples:,} samples are stored in {path}{PARTIAL}"
        add_note(error, f"{kept}: run the same build again to continue")
    else:
        _remove(path + PARTIAL)


def _fill(
    source: _Samples | _Files,
    path: str,
    num_workers: int | None,
    on_error: str,
    max_errors: int | float,
    progress: bool,
) -> list[FailedSample]:
    """Store all samples, and write the report; returns those that are left out, by ascending index."""
    left_out = list[FailedSample]()
    try:
        fill(
            source,
            left_out,
            num_workers=num_workers,
            on_error=on_error,
            max_errors=max_errors,
            advice="Raise max_errors or repair the files, and build again",
            title=f"building {path}",
            shown=progress,
        )
    except TooManyFailuresError as error:
        with contextlib.suppress(CacheError):
            _write_report(path, left_out)
            add_note(error, f"The samples that could not be read are listed in {path}{REPORT}")
        raise
    left_out.sort(key=lambda sample: sample.index)
    _write_report(path, left_out)
    return left_out


def _publish(path: str, *, force: bool) -> None:
    """Move the finished file to its place.

    Raises:
        CacheError: Another program has put something there, which stays.
    """
    partial = path + PARTIAL
    with write_errors_as(CacheError, "the cache", path):
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        if force:
            os.replace(partial, path)
        else:
            try:
                os.link(partial, path)  # unlike a rename, it replaces no file that came meanwhile
            except FileExistsError:
                raise CacheError(
                    f"another program created {path} while the cache was built; it was not changed. The "
                    f"finished cache is {partial}: move it to a path of its own"
                ) from None
            except OSError:  # a file system without hard links
                os.rename(partial, path)
        _remove(partial)  # and what a build leaves that was killed in its last steps
        sync_directory(os.path.dirname(path))


def _warn(path: str, num_left_out: int, num_samples: int) -> None:
    if num_left_out:
        text = "%s: %d of %d samples could not be read and are left out: see %s%s"
        log.warning(text, path, num_left_out, num_samples, path, REPORT)


def _write_report(path: str, left_out: list[FailedSample]) -> None:
    """Write about the samples that a cache leaves out: one line of JSON each; no file if there are none."""
    lines = [json.dumps({name: getattr(sample, name) for name in _REPORTED}) for sample in left_out]
    with write_errors_as(CacheError, "the report", path + REPORT):
        if not lines:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + REPORT)  # of an older cache
            return
        own = f"{path}{REPORT}.{os.urandom(8).hex()}"
        write_new(own, "".join(f"{line}\n" for line in lines).encode())
        os.replace(own, path + REPORT)


# --- files ------------------------------------------------------------------------------------------------


class _Files:
    """A dataset that is read to decode its files, and what `fill` needs to know of their cache."""

    def __init__(self, dataset: Any, store: LmdbStore) -> None:
        self.dataset, self.num_samples, self.store = dataset, len(dataset), store
        self._reader = FileCache(store)

    @property
    def cache(self) -> _Files:
        """This object."""
        return self

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.store.nbytes

    def missing(self) -> npt.NDArray[np.intp]:
        """All samples: which files they have is seen when they are read."""
        return np.arange(self.num_samples)

    def flush(self) -> None:
        """Commit what this process has decoded."""
        self.store.flush()

    def learns(self) -> bool:
        """Whether images were read before it was known what is stored of them; it is now."""
        return self._reader.end_epoch()

    def _store(self, index: int) -> bool:
        with self._reader.reading():
            for leaf in leaves(self.dataset[index]):
                if isinstance(leaf, PIL.Image.Image):
                    leaf.load()  # Pillow leaves that to whoever uses the image
        return True


def build_files(
    dataset: Any,
    path: str,
    *,
    num_workers: int | None = None,
    progress: bool = True,
    on_error: str = "raise",
    max_errors: int | float = 0.01,
    wait: bool = True,
    force: bool = False,
) -> None:
    """Decode the files that a dataset reads into a file, and finish it; one that loaders fill, where it is.

    Args:
        dataset: Map-style; it can be random.
        path: The file.
        num_workers: As for `build_lmdb`, as are all that follow.
        progress: Show a bar.
        on_error: What a sample is that cannot be read.
        max_errors: How many can be left out.
        wait: Wait while another process builds the cache.
        force: Build it also if it is finished, and replace it at the end.

    Raises:
        CacheMismatchError: Something else is at the path.
        CacheBusyError: Another process is building it, and `wait` is False; or another thread is.
        CacheError: The file could not be written.
        TooManyFailuresError: More samples than `max_errors` allows could not be read.
    """
    check_options(num_workers, on_error, max_errors)
    with only_builder(path, wait=wait):
        is_there = is_ours(path) and not force
        partial = path if is_there else path + PARTIAL
        if not is_there and is_ours(partial) and os.path.getsize(partial) <= NEW_BYTES:
            _remove(partial)
        source = _Files(dataset, usable(open_files(partial)))
        store = source.store
        try:
            if not store.meta["finished"]:
                for _ in range(2):
                    left_out = _fill(source, path, num_workers, on_error, max_errors, progress)
                    if not source.learns():  # else the first images show what is best stored of all
                        break
                store.finish()
                _warn(path, len(left_out), len(dataset))
            if not is_there:
                _publish(path, force=force)
                store.path = path
        except BaseException as error:
            store.close()
            add_note(error, f"What is decoded stays in {partial}: run the same build again to continue")
            raise
