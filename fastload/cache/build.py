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
import json
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image

from fastload.batch.failures import FailedSample
from fastload.cache.decoded_files import open_files
from fastload.cache.file_cache import FileCache
from fastload.cache.fill import Failure, FillOptions, fill
from fastload.cache.fingerprint import KEY_PART, Fingerprint
from fastload.cache.finished import KIND, Description, LMDBCache
from fastload.cache.inventory import BESIDE, NEW_BYTES, PARTIAL, REPORT, is_ours, only_builder
from fastload.cache.lmdb_store import LmdbStore, open_store
from fastload.cache.random_check import probe, read_unnoticed, spread_indices
from fastload.cache.samples import StoredSamples
from fastload.cache.sources import MappedDataset
from fastload.errors import (
    CacheError,
    CacheMismatchError,
    NondeterministicDatasetError,
    TooManyFailuresError,
    UnsupportedSampleError,
)
from fastload.nested.tree import first_difference, leaves
from fastload.rng.draws import DrawWatch
from fastload.system.disk import sync_directory, write_new
from fastload.system.humanize import fastload_command
from fastload.system.logs import log, say_once
from fastload.system.notes import add_note, short_repr
from fastload.system.os_errors import write_errors_as

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from fastload.cache.sample_cache import SampleCache

_ADVICE = "Raise max_errors or repair the files, and build again"
_REPORTED = ("index", "path", "type", "reason", "worker")


def build_lmdb(
    dataset: Any,
    path: str | os.PathLike[str],
    *,
    probed: Mapping[int, Any] | None = None,
    wait: bool = True,
    force: bool = False,
    fingerprint: Fingerprint | None = None,
    **options: Any,
) -> LMDBCache:
    """The finished cache of a dataset at `path`: opened if it exists, else built.

    Args:
        dataset: Map-style and deterministic.
        path: The file.
        probed: Samples that were already read, by index; they are not read again.
        wait: Wait while another process builds the cache, and then open it.
        force: Build it also if it exists, and replace it at the end.
        fingerprint: Of the samples; identifies a cache without reading a sample.
        options: The fields of `FillOptions`. What `"skip"` leaves out is listed in PATH.errors.jsonl.

    Raises:
        CacheMismatchError: The cache at `path`, or the unfinished one, was made from other samples.
        CacheBusyError: Another process is building it, and `wait` is False; or another thread is.
        UnsupportedSampleError: A value in a sample cannot be cached.
        CacheError: The file could not be written.
        TooManyFailuresError: More samples than `max_errors` allows could not be read.
        ValueError: An argument is invalid.
    """
    chosen = FillOptions(**options)
    path, known = os.path.abspath(path), dict(probed or {})
    if os.path.lexists(path) and not force:
        return compared(LMDBCache(path), dataset, known, fingerprint)
    with only_builder(path, wait=wait):
        if os.path.lexists(path) and not force:  # another process has just built it
            return compared(LMDBCache(path), dataset, known, fingerprint)
        if not known and len(dataset):
            _probe(dataset, known, chosen.on_error)
        classes = getattr(dataset, "classes", None)
        is_listed = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
        parts = None if fingerprint is None else fingerprint.parts_in_file
        here = Description(len(dataset), parts, classes if is_listed else None)
        store = _begin(here, path, dataset, known, fingerprint, force=force)
        _complete(_Samples(dataset, store, here, known), path, chosen, force=force)
    cache = LMDBCache(path)
    cache.reason = "built now, as it did not exist"
    return cache


def build_files(dataset: Any, path: str, *, wait: bool = True, force: bool = False, **options: Any) -> None:
    """Decode the files that a dataset reads into a file, and finish it; one that loaders fill, where it is.

    Args:
        dataset: Map-style; it can be random.
        path: The file.
        wait: Wait while another process builds the cache.
        force: Build it also if it is finished, and replace it at the end.
        options: As for `build_lmdb`.

    Raises:
        CacheMismatchError: Something else is at the path.
        CacheBusyError: Another process is building it, and `wait` is False; or another thread is.
        CacheError: The file could not be written.
        TooManyFailuresError: More samples than `max_errors` allows could not be read.
    """
    chosen = FillOptions(**options)
    with only_builder(path, wait=wait):
        is_there = is_ours(path) and not force
        if not is_there:
            _is_begun(path)
        store = open_files(path if is_there else path + PARTIAL)
        _complete(_Files(dataset, store), path, chosen, force=force)


# --- what is filled ---------------------------------------------------------------------------------------


class _Samples(MappedDataset):
    """The samples of a dataset, on the way to their store."""

    def __init__(
        self, dataset: Any, store: LmdbStore, description: Description, known: Mapping[int, Any]
    ) -> None:
        super().__init__(dataset, DrawWatch(dataset).read)
        self.store, self.cache = store, StoredSamples(store, len(dataset))
        self._description = description
        for index, sample in () if store.meta["finished"] else known.items():
            self.cache.put(index, sample)
        store.flush()  # a build that continues compares them

    def _store(self, index: int) -> bool:
        sample, drawn = self[index]
        if drawn:
            raise NondeterministicDatasetError(
                f"the sample is random (drawn from {', '.join(drawn)}), unlike those that were checked "
                "first. A cache would freeze one draw: move the random part of the dataset to the transform"
            )
        if not self.cache.put(index, sample):  # others are committing: unlike training, a build waits
            self.cache.flush()
            return self.cache.put(index, sample)
        return True

    def learns(self) -> bool:
        """Whether samples have to be read again."""
        return False

    def described(self, left_out: list[int]) -> dict[str, Any]:
        """What the finished file says of itself.

        Raises:
            CacheError: Other samples are missing than those that are left out.
        """
        if self.cache.missing().tolist() != left_out:
            raise CacheError(
                f"cannot write the cache {self.store.path}: {self.store.problem or 'its disk is full'}"
            )
        return {KIND: asdict(replace(self._description, left_out=left_out))}


class _Files:
    """A dataset that is read to decode its files, and what `fill` needs to know of their cache."""

    def __init__(self, dataset: Any, store: LmdbStore) -> None:
        self.dataset, self.num_samples, self.store = dataset, len(dataset), store
        self.cache = self
        self._reader = FileCache(store)

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

    def _store(self, index: int) -> bool:
        with self._reader.reading():
            for leaf in leaves(self.dataset[index]):
                if isinstance(leaf, PIL.Image.Image):
                    leaf.load()  # Pillow leaves that to whoever uses the image
        return True

    def learns(self) -> bool:
        """Whether images were read before it was known what is stored of them; it is now."""
        return self._reader.end_epoch()

    def described(self, left_out: list[int]) -> dict[str, Any]:
        """Nothing: each file that is missing is decoded when it is read.

        Raises:
            CacheError: All of them are missing.
        """
        if len(left_out) < self.num_samples and not self.store.num_records:
            why = (
                "no supported library decoded a file (docs/guides/caching.md lists them), or all are too new"
            )
            raise CacheError(f"nothing that the dataset reads can be stored: {self.store.problem or why}")
        return {}


# --- the steps of a build ---------------------------------------------------------------------------------


def _probe(dataset: Any, known: dict[int, Any], on_error: str) -> None:
    """Examine a few samples."""
    try:
        known |= probe(dataset)
    except (NondeterministicDatasetError, UnsupportedSampleError):
        raise
    except Exception as error:  # noqa: BLE001 - it is raised, unless such samples are left out
        if on_error == "raise":
            Failure.of(0, error).reraise()


def _is_begun(path: str) -> bool:
    """Whether there is an unfinished file to continue with; one whose maker was killed at once is removed."""
    if not is_ours(path + PARTIAL):
        return False
    if os.path.getsize(path + PARTIAL) > NEW_BYTES:
        return True
    _remove(path + PARTIAL)
    return False


def _begin(
    here: Description,
    path: str,
    dataset: Any,
    known: Mapping[int, Any],
    fingerprint: Fingerprint | None,
    *,
    force: bool,
) -> LmdbStore:
    """The unfinished file of a build, with what an earlier build of the same samples has stored."""
    partial = path + PARTIAL
    if force:
        is_ours(path)  # raises if it is something else
    with write_errors_as(CacheError, "the cache", partial):
        if _is_begun(path):
            store = open_store(partial)
            there = Description.of(store)
            stored = StoredSamples(store, there.num_samples)
            why = difference(stored, there.parts, dataset, known, fingerprint)
            # Who forces a build may have changed what a key, or the compared samples, do not show.
            is_sure = there.parts is not None and fingerprint is not None and not fingerprint.needs_key
            if why is None and (is_sure or not force):
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


def _complete(source: _Samples | _Files, path: str, options: FillOptions, *, force: bool) -> None:
    """Store what is missing, finish the file, and move it to its place."""
    store, left_out = source.store, list[FailedSample]()
    try:
        if not store.meta["finished"]:  # else the build was killed in its last steps
            for _ in range(2):
                left_out.clear()
                fill(source, left_out, options, advice=_ADVICE, title=f"building {path}")
                if not source.learns():  # else the first images show what is best stored of all
                    break
            left_out.sort(key=lambda sample: sample.index)
            described = source.described([sample.index for sample in left_out])
            _write_report(path, left_out)
            store.finish(described)
        if store.path != path:
            _publish(store, path, force=force)
    except BaseException as error:
        if isinstance(error, TooManyFailuresError):
            with contextlib.suppress(CacheError):
                _write_report(path, left_out)
                add_note(error, f"The samples that could not be read are listed in {path}{REPORT}")
        store.close()
        if num_stored := store.num_records:
            kept = f"{num_stored:,} records are stored in {store.path}"
            add_note(error, f"{kept}: run the same build again to continue")
        elif store.path != path and store.problem is None:
            _remove(store.path)
        raise
    if left_out:
        text = "%s: %d of %d samples could not be read and are left out: see %s%s"
        log.warning(text, path, len(left_out), len(source.dataset), path, REPORT)


def _publish(store: LmdbStore, path: str, *, force: bool) -> None:
    """Move the finished file to its place.

    Raises:
        CacheError, CacheMismatchError: Another program has put something there, which stays.
    """
    partial = store.path
    with write_errors_as(CacheError, "the cache", path):
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        if force and is_ours(path):
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
        store.path = path
        _remove(partial)  # and what a build leaves that was killed in its last steps
        sync_directory(os.path.dirname(path))


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


# --- whether a dataset made it ----------------------------------------------------------------------------


def first_differing(cache: SampleCache, dataset: Any, known: Mapping[int, Any], count: int) -> str | None:
    """Where one of the first, middle and last samples differs from the one in a cache; None if none does.

    Args:
        cache: What it lacks is not compared.
        dataset: The source; what cannot be read, or no longer, is not compared.
        known: Samples that were already read, by index.
        count: How many are compared at most.
    """
    for index in spread_indices(len(dataset), 3):
        if not count or (stored := cache.get(index)) is None:
            continue
        try:
            fresh = known[index] if index in known else read_unnoticed(dataset, index)
        except Exception as error:  # noqa: BLE001 - of the user's dataset
            log.debug("sample %d cannot be read, and is not compared: %s", index, short_repr(error))
            continue
        if (path := first_difference(stored, fresh)) is not None:
            return f"sample {index} of the dataset differs at {path}"
        count -= 1
    return None


def difference(
    stored: SampleCache,
    parts: dict[str, str] | None,
    dataset: Any,
    known: Mapping[int, Any],
    fingerprint: Fingerprint | None,
) -> str | None:
    """How a dataset differs from the one whose samples are stored; None if it does not, as far as is known.

    Fingerprints are compared, or else the numbers of samples; and all samples that were already read, or one,
    unless a fingerprint covers all code that makes them.

    Args:
        stored: The samples.
        parts: Of their fingerprint.
        dataset: Map-style.
        known: Samples of it that were already read, by index.
        fingerprint: Of the dataset.
    """
    if fingerprint is None or parts is None:
        if stored.num_samples != len(dataset):
            return f"the number of samples is {len(dataset)} here and {stored.num_samples} there"
    else:
        ours = fingerprint.parts_in_file
        if not (KEY_PART in ours and KEY_PART in parts):
            ours, parts = (
                {name: part for name, part in each.items() if name != KEY_PART} for each in (ours, parts)
            )
        if differences := Fingerprint(ours).differences(Fingerprint(parts)):
            return "; ".join(differences)
        if not fingerprint.needs_key:
            return None
    return first_differing(stored, dataset, known, len(known) or 1)


def compared(
    cache: LMDBCache, dataset: Any, known: Mapping[int, Any], fingerprint: Fingerprint | None
) -> LMDBCache:
    """The cache, whose `reason` becomes that it matches; the arguments are those of `difference`.

    Raises:
        CacheMismatchError: It was made from other samples; the error says what differs, and which of the two
            to change.
    """
    why = difference(cache, cache.parts, dataset, known, fingerprint)
    if why is not None:
        raise CacheMismatchError(
            f"{cache.path} was made from other samples, or from an earlier state of them: {why} (here: the "
            "dataset, there: the cache). If the cache is right, change the dataset, or train without it from "
            f"CachedDataset.from_cache({cache.path!r}). If the dataset is right, remove it with "
            f"{fastload_command('cache', 'rm', cache.path)}, build it again with --force on the command "
            "line, or use a different path"
        )
    is_known = fingerprint is not None and cache.parts is not None
    if not is_known and len(dataset):
        say_once(
            f"cache: only the number of samples and sample 0 of {cache.path} were compared with the dataset. "
            "Other samples, such as edited labels, are as they were when it was built. Build it with "
            "cache_key=, and change the key and the path with the samples, or give its class a fingerprint()"
        )
    what = "fingerprint matches" if is_known else "number of samples and its sample 0 match"
    cache.reason = f"opened, because its {what} the dataset"
    return cache
