"""Which sample a random stream belongs to: `rng="sample"` as the parent sees it.

A draw is one index that the sampler gave. Its random streams follow from four things that do not depend on
who reads the sample or when: the seed, the epoch, the index, and how often that index came before in this
epoch. The parent counts, in the order of the sampler; the rest happens where the sample is fetched
(`sample_rng`). Pure, but for the seed: no I/O, no global state.
"""

from __future__ import annotations

import hashlib
import operator
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import IterableDataset, MapDataPipe, Subset

if TYPE_CHECKING:
    from collections.abc import Iterable

STREAM_BYTES = 64  # what BLAKE2b gives in one go


class Draw(NamedTuple):
    """What the streams of one batch follow from, beside its indices."""

    seed: int
    epoch: int
    occurrences: tuple[int, ...] | None  # for each index how often it came before; None: never, all of them


class Draws:
    """The draws of one epoch; counts how often each index comes.

    Args:
        seed: Of the run: 64 bits.
        epoch: Its number.
        num_samples: Of the dataset; 0 if that is unknown. Takes 4 bytes a sample.
        auto_collation: Whether the sampler gives lists of indices.
    """

    def __init__(self, seed: int, epoch: int, num_samples: int, *, auto_collation: bool) -> None:
        self._seed = seed
        self._epoch = epoch
        self._auto_collation = auto_collation
        self._times = array("I", bytes(4 * num_samples))
        self._times_of_others: dict[bytes, int] = {}

    def count(self, index: Any) -> tuple[Any, Draw]:
        """The next index of the sampler, as a list if it was an iterator, and its draw.

        Raises:
            TypeError: An index has no stable digest.
        """
        if not self._auto_collation:
            occurrences = self._count_all((index,))
        else:
            if not hasattr(index, "__len__"):
                index = list(index)
            occurrences = self._count_all(index)
        return index, Draw(self._seed, self._epoch, occurrences if any(occurrences) else None)

    def _count_all(self, indices: Iterable[Any]) -> tuple[int, ...]:
        times, length = self._times, len(self._times)
        occurrences = []
        for index in indices:
            number = index if type(index) is int else as_int(index)
            if number is not None and 0 <= number < length:
                occurrence = times[number]
                times[number] = occurrence + 1
            else:
                key = index_key(index)
                occurrence = self._times_of_others.get(key, 0)
                self._times_of_others[key] = occurrence + 1
            occurrences.append(occurrence)
        return tuple(occurrences)


def as_int(index: Any) -> int | None:
    """An index of torch's, numpy's or Python's integer types as an int; None for any other."""
    try:
        return operator.index(index)
    except TypeError:
        return None


def index_key(index: Any) -> bytes:
    """Bytes that are the same for an index in every process and every run, and differ between indices.

    Raises:
        TypeError: It is neither an integer, a string, nor a tuple of these.
    """
    number = as_int(index)
    if number is not None:
        return b"i%d" % number
    if isinstance(index, str):
        text = index.encode("utf-8", "surrogatepass")
        return b"s%d:%b" % (len(text), text)
    if isinstance(index, tuple):
        return b"(%b)" % b",".join([index_key(part) for part in index])
    raise TypeError(
        f'rng="sample" derives random streams from indices: integers, strings, and tuples of these; the '
        f'sampler gave {index!r:.100}, a {type(index).__name__}. Give another index, or use rng="worker"'
    )


def stream_bytes(draw: Draw, index: Any, occurrence: int) -> bytes:
    """64 bytes from which all generators are set for one sample: BLAKE2b, RFC 7693."""
    # An int, the usual case, at once.
    key = b"i%d" % index if type(index) is int else index_key(index)
    text = b"%d,%d,%d,%b" % (draw.seed, draw.epoch, occurrence, key)
    return hashlib.blake2b(text, digest_size=STREAM_BYTES).digest()


def check_dataset(dataset: Any, *, auto_collation: bool) -> None:
    """That samples of this dataset are fetched one by one, by their indices.

    Raises:
        ValueError: They are not.
    """
    if isinstance(dataset, (IterableDataset, MapDataPipe)):
        raise ValueError(
            f'rng="sample" derives random streams from indices, and a {type(dataset).__name__} '
            'has none: use a map-style dataset, or rng="worker"'
        )
    inner = dataset
    while isinstance(inner, Subset) and _is_plain_subset(type(inner)):
        inner = inner.dataset  # torch's own __getitems__ asks for sample after sample; so do we
    if auto_collation and getattr(inner, "__getitems__", None):
        raise ValueError(
            f'rng="sample" sets the generators before each sample, and {type(inner).__name__}.__getitems__ '
            'fetches many at once: remove it, use a batch_sampler with batch_size=None, or use rng="worker"'
        )


def _is_plain_subset(cls: type[Subset[Any]]) -> bool:
    return cls.__getitem__ is Subset.__getitem__ and cls.__getitems__ is Subset.__getitems__
