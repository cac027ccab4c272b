"""Fills a cache in RAM before training: reads all missing samples in parallel.

Workers read samples through the dataset, store them, and return only how many they stored. Other users of the
cache are not disturbed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from fastload.batch.read_ahead import read_tasks_ahead
from fastload.cache.build import processes
from fastload.cache.format.progress import BuildProgress
from fastload.system.humanize import readable_size
from fastload.system.logs import log
from fastload.system.notes import add_note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastload.cache.format.sample_cache import SampleCache

_MAX_CHUNK_SAMPLES = 64  # an answer costs about 50 us, so small samples are read in chunks
_CHUNKS_A_WORKER = 16  # at least, so workers finish at about the same time
_ENOUGH_REJECTED = 64  # if the cache rejects this many samples in a row, it is full
_MAX_IDLE_ROUNDS = 3


@dataclass(eq=False)
class _Chunks(Dataset[int]):
    """Reads chunks of samples; each item is the number of stored samples of a chunk."""

    dataset: Any
    chunks: Sequence[Sequence[int]]

    def __getitem__(self, number: int) -> int:
        num_stored = 0
        read_tasks_ahead(self.dataset, self.chunks, number)
        for index in self.chunks[number]:
            try:
                num_stored += self.dataset._store(index)
            except Exception as error:
                add_note(error, f"in sample {index} of the dataset")
                raise
        return num_stored


def fill(dataset: Any, cache: SampleCache, *, num_workers: int | None, shown: bool) -> None:
    """Read every missing sample that the cache might accept; stop when it accepts no more.

    If there is none, nothing is read, no random number is drawn, and the log says so.

    Args:
        dataset: Has `_store(index)`, which stores a sample in the cache and says whether it is there.
        cache: The cache to fill.
        num_workers: Processes; None for one per usable CPU, 0 for none.
        shown: Draw a bar, if standard error is a terminal.
    """
    missing = cache.missing().tolist()
    if not missing:
        why = "is full already" if cache.num_cached == cache.num_samples else "takes no more samples"
        log.info("cache: nothing to fill, the cache %s: %s", why, _held(cache))
        return
    with BuildProgress("filling the cache", len(missing), shown=shown) as progress:
        # Samples rejected because workers wanted space at the same moment get a second round.
        rounds_left = _MAX_IDLE_ROUNDS
        while missing and rounds_left:
            if _read(dataset, cache, missing, num_workers, progress):
                break
            left = cache.missing().tolist()
            rounds_left = rounds_left - 1 if len(left) == len(missing) else _MAX_IDLE_ROUNDS
            missing = left
    log.info("cache: filled: %s", _held(cache))


def _held(cache: SampleCache) -> str:
    size = readable_size(cache.nbytes)
    return f"{cache.num_cached:,} of {cache.num_samples:,} samples in {size}"


def _read(
    dataset: Any, cache: SampleCache, indices: list[int], num_workers: int | None, progress: BuildProgress
) -> bool:
    """Read these samples once; returns True early if the cache accepts no more."""
    num_processes = processes.choose_workers(num_workers, len(indices)) if cache.is_shared else 0
    size = max(1, min(_MAX_CHUNK_SAMPLES, len(indices) // (_CHUNKS_A_WORKER * max(1, num_processes))))
    chunks = [indices[start : start + size] for start in range(0, len(indices), size)]
    answers = processes.run(_Chunks(dataset, chunks), len(chunks), num_processes)
    rejected, nbytes = 0, cache.nbytes
    try:
        for chunk, stored in zip(chunks, answers, strict=True):
            now_bytes = cache.nbytes
            progress.advance(now_bytes - nbytes, stored)
            nbytes = now_bytes
            rejected = 0 if stored else rejected + len(chunk)
            if rejected >= _ENOUGH_REJECTED:
                return True
    finally:
        processes.stop(answers)
    return False
