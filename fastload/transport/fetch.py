"""From indices to one collated batch: what torch calls a fetcher, writing into our memory.

Runs in a worker, or in the parent without workers. Which samples are fetched, in which order, and when
StopIteration ends an epoch are torch's rules (torch/utils/data/_utils/fetch.py).
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Subset

from fastload.cache.dataset import CachedDataset
from fastload.failed_sample import path_of
from fastload.transport.collate import RowCollate, to_channels_last
from fastload.transport.obituary import short
from fastload.transport.replacing import Replacer
from fastload.transport.stacking import StackingInto, is_torch_default
from fastload.transport.stream_state import ENDED, StreamState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.rng.draws import Draw
    from fastload.rng.sample_rng import SampleRng
    from fastload.transport.job import Job
    from fastload.transport.memory import Arena
    from fastload.transport.replacing import Place


_NOTHING = object()  # no index: None may be one


class Fetcher:
    """Fetches and collates batches of one dataset.

    Args:
        job: How they are made. An iterable dataset is consumed with ``iter``, which is called here.
        dataset: That of the job, or a copy for this thread.
        arena: Where batches are laid out; the caller begins and ends it around each fetch.
        in_worker: Whether this is a worker process.
        sample_rng: Sets the generators before each sample; None leaves them to run on.
        dataset_state: Where an iterable dataset goes on, as `dataset_state` gave it; None: at its beginning.
        worker_id: Of the worker, process or thread; None without workers.

    Attributes:
        replacer: Replaces samples that cannot be read; None where their errors are raised.
    """

    def __init__(
        self,
        job: Job,
        dataset: Any,
        arena: Arena,
        *,
        in_worker: bool,
        sample_rng: SampleRng | None,
        dataset_state: StreamState | None = None,
        worker_id: int | None = None,
    ) -> None:
        if dataset_state is not None and dataset_state.progress == "begun":
            dataset.load_state_dict(dataset_state.load())
        self._dataset = dataset
        self._get = functools.partial(operator.getitem, dataset)
        self._sample_rng = sample_rng
        self._samples = iter(dataset) if job.is_iterable else None
        self._has_ended = dataset_state == ENDED
        self._auto_collation = job.auto_collation
        self._collate_fn = job.collate_fn
        self._drop_last = job.drop_last
        self._arena = arena
        self._channels_last = job.channels_last
        self._rows = RowCollate(arena, in_worker=in_worker, channels_last=job.channels_last)
        self.replacer: Replacer | None = None
        if job.on_error != "raise":
            self.replacer = Replacer(job.on_error, job.replacements, worker_id)
        self._reading: Any = _NOTHING  # the index of the sample that is being read

    def dataset_state(self) -> StreamState:
        """Where an iterable dataset that has a state_dict() stands."""
        return ENDED if self._has_ended else StreamState.of(self._dataset.state_dict())

    def fetch(self, index: Any, draw: Draw | None = None, place: Place | None = None) -> Any:
        """The batch of ``index``.

        Args:
            index: What the sampler gave.
            draw: What its samples' random streams follow from, with a `sample_rng`.
            place: What replacements of samples follow from, with a `replacer`.

        Raises:
            StopIteration: An iterable dataset has ended.
        """
        self._reading = _NOTHING
        if self.replacer is not None and place is not None:
            if self._auto_collation and not hasattr(index, "__getitem__"):
                index = list(index)
            self.replacer.begin(place, index if self._auto_collation else [index])
        try:
            batch = self._fetch(index, draw)
        except BaseException:
            self._rows.forget()
            raise
        finally:
            if self._sample_rng is not None:
                self._sample_rng.end()
        return to_channels_last(batch) if self._channels_last else batch

    def place_of_error(self, index: Any, error: BaseException) -> str:
        """Which sample the last `fetch` failed at, in words; its whole index where that is not known.

        Args:
            index: What `fetch` was given.
            error: What it raised; its ``path`` or ``filename`` is named too.
        """
        place = f"dataset index {short(index if self._reading is _NOTHING else self._reading)}"
        path = path_of(error)
        return place if path is None else f"{place}, {path}"

    def _fetch(self, index: Any, draw: Draw | None) -> Any:
        if self._samples is not None:
            return self._fetch_next(self._samples, index)
        if not self._auto_collation:
            self._reading = index
            with StackingInto(self._arena):  # a dataset that makes whole batches makes them here
                return self._collate_fn(self._getter((index,), draw)(index))
        if not is_torch_default(self._collate_fn):
            samples = self._fetch_samples(index, draw)
            with StackingInto(self._arena):
                return self._collate_fn(samples)
        cached = _find_cache(self._dataset)
        if cached is not None:
            return self._fetch_cached(cached, list(index), draw)
        return self._fetch_rows(index, draw)

    def _seeded(self, get: Callable[[Any], Any], indices: Any, draw: Draw | None) -> Callable[[Any], Any]:
        """What gets a sample; with a draw, after its generators are set."""
        if draw is None or self._sample_rng is None:
            return get
        return self._sample_rng.seeded(get, indices, draw)

    def _fetch_samples(self, indices: Any, draw: Draw | None) -> Any:
        dataset = self._dataset
        if draw is None and hasattr(dataset, "__getitems__") and dataset.__getitems__:
            return self._read_in_bulk(indices)
        return self._read(indices, draw)

    def _read_in_bulk(self, indices: Any) -> Any:
        try:
            return self._dataset.__getitems__(indices)
        except Exception:
            if self.replacer is None:
                raise
        return self._read(indices, None)  # which of them it is, and all others

    def _read(self, indices: Any, draw: Draw | None) -> list[Any]:
        get = self._getter(indices, draw)
        samples = []
        for index in indices:
            self._reading = index
            samples.append(get(index))
        self._reading = _NOTHING
        return samples

    def _getter(self, indices: Any, draw: Draw | None) -> Callable[[Any], Any]:
        """What gets the samples of ``indices``, one after another, and replaces those that cannot be read."""
        get = self._seeded(self._get, indices, draw)
        if self.replacer is None:
            return get
        return self.replacer.replacing(get, functools.partial(self._read_at, draw))

    def _read_at(self, draw: Draw | None, index: Any, occurrence: int) -> Any:
        if draw is not None and self._sample_rng is not None:
            self._sample_rng.begin(draw, index, occurrence)
        return self._get(index)

    def _fetch_rows(self, indices: Any, draw: Draw | None) -> Any:
        dataset, rows = self._dataset, self._rows
        if draw is None and hasattr(dataset, "__getitems__") and dataset.__getitems__:
            samples = self._read_in_bulk(indices)
            rows.begin(len(samples))
            for sample in samples:
                rows.add(sample)
            return self._finish_rows()
        if not hasattr(indices, "__len__"):
            indices = list(indices)
        rows.begin(len(indices))
        get = self._getter(indices, draw)
        for index in indices:
            self._reading = index
            rows.add(get(index))
        return self._finish_rows()

    def _finish_rows(self) -> Any:
        self._reading = _NOTHING
        with StackingInto(self._arena):
            return self._rows.finish()

    def _fetch_cached(self, dataset: CachedDataset, indices: list[Any], draw: Draw | None) -> Any:
        positions = _positions(self._dataset, indices)
        batch = dataset.gather(positions, self._allocate)
        if batch is not None:
            return batch
        if self.replacer is not None:
            return self._fetch_rows(indices, draw)
        get: Callable[[Any], Any] = dataset.view
        if dataset.transform is not None:
            get = self._seeded(dataset.__getitem__, indices, draw)
        rows = self._rows
        rows.begin(len(positions))
        for index, position in zip(indices, positions, strict=True):
            self._reading = index
            rows.add(get(position))
        return self._finish_rows()

    def _fetch_next(self, samples: Iterator[Any], index: Any) -> Any:
        if self._has_ended:
            raise StopIteration
        if not self._auto_collation:
            with StackingInto(self._arena):
                return self._collate_fn(next(samples))
        writes_rows = is_torch_default(self._collate_fn)
        kept: list[Any] = []
        keep = kept.append
        if writes_rows:
            self._rows.begin(len(index))
            keep = self._rows.add
        count = 0
        for _ in index:
            try:
                sample = next(samples)
            except StopIteration:
                self._has_ended = True
                break
            keep(sample)
            count += 1
        if count == 0 or (self._drop_last and count < len(index)):
            raise StopIteration
        if writes_rows:
            return self._finish_rows()
        with StackingInto(self._arena):
            return self._collate_fn(kept)

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        dtype = np.dtype(dtype)
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        return self._arena.allocate(nbytes).view(dtype).reshape(shape)


def _find_cache(dataset: Any) -> CachedDataset | None:
    """The cached dataset itself or under torch's Subset, if batches may be read from its cache at once."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset if _reads_as_ours(dataset) else None


def _positions(dataset: Any, indices: list[Any]) -> list[Any]:
    """The indices that the cached dataset under torch's Subset knows these samples by."""
    while type(dataset) is Subset:
        indices = [dataset.indices[index] for index in indices]
        dataset = dataset.dataset
    return indices


def _reads_as_ours(dataset: Any) -> bool:
    """Whether samples of this dataset are those of its cache, and not what a subclass makes of them."""
    if not isinstance(dataset, CachedDataset) or getattr(dataset, "__getitems__", None):
        return False
    kind: Any = type(dataset)
    return _replaces_no_method(kind) and not _READING.intersection(vars(dataset))


_READING = frozenset(("__getitem__", "view", "_read", "gather"))  # the methods that batches are read by


@functools.lru_cache(maxsize=256)
def _replaces_no_method(kind: Any) -> bool:
    return all(getattr(kind, name) is getattr(CachedDataset, name) for name in _READING)
