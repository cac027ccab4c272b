"""Random numbers for whole batches: what a batch transform draws for each image of a batch.

The process that transforms a batch draws them, with NumPy, for all images in one call. Rules:

1. Each image has a key of 64 bits. With ``seeding="sample"`` the key depends on the seed, the epoch, the
   sample's index and its occurrence; with ``seeding="worker"`` on the loader's base seed, the epoch, the
   rank, the number of the batch and the image's position in it. Keys depend on neither time nor workers, so a
   transform draws the same numbers in a worker and on the device.
2. The generator has no state: draw i of an image is a function of its key and of i. It is SplitMix64 (Steele,
   Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), with each key as a starting
   point. NumPy's own counter-based generator, Philox, takes one key at a time.
3. Each call of `BatchDraws.uniforms` for one batch draws from its own random stream. So two transforms, or
   two calls of one transform, draw different numbers, in the order of the calls.
4. Outside a loader, each call is seeded by a draw from torch's default generator.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.rng.keys import as_int, index_bytes
from fastload.system.cached_property import cached_property

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from fastload.rng.keys import BatchKey

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment: 2**64 divided by the golden ratio, odd
# The calls that a device transform makes after a batch transform are counted from here: other streams.
AFTER_BATCH_TRANSFORM = 1 << 20


class BatchDraws:
    """The random streams of the images of one batch.

    Args:
        key: Of the batch. If it has occurrences, the streams depend on the samples: the seed, the epoch, the
            indices and their occurrences. Otherwise they depend on the other values of the key. None: outside
            a loader; the streams are seeded by a draw from torch's default generator.
        indices: The sampler's indices of the samples.
        first_call: The number of the first call of `uniforms`.
    """

    def __init__(
        self, key: BatchKey | None = None, indices: Sequence[Any] = (), *, first_call: int = 0
    ) -> None:
        self._num_calls = itertools.count(first_call)
        self._indices: Sequence[Any] | None = None
        self._occurrences: tuple[int, ...] = ()
        if key is None:
            drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
            self._words: tuple[int, ...] = (int(drawn.item()),)
        elif key.occurrences is None:
            self._words = key.base_seed, key.epoch, key.rank, key.number
        else:
            self._words = key.seed, key.epoch
            self._indices, self._occurrences = indices, key.occurrences

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

    @cached_property
    def _keys(self) -> NDArray[np.uint64]:
        base = _digest(repr(self._words).encode())
        if self._indices is None:
            return base
        occurrences = np.array(self._occurrences or 0, dtype=np.uint64)
        return _mixed(_mixed(base ^ _index_words(self._indices)) + occurrences * _GAMMA)


def draw_uniforms(num_images: int, num_draws: int) -> NDArray[np.float64]:
    """``(num_draws, num_images)`` numbers in [0, 1) for the images of the batch being transformed."""
    draws = _current.draws
    return (BatchDraws() if draws is None else draws).uniforms(num_images, num_draws)


@contextlib.contextmanager
def drawing_from(draws: BatchDraws) -> Iterator[None]:
    """A block in which `draw_uniforms` of this thread draws from ``draws``."""
    outer, _current.draws = _current.draws, draws
    try:
        yield
    finally:
        _current.draws = outer


class _Current(threading.local):
    """The batch that this thread is transforming."""

    draws: BatchDraws | None = None


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
    return int(_digest(index_bytes(index))[0])
