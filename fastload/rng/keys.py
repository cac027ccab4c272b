"""Derive the random streams of each sample from its index: the parent's part of `seeding="sample"`.

The random streams of a sample depend on four values: the seed, the epoch, the index, and how often that index
came before in this epoch (its occurrence). None of them depends on time or on the worker that reads the
sample. The parent counts occurrences in the order of the sampler; `sample_rng` sets the generators where the
sample is fetched. This is pure code: no I/O, no global state.
"""

from __future__ import annotations

import hashlib
import operator
from array import array
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, MapDataPipe, Subset

STREAM_BYTES = 64  # the size of one BLAKE2b digest


class StreamOrigin(NamedTuple):
    """The origin of the random streams of one batch, in addition to its indices."""

    seed: int
    epoch: int
    occurrences: tuple[int, ...] | None  # how often each index came before; None: 0 for all of them


class StreamCounter:
    """Counts how often each index comes in one epoch.

    Args:
        seed: The seed of the run: 64 bits.
        epoch: The number of the epoch.
        num_samples: The size of the dataset; 0 if unknown. The counter takes 4 bytes for each sample.
        auto_collation: Whether the sampler returns lists of indices.
    """

    def __init__(self, seed: int, epoch: int, num_samples: int, *, auto_collation: bool) -> None:
        self._seed = seed
        self._epoch = epoch
        self._auto_collation = auto_collation
        self._times = array("I", bytes(4 * num_samples))
        self._times_of_others: dict[bytes, int] = {}

    def count(self, index: Any) -> tuple[Any, StreamOrigin]:
        """The next index of the sampler, as a list if it was an iterator, and its origin.

        Raises:
            TypeError: An index has no stable digest.
        """
        if self._auto_collation and not hasattr(index, "__len__"):
            index = list(index)
        times, length = self._times, len(self._times)
        occurrences = []
        for one in index if self._auto_collation else (index,):
            number = one if type(one) is int else as_int(one)
            if number is not None and 0 <= number < length:
                occurrence = times[number]
                times[number] = occurrence + 1
            else:
                key = index_key(one)
                occurrence = self._times_of_others.get(key, 0)
                self._times_of_others[key] = occurrence + 1
            occurrences.append(occurrence)
        return index, StreamOrigin(self._seed, self._epoch, tuple(occurrences) if any(occurrences) else None)


def as_int(index: Any) -> int | None:
    """An index of torch's, numpy's or Python's integer types as an int; None for any other."""
    try:
        return operator.index(index)
    except TypeError:
        return None


def index_key(index: Any) -> bytes:
    """Bytes that are the same for an index in every process and every run, and differ between indices.

    Raises:
        TypeError: The index is neither an integer, a string, nor a tuple of these.
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
        f'seeding="sample" derives random streams from indices: integers, strings, and tuples of these; but '
        f"the sampler returned {index!r:.100}, a {type(index).__name__}. Use other indices, or "
        'seeding="worker"'
    )


def stream_bytes(origin: StreamOrigin, index: Any, occurrence: int) -> bytes:
    """64 bytes from which all generators are set for one sample: BLAKE2b, RFC 7693."""
    # An int is the usual index: this saves a call.
    key = b"i%d" % index if type(index) is int else index_key(index)
    text = b"%d,%d,%d,%b" % (origin.seed, origin.epoch, occurrence, key)
    return hashlib.blake2b(text, digest_size=STREAM_BYTES).digest()


def check_dataset(dataset: Any, *, auto_collation: bool) -> None:
    """Check that samples of this dataset are fetched one by one, by their indices.

    Raises:
        ValueError: The dataset is iterable-style, or fetches many samples at once.
    """
    if isinstance(dataset, (IterableDataset, MapDataPipe)):
        raise ValueError(
            f'seeding="sample" derives random streams from indices, but a {type(dataset).__name__} '
            'has none: use a map-style dataset, or seeding="worker"'
        )
    inner = dataset
    while isinstance(inner, Subset) and _is_plain_subset(type(inner)):
        inner = inner.dataset  # torch's Subset.__getitems__ reads sample after sample, as fastload does
    if auto_collation and getattr(inner, "__getitems__", None):
        raise ValueError(
            f'seeding="sample" seeds before each sample, but {type(inner).__name__}.__getitems__ fetches '
            "many at once: remove that method, use a batch_sampler with batch_size=None, or use "
            'seeding="worker"'
        )


def _is_plain_subset(cls: type[Subset[Any]]) -> bool:
    return cls.__getitem__ is Subset.__getitem__ and cls.__getitems__ is Subset.__getitems__
