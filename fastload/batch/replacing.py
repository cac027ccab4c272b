"""Replace samples that cannot be read: `on_error` of the loader.

Rules:

1. Sizes and order of batches do not change: a replacement takes the position of the failed sample.
2. A replacement depends on the `BatchKey` and the position in the batch, so it is the same for any number of
   workers and after a resume.
3. If the sampler is one of torch's whose indices are known, a replacement is one of its samples. Otherwise a
   replacement is a different sample of the same batch.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

from fastload.batch.failures import FailedSample
from fastload.rng.keys import BatchKey
from fastload.system.notes import add_note, short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAX_ATTEMPTS = 10  # how many replacements are tried if they cannot be read either


class Replacer:
    """Reads samples, and replaces those that cannot be read.

    Args:
        on_error: `"replace"`, or a function that takes a `FailedSample` and returns the sample to use.
        replacements: Indices of possible replacements; empty: the samples of the same batch.
        worker: The worker that reads; None without workers.

    Attributes:
        failed: The samples of this batch that could not be read.
    """

    def __init__(self, on_error: Any, replacements: Sequence[Any], worker: int | None) -> None:
        self._on_error = on_error
        self._replacements = replacements
        self._worker = worker
        self._key = BatchKey(0, 0)
        self._indices: Sequence[Any] = ()
        self.failed: list[FailedSample] = []

    def begin(self, key: BatchKey, indices: Sequence[Any]) -> None:
        """Start a batch of these indices."""
        self._key = key
        self._indices = indices
        self.failed = []

    def replacing(self, get: Callable[[Any], Any], read: Callable[[Any, int], Any]) -> Callable[[Any], Any]:
        """Wrap ``get`` to replace a sample whose ``get`` raises.

        Call the result once for each index of the batch, in order.

        Args:
            get: Returns the sample of an index.
            read: Returns the sample of a different index, with random streams that depend on a number.
        """
        numbers = itertools.count()

        def get_or_replace(index: Any) -> Any:
            number = next(numbers)
            try:
                return get(index)
            except StopIteration:
                raise  # torch treats it as the end of the epoch
            except Exception as error:  # noqa: BLE001  # any error of the user's dataset
                return self._replace(number, error, read)

        return get_or_replace

    def _replace(self, number: int, error: Exception, read: Callable[[Any, int], Any]) -> Any:
        """The sample that replaces an unreadable one; raises ``error`` if no replacement can be read."""
        failed = self._describe(number, error)
        if self._on_error != "replace":
            sample = self._on_error(failed)
            self.failed.append(failed)
            return sample
        for attempt, index in enumerate(self._candidates(number)):
            try:
                # A negative occurrence: the sample draws different numbers than where the sampler chose its
                # index.
                sample = read(index, -1 - number * _MAX_ATTEMPTS - attempt)
            except Exception as other:  # noqa: BLE001  # it cannot be read either
                place = f"sample {short_repr(index)} in its place"
                add_note(error, f"fastload: {place} could not be read: {short_repr(other)}")
                continue
            self.failed.append(self._describe(number, error, index))
            return sample
        add_note(error, 'fastload: on_error="replace" found no readable sample to replace it')
        raise error

    def _describe(self, number: int, error: Exception, replaced_by: Any = None) -> FailedSample:
        return FailedSample.of(
            self._indices[number], error, self._worker, epoch=self._key.epoch, replaced_by=replaced_by
        )

    def _candidates(self, number: int) -> list[Any]:
        # A str as the seed: Random hashes it with SHA-512, with the same result in every process.
        generator = random.Random(",".join(map(str, (*self._key[:3], number))))
        indices = self._replacements  # can be an array or a tensor, if the sampler's indices are one
        if not len(indices):
            indices = [*self._indices[:number], *self._indices[number + 1 :]]
        positions = generator.sample(range(len(indices)), min(len(indices), _MAX_ATTEMPTS))
        return [indices[position] for position in positions]
