"""Keys of random streams: what the numbers that a sample or a batch draws depend on.

With `seeding="sample"`, the numbers of a sample depend on the seed, the epoch, the index, and how often that
index came before in this epoch (its occurrence). None of them depends on time or on the worker that reads the
sample. The parent counts occurrences in the order of the sampler; `sample_rng` sets the generators where the
sample is fetched. This is pure code: no I/O, no global state.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

STREAM_BYTES = 64  # the size of one BLAKE2b digest
_MAX_COUNTED = 1 << 28  # samples


class SampleKey(NamedTuple):
    """Identifies one access to a sample in a run.

    Attributes:
        seed: Of the run, 64 bits.
        epoch: The number of the epoch.
        index: From the sampler.
        occurrence: How often the index came before in this epoch. Negative: it was not the sampler's choice.
    """

    seed: int
    epoch: int
    index: Any
    occurrence: int

    def digest(self) -> bytes:
        """64 bytes from which all generators are set for the sample: BLAKE2b, RFC 7693."""
        index = self.index
        # An int is the usual index: this saves a call.
        name = b"i%d" % index if type(index) is int else index_bytes(index)
        text = b"%d,%d,%d,%b" % (self.seed, self.epoch, self.occurrence, name)
        return hashlib.blake2b(text, digest_size=STREAM_BYTES).digest()


class BatchKey(NamedTuple):
    """Identifies one batch of a run.

    Attributes:
        seed: Of the run. The replacement of an unreadable sample depends on this and the next two.
        epoch: The number of the epoch.
        number: Of the batch in its epoch.
        base_seed: Drawn at the beginning of the epoch.
        rank: That the loader reads for; 0 if it is unknown.
        occurrences: With `seeding="sample"`: how often each index of the batch came before in this epoch;
            empty if none did. None: random streams do not depend on the samples.
    """

    seed: int
    epoch: int
    number: int = 0
    base_seed: int = 0
    rank: int = 0
    occurrences: tuple[int, ...] | None = None

    def of_samples(self, indices: Iterable[Any]) -> Iterator[SampleKey]:
        """The keys of the samples of the batch's indices, in order."""
        occurrences = self.occurrences or itertools.repeat(0)
        return map(SampleKey, itertools.repeat(self.seed), itertools.repeat(self.epoch), indices, occurrences)


def occurrence_counter(
    num_samples: int, *, auto_collation: bool
) -> Callable[[Any], tuple[Any, tuple[int, ...]]]:
    """A function that counts how often each index comes in one epoch; call it for each batch, in order.

    It takes what the sampler returned, and returns it, as a list if it was an iterator, and how often each of
    its indices came before; empty if none did. It raises TypeError for an index that has no stable digest.

    Args:
        num_samples: The size of the dataset; 0 if unknown. The counts take 4 bytes for each sample; beyond a
            gibibyte, which is for datasets that make samples up, only for those that come.
        auto_collation: Whether the sampler returns lists of indices.
    """
    num_samples = min(num_samples, _MAX_COUNTED)
    counts = np.zeros(num_samples, np.uint32).data  # pages take memory once they are written
    counts_of_others: dict[bytes, int] = {}

    def count(index: Any) -> tuple[Any, tuple[int, ...]]:
        if auto_collation and not hasattr(index, "__len__"):
            index = list(index)
        occurrences = []
        for item in index if auto_collation else (index,):
            number = item if type(item) is int else as_int(item)
            if number is not None and 0 <= number < num_samples:
                occurrence = counts[number]
                counts[number] = occurrence + 1
            else:
                name = index_bytes(item)
                occurrence = counts_of_others.get(name, 0)
                counts_of_others[name] = occurrence + 1
            occurrences.append(occurrence)
        return index, tuple(occurrences) if any(occurrences) else ()

    return count


def as_int(index: Any) -> int | None:
    """An index of torch's, numpy's or Python's integer types as an int; None for any other."""
    try:
        return operator.index(index)
    except TypeError:
        return None


def index_bytes(index: Any) -> bytes:
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
        return b"(%b)" % b",".join([index_bytes(part) for part in index])
    raise TypeError(
        f'seeding="sample" derives random streams from indices: integers, strings, and tuples of these; but '
        f"the sampler returned {index!r:.100}, a {type(index).__name__}. Use other indices, or "
        'seeding="worker"'
    )
