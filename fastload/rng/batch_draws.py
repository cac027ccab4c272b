"""Random numbers for whole batches: what a batch transform draws for each image of a batch.

The process that transforms a batch draws them, with NumPy, for all images in one call. Rules:

1. Each image has a key of 64 bits. With ``seeding="sample"`` the key depends on the seed, the epoch, the
   sample's index and its occurrence; with ``seeding="worker"`` on the loader's base seed, the epoch, the
   rank, the number of the batch and the image's position in it. Keys depend on neither time nor workers, so a
   transform draws the same numbers in a worker and on the device.
2. The generator has no state: draw i of an image is a function of its key and of i. It is SplitMix64 (Steele,
   Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), with each key as a starting
   point. NumPy's own counter-based generator, Philox, takes one key at a time.
3. Each call of `BatchStreams.uniforms` for one batch draws from its own random stream. So two transforms, or
   two calls of one transform, draw different numbers, in the order of the calls.
4. Outside a loader, each call is seeded by a draw from torch's default generator.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fastload.rng.keys import as_int, index_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from fastload.rng.keys import StreamOrigin

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment: 2**64 divided by the golden ratio, odd


# The calls that a device transform makes after a batch transform are counted from here: other streams.
AFTER_BATCH_TRANSFORM = 1 << 20


class BatchId(NamedTuple):
    """Identifies one batch of a run.

    Attributes:
        seed: Of the run. The replacement of an unreadable sample depends on this and the next two.
        epoch: The number of the epoch.
        number: Of the batch in its epoch.
        base_seed: Drawn at the beginning of the epoch.
        rank: That the loader reads for; 0 if it is unknown.
    """

    seed: int
    epoch: int
    number: int
    base_seed: int
    rank: int


class BatchStreams:
    """The random streams of the images of one batch.

    Args:
        words: Integers that determine the keys of all images; their number differs by kind.
        indices: The sampler's indices of the samples; None if keys depend only on positions.
        occurrences: How often each index came before in the epoch; None: 0 for all of them.
        first_call: The number of the first call of `uniforms`.
    """

    def __init__(
        self,
        words: tuple[int, ...],
        indices: Sequence[Any] | None = None,
        occurrences: Sequence[int] | None = None,
        first_call: int = 0,
    ) -> None:
        self._words = words
        self._indices = indices
        self._occurrences = occurrences
        self._num_calls = itertools.count(first_call)

    @classmethod
    def of_samples(cls, origin: StreamOrigin, indices: Sequence[Any], *, first_call: int = 0) -> BatchStreams:
        """Streams that depend on the samples: for ``seeding="sample"``."""
        return cls((origin.seed, origin.epoch), indices, origin.occurrences, first_call)

    @classmethod
    def of_batch(cls, batch_id: BatchId, *, first_call: int = 0) -> BatchStreams:
        """Streams that depend on the batch's number in its epoch: for ``seeding="worker"``."""
        _, epoch, number, base_seed, rank = batch_id
        return cls((base_seed, epoch, rank, number), first_call=first_call)

    @classmethod
    def of_call(cls) -> BatchStreams:
        """Streams for one call outside a loader, seeded by a draw from torch's default generator."""
        return cls((int(torch.empty((), dtype=torch.int64, device="cpu").random_().item()),))

    def uniforms(self, num_images: int, num_draws: int) -> NDArray[np.float64]:
        """``(num_draws, num_images)`` numbers in [0, 1), from the next random stream of each image.

        If the batch has as many images as samples, an image has the key of the sample at its position.
        Otherwise an image's key depends on all samples and on its position.
        """
        keys = self._keys
        if self._indices is None or len(keys) != num_images:
            keys = _mixed(_digest(keys.tobytes()) + np.arange(num_images, dtype=np.uint64) * _GAMMA)
        counters = np.arange(1, num_draws + 1, dtype=np.uint64) + np.uint64(next(self._num_calls) << 32)
        bits = _mixed(keys + (counters * _GAMMA)[:, None])
        numbers = (bits >> np.uint64(11)).astype(np.float64)
        numbers *= 2.0**-53
        return numbers

    @functools.cached_property
    def _keys(self) -> NDArray[np.uint64]:
        base = _digest(repr(self._words).encode())
        if self._indices is None:
            return base
        occurrences = np.array(self._occurrences or 0, dtype=np.uint64)
        return _mixed(_mixed(base ^ _index_words(self._indices)) + occurrences * _GAMMA)


def draw_uniforms(num_images: int, num_draws: int) -> NDArray[np.float64]:
    """``(num_draws, num_images)`` numbers in [0, 1) for the images of the batch being transformed."""
    streams = _current.streams
    return (BatchStreams.of_call() if streams is None else streams).uniforms(num_images, num_draws)


@contextlib.contextmanager
def drawing_from(streams: BatchStreams) -> Iterator[None]:
    """A block in which `draw_uniforms` of this thread draws from ``streams``."""
    outer, _current.streams = _current.streams, streams
    try:
        yield
    finally:
        _current.streams = outer


class _Current(threading.local):
    """The batch that this thread is transforming."""

    streams: BatchStreams | None = None


_current = _Current()


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64, which maps 64 bits one to one; its input must not be a scalar."""
    bits = bits ^ (bits >> np.uint64(30))
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def _digest(data: bytes) -> NDArray[np.uint64]:
    # An array: NumPy warns about overflowing scalars, but overflow is wanted here.
    return np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint64)


def _index_words(indices: Sequence[Any]) -> NDArray[np.uint64]:
    """64 bits for each index: an integer itself, and a digest of any other index."""
    if set(map(type, indices)) <= {int}:
        with contextlib.suppress(OverflowError):
            return np.array(indices, dtype=np.int64).view(np.uint64)
    return np.array([_index_word(index) for index in indices], dtype=np.uint64)


def _index_word(index: Any) -> int:
    number = as_int(index)
    if number is not None and -(1 << 63) <= number < 1 << 63:
        return number % (1 << 64)
    return int(_digest(index_key(index))[0])
