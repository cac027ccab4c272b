"""Fills a cache before training: in RAM with all missing samples, on disk with the files of a dataset.

Workers read samples through the dataset, store them, and return only how many they stored. Other users of the
cache are not disturbed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, get_worker_info

from fastload.batch.failures import FailedSample, check_left_out, check_max_errors
from fastload.batch.source import expect_tasks
from fastload.cache.build import processes
from fastload.cache.build.tasks import Failure
from fastload.cache.decoded_files import open_files
from fastload.cache.progress import BuildProgress
from fastload.errors import UnsupportedSampleError
from fastload.nested.tree import leaves
from fastload.system.checks import check_arguments, one_of
from fastload.system.humanize import readable_size
from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fastload.cache.sample_cache import SampleCache

_MAX_CHUNK_SAMPLES = 64  # an answer costs about 50 us, so small samples are read in chunks
_CHUNKS_A_WORKER = 16  # at least, so workers finish at about the same time
_ENOUGH_REJECTED = 64  # if the cache rejects this many samples in a row, it is full
_MAX_IDLE_ROUNDS = 3
_MAX_LISTED = 10  # left-out samples that the log names


@dataclass(eq=False)
class _Chunks(Dataset[tuple[int, list[FailedSample], Failure | None]]):
    """Reads chunks of samples; each item is how many are stored, which are left out, and an error."""

    dataset: Any
    chunks: Sequence[Sequence[int]]
    skips: bool

    def __getitem__(self, number: int) -> tuple[int, list[FailedSample], Failure | None]:
        num_stored, left_out = 0, []
        expect_tasks(self.dataset, self.chunks, number)
        for index in self.chunks[number]:
            try:
                num_stored += self.dataset._store(index)
            except Exception as error:  # noqa: BLE001 - of the user's code; the parent reports or raises it
                if self.skips and not isinstance(error, UnsupportedSampleError):
                    worker = get_worker_info()
                    left_out.append(FailedSample.of(index, error, None if worker is None else worker.id))
                    continue
                return num_stored, left_out, Failure.of(index, error)
        return num_stored, left_out, None


def fill(
    dataset: Any,
    cache: SampleCache,
    *,
    num_workers: int | None,
    shown: bool,
    on_error: str,
    max_errors: int | float,
) -> None:
    """Read every missing sample that the cache might accept; stop when it accepts no more.

    If there is none, nothing is read, no random number is drawn, and the log says so.

    Args:
        dataset: Has `_store(index)`, which stores a sample in the cache and says whether it is there.
        cache: The cache to fill.
        num_workers: Processes; None for one per usable CPU, 0 for none.
        shown: Draw a bar, if standard error is a terminal.
        on_error: `"raise"`, or `"skip"` to leave out samples that cannot be read.
        max_errors: How many samples `"skip"` can leave out, as a number or a share.
    """
    check_arguments({"on_error": on_error}, {"on_error": one_of("raise", "skip")})
    check_max_errors(max_errors, on_error, '"skip"')
    missing, num_samples = cache.missing().tolist(), cache.num_samples
    if not missing:
        why = "is full already" if cache.num_cached == num_samples else "takes no more samples"
        log.info("cache: nothing to fill, the cache %s: %s", why, _held(cache))
        return
    unreadable: list[FailedSample] = []

    def leave_out(samples: list[FailedSample]) -> None:
        unreadable.extend(samples)
        check_left_out(unreadable, max_errors, num_samples, "The others stay in the cache")

    with BuildProgress("filling the cache", len(missing), shown=shown) as progress:
        # Samples rejected because workers wanted space at the same moment get a second round.
        rounds_left = _MAX_IDLE_ROUNDS
        while missing and rounds_left:
            if _read(
                dataset, cache, missing, num_workers, progress, leave_out if on_error == "skip" else None
            ):
                break
            left_out = {sample.index for sample in unreadable}
            left = [index for index in cache.missing().tolist() if index not in left_out]
            rounds_left = rounds_left - 1 if len(left) == len(missing) else _MAX_IDLE_ROUNDS
            missing = left
    if unreadable:
        listed = "; ".join(map(str, unreadable[:_MAX_LISTED])) + "; ..." * (len(unreadable) > _MAX_LISTED)
        text = "cache: %d of %d samples could not be read, and are left out: %s"
        log.warning(text, len(unreadable), num_samples, listed)
    log.info("cache: filled: %s", _held(cache))


def fill_files(path: str, loader: Iterable[int], num_samples: int, *, shown: bool) -> None:
    """Read an epoch of a loader with ``cache="lmdb:PATH"`` and `decode_images`, and show the progress.

    Raises:
        CacheMismatchError: Something else is at the path.
    """
    store = open_files(path)
    with BuildProgress(f"filling {path}", num_samples, shown=shown) as progress:
        nbytes = store.nbytes
        for num_read in loader:
            nbytes, before = store.nbytes, nbytes
            progress.advance(nbytes - before, num_read)


def decode_images(samples: list[Any]) -> int:
    """Decode the images in samples, which Pillow leaves to whoever uses them; how many samples there are."""
    from PIL import Image  # here: the loader of other datasets does not need it

    for leaf in leaves(samples):
        if isinstance(leaf, Image.Image):
            leaf.load()
    return len(samples)


def _held(cache: SampleCache) -> str:
    size = readable_size(cache.nbytes)
    return f"{cache.num_cached:,} of {cache.num_samples:,} samples in {size}"


def _read(
    dataset: Any,
    cache: SampleCache,
    indices: list[int],
    num_workers: int | None,
    progress: BuildProgress,
    leave_out: Callable[[list[FailedSample]], object] | None,
) -> bool:
    """Read these samples once; returns whether that is all: they are stored, or the cache accepts no more.

    `leave_out` is called with samples that cannot be read; None to raise their error.
    """
    num_processes = processes.choose_workers(num_workers, len(indices))
    size = max(1, min(_MAX_CHUNK_SAMPLES, len(indices) // (_CHUNKS_A_WORKER * max(1, num_processes))))
    chunks = [indices[start : start + size] for start in range(0, len(indices), size)]
    answers = processes.run(_Chunks(dataset, chunks, leave_out is not None), len(chunks), num_processes)
    num_rejected, rejected, nbytes = 0, 0, cache.nbytes  # in all, and in a row
    try:
        for chunk, (stored, unreadable, failure) in zip(chunks, answers, strict=True):
            if failure is not None:
                failure.reraise()
            now_bytes = cache.nbytes
            progress.advance(now_bytes - nbytes, stored + len(unreadable))
            nbytes = now_bytes
            if leave_out is not None:
                leave_out(unreadable)
            num_rejected += len(chunk) - stored - len(unreadable)
            rejected = 0 if stored else rejected + len(chunk) - len(unreadable)
            if rejected >= _ENOUGH_REJECTED:
                return True
    finally:
        processes.stop(answers)
    return num_rejected == 0
