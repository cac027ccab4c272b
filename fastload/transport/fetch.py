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
from fastload.transport.collate import RowCollate, is_torch_default, to_channels_last
from fastload.transport.stream_state import ENDED, StreamState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.rng.draws import Draw
    from fastload.rng.sample_rng import SampleRng
    from fastload.transport.job import Job
    from fastload.transport.memory import Arena


class Fetcher:
    """Fetches and collates batches of one dataset.

    Args:
        job: How they are made. An iterable dataset is consumed with ``iter``, which is called here.
        dataset: That of the job, or a copy for this thread.
        arena: Where batches are laid out; the caller begins and ends it around each fetch.
        in_worker: Whether this is a worker process.
        sample_rng: Sets the generators before each sample; None leaves them to run on.
        dataset_state: Where an iterable dataset goes on, as `dataset_state` gave it; None: at its beginning.
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

    def dataset_state(self) -> StreamState:
        """Where an iterable dataset that has a state_dict() stands."""
        return ENDED if self._has_ended else StreamState.of(self._dataset.state_dict())

    def fetch(self, index: Any, draw: Draw | None = None) -> Any:
        """The batch of ``index``.

        Args:
            index: What the sampler gave.
            draw: What its samples' random streams follow from, with a `sample_rng`.

        Raises:
            StopIteration: An iterable dataset has ended.
        """
        try:
            batch = self._fetch(index, draw)
        except BaseException:
            self._rows.forget()
            raise
        finally:
            if self._sample_rng is not None:
                self._sample_rng.end()
        return to_channels_last(batch) if self._channels_last else batch

    def _fetch(self, index: Any, draw: Draw | None) -> Any:
        if self._samples is not None:
            return self._fetch_next(self._samples, index)
        if not self._auto_collation:
            return self._collate_fn(self._seeded(self._get, (index,), draw)(index))
        if not is_torch_default(self._collate_fn):
            return self._collate_fn(self._fetch_samples(index, draw))
        cached, positions = _find_cache(self._dataset, index)
        if cached is not None:
            return self._fetch_cached(cached, positions, index, draw)
        return self._fetch_rows(index, draw)

    def _seeded(self, get: Callable[[Any], Any], indices: Any, draw: Draw | None) -> Callable[[Any], Any]:
        """What gets a sample; with a draw, after its generators are set."""
        if draw is None or self._sample_rng is None:
            return get
        return self._sample_rng.seeded(get, indices, draw)

    def _fetch_samples(self, indices: Any, draw: Draw | None) -> Any:
        dataset = self._dataset
        if draw is None and hasattr(dataset, "__getitems__") and dataset.__getitems__:
            return dataset.__getitems__(indices)
        get = self._seeded(self._get, indices, draw)
        return [get(index) for index in indices]

    def _fetch_rows(self, indices: Any, draw: Draw | None) -> Any:
        dataset, rows = self._dataset, self._rows
        if draw is None and hasattr(dataset, "__getitems__") and dataset.__getitems__:
            samples = dataset.__getitems__(indices)
            rows.begin(len(samples))
            for sample in samples:
                rows.add(sample)
            return rows.finish()
        if not hasattr(indices, "__len__"):
            indices = list(indices)
        rows.begin(len(indices))
        get = self._seeded(self._get, indices, draw)
        for index in indices:
            rows.add(get(index))
        return rows.finish()

    def _fetch_cached(
        self, dataset: CachedDataset, positions: list[Any], indices: Any, draw: Draw | None
    ) -> Any:
        batch = dataset.gather(positions, self._allocate)
        if batch is not None:
            return batch
        get: Callable[[Any], Any] = dataset.view
        if dataset.transform is not None:
            get = self._seeded(dataset.__getitem__, indices, draw)
        rows = self._rows
        rows.begin(len(positions))
        for position in positions:
            rows.add(get(position))
        return rows.finish()

    def _fetch_next(self, samples: Iterator[Any], index: Any) -> Any:
        if self._has_ended:
            raise StopIteration
        if not self._auto_collation:
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
        return self._rows.finish() if writes_rows else self._collate_fn(kept)

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        dtype = np.dtype(dtype)
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        return self._arena.allocate(nbytes).view(dtype).reshape(shape)


def _find_cache(dataset: Any, indices: Any) -> tuple[CachedDataset | None, list[Any]]:
    """The cached dataset itself or under torch's Subset, with the indices that it knows."""
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    if not isinstance(inner, CachedDataset):
        return None, []
    positions = list(indices)
    while type(dataset) is Subset:
        positions = [dataset.indices[position] for position in positions]
        dataset = dataset.dataset
    return inner, positions
