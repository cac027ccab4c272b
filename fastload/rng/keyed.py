"""`rng="sample"` through torch's own iterator: what a sample's streams follow from travels in its index.

For loaders whose work is left to torch (see `DataLoader._why_torch`). In the parent the sampler's indices
become keys; in a worker the dataset takes a key apart, sets the generators, and reads the sample.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch.utils.data import Dataset

from fastload.rng.sample_rng import SampleRng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.rng.draws import Draw


class SampleStreams(Protocol):
    """What the keys of an epoch are made by."""

    def draw(self, given: Any) -> tuple[Any, Draw | None]:
        """The index that the sampler gave, and what the streams of its samples follow from."""


class Key(NamedTuple):
    """An index, and what its sample's streams follow from."""

    index: Any
    draw: Draw
    occurrence: int


class KeyedDataset(Dataset[Any]):
    """A dataset that is read by keys; everything else is the dataset's own.

    Args:
        dataset: Map-style.
        with_pipelines: Whether the pipelines in it are set too.
    """

    def __init__(self, dataset: Any, *, with_pipelines: bool) -> None:
        self._dataset = dataset
        self._with_pipelines = with_pipelines
        self._rng: SampleRng | None = None  # made in each worker

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copies and pickles ask before there is anything
            raise AttributeError(name)
        return getattr(self.__dict__["_dataset"], name)

    def __getitem__(self, key: Key) -> Any:
        if self._rng is None:
            self._rng = SampleRng(self._dataset, with_pipelines=self._with_pipelines, is_guest=False)
        self._rng.begin(key.draw, key.index, key.occurrence)
        try:
            return self._dataset[key.index]
        finally:
            self._rng.end()


class KeyedSampler:
    """The keys of a sampler's indices, epoch by epoch.

    Args:
        sampler: Gives indices, or lists of them.
        auto_collation: Whether it gives lists.
        epoch: Says which epoch has begun; called when its first key is asked for.
    """

    def __init__(self, sampler: Any, *, auto_collation: bool, epoch: Callable[[], SampleStreams]) -> None:
        self._sampler = sampler
        self._auto_collation = auto_collation
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return self._keys(iter(self._sampler))  # at once: this may draw, and torch does it here

    def _keys(self, indices: Iterator[Any]) -> Iterator[Any]:
        epoch = self._epoch()
        for given in indices:
            index, draw = epoch.draw(given)
            if draw is None:
                raise AssertionError('the epoch of a loader with rng="sample" has draws')
            drawn = index if self._auto_collation else [index]
            times = draw.occurrences or itertools.repeat(0, len(drawn))
            alone = draw._replace(occurrences=None)
            keys = [Key(one, alone, before) for one, before in zip(drawn, times, strict=True)]
            yield keys if self._auto_collation else keys[0]
