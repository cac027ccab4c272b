"""One epoch of one loader: the seeds and states that determine its order, and the batches received so far.

`resume` makes it in the consumer's process, and the iterators keep it up to date.
"""

from __future__ import annotations

import collections
import itertools
import marshal
import re
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.batch.iterable_state import LOST
from fastload.epochs.order import rank_and_order
from fastload.epochs.sampler_state import set_generators, set_samplers
from fastload.errors import ResumeError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterator

    from torch.utils.data import DataLoader

    from fastload.batch.iterable_state import IterableState
    from fastload.epochs.saved_state import SavedState
    from fastload.rng.sample_streams import StreamCounter, StreamOrigin
    from fastload.system.sent_error import SentError

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass
class Epoch:
    """One epoch of one loader, from before its first draw to the last batch that the caller received.

    Attributes:
        number: The number that set_epoch() gave, or else the previous number plus one.
        iterator_kind: The iterator that torch began it with, which decides on the order of torch's draws:
            `"local"` (no workers), `"workers"`, or `"again"` (persistent workers); None: the epoch has not
            begun.
        generators: States of the generators before anything was drawn, by place (see `sampler_state`).
        samplers: States of the samplers, as `sampler_state.samplers_of` returns them.
        base_seed: The seed from which torch seeds its workers.
        sample_seed: The seed from which `rng="sample"` seeds each sample.
        num_received: How many batches the caller has received.
        checksum: The checksum of their indices.
        is_finished: Whether the caller has seen the end.
        obstacle: Why this epoch cannot be resumed in the middle; None if it can.
        dataset_states: For an iterable dataset, and for a map-style dataset with a state_dict(): the state of
            each worker's copy after its last batch that the caller received.
        next_worker: The worker whose batch is due next.
        error: The error of a sampler's state_dict(), as torch sends errors.
        ahead: Batches that were fetched and that the caller has not received; None if nothing is fetched
            ahead.
        fetched_origin: With `rng="sample"`: the index of the batch that was fetched last, and the origin of
            its samples' random streams. With `in_order=False` torch's workers fetch in another order than
            that of the indices, and the two do not belong together.
        is_iterable: Whether the dataset is iterable-style.
        loads_dataset_states: Whether `dataset_states` come from a state, so that the copies must load them.
    """

    number: int
    iterator_kind: str | None
    generators: dict[str, bytes]
    samplers: dict[str, bytes]
    base_seed: int = 0
    sample_seed: int = 0
    num_received: int = 0
    checksum: int = 0
    is_finished: bool = False
    obstacle: str | None = None
    dataset_states: list[IterableState] | None = None
    next_worker: int = 0
    error: SentError | None = None
    ahead: deque[tuple[Any, int, IterableState | None]] | None = None
    fetched_origin: tuple[Any, StreamOrigin] | None = None
    is_iterable: bool = False
    loads_dataset_states: bool = False
    _is_of_other_rank: bool = field(default=False, repr=False)  # whether another rank saved `_replayed`
    _replayed: SavedState | None = field(default=None, repr=False)
    _default_state: torch.Tensor | None = field(default=None, repr=False)
    _stream_counter: StreamCounter | None = field(default=None, repr=False)  # with rng="sample"
    # With rng="sample": what was counted and not yet fetched.
    _counted: deque[tuple[Any, StreamOrigin]] = field(default_factory=collections.deque, repr=False)

    def count(self, index: Any) -> tuple[Any, StreamOrigin | None]:
        """Count an index from the sampler; return it and the origin of its samples' random streams."""
        if self._stream_counter is None:
            return index, None
        counted = self._stream_counter.count(index)
        self._counted.append(counted)
        return counted

    @property
    def num_fetched(self) -> int:
        """How many batches were fetched: the caller has received them, or they are ahead."""
        return self.num_received + (0 if self.ahead is None else len(self.ahead))

    def fetched(self, index: Any, worker: int = 0, dataset_state: IterableState | None = None) -> None:
        """Record that a batch was fetched: the caller gets it now, or later if `ahead` is set."""
        if self._counted:
            self.fetched_origin = self._counted.popleft()
        if self.ahead is None:
            self.received(index, worker, dataset_state)
        else:
            self.ahead.append((index, worker, dataset_state))

    def ended(self) -> None:
        """Record the end. An iterator that fetches ahead records it itself when the caller sees it."""
        self.is_finished = self.ahead is None

    def received(self, index: Any, worker: int = 0, dataset_state: IterableState | None = None) -> None:
        """Record that the caller receives the batch of this index, and the dataset's state after it."""
        self.num_received += 1
        self.checksum = _checksum(index, self.checksum)
        if self.dataset_states is not None and dataset_state is not None:
            if dataset_state != LOST or not self.is_iterable:  # a stream reads a lost batch again
                self.dataset_states[worker] = dataset_state
            self.next_worker = (worker + 1) % len(self.dataset_states)

    def choose_base_seed(self, drawn: int) -> int:
        """The base seed: the seed that was just drawn, or the seed of the epoch that is resumed."""
        self.base_seed = drawn if self._replayed is None else self._replayed.base_seed
        return self.base_seed

    def replay(self, loader: DataLoader[Any], drawn: Iterator[Any]) -> Iterator[Any]:
        """The iterator over indices: ``drawn``, or, if an epoch is resumed, its indices that are left.

        Raises:
            ResumeError: The sampler gives other indices than before.
        """
        state = self._replayed
        if state is None:
            return drawn
        self._replayed = None
        set_generators(loader, self.generators)
        set_samplers(loader, self.samplers)
        indices: Iterator[Any] = iter(loader._index_sampler)
        self._draw_base_seed(loader)
        if self.iterator_kind == "workers":
            indices = iter(loader._index_sampler)  # with workers, torch calls iter() twice
        self._skip(loader, indices, state)
        if self._default_state is not None:
            has_drawn = state.num_yielded or self.is_iterable
            if not has_drawn and not torch.equal(torch.default_generator.get_state(), self._default_state):
                # A sampler may draw its order when the first index is requested. This must happen before
                # torch's default generator is set back to the user's state.
                indices = itertools.chain(list(itertools.islice(indices, 1)), indices)
            torch.default_generator.set_state(self._default_state)
        return indices

    def _draw_base_seed(self, loader: DataLoader[Any]) -> None:
        """Draw the base seed as torch did when the epoch began; persistent workers kept the one before.

        Raises:
            ResumeError: The base seed of the state was not drawn so.
        """
        generator = torch.default_generator if loader.generator is None else loader.generator
        is_drawn = self.iterator_kind != "again"
        if not is_drawn:
            generator = generator.clone_state()
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        if (seed == self.base_seed) is not is_drawn:
            raise ResumeError(
                f"the state contradicts itself, or another loader saved it: with {self.iterator_kind!r} as "
                "'beginning', its generators do not give its 'base_seed': load another checkpoint, or give "
                "the loader the same sampler and generator as before"
            )

    def _skip(self, loader: DataLoader[Any], indices: Iterator[Any], state: SavedState) -> None:
        count = state.num_yielded
        checked, expected = state.checksum
        if self.is_iterable:  # torch's sampler for iterable datasets is endless: nothing to check
            self.num_received, self.checksum = count, expected
            return
        for _ in range(count):
            try:
                self.received(self.count(next(indices))[0])
            except StopIteration:
                raise ResumeError(
                    f"the epoch to be resumed had at least {count} batches, but the sampler now has "
                    f"{self.num_received}: give the loader the same dataset, sampler and batch_size as before"
                ) from None
        self._counted.clear()  # the skipped batches are not fetched
        if self._is_of_other_rank:  # its indices are others; `order.check` has compared the rest
            self._expect_own_share(loader, state)
            return
        if count == checked and self.checksum != expected:
            raise ResumeError(
                f"the sampler gave other indices for the first {count} batches than in the epoch to be "
                "resumed: give the loader the same dataset, sampler and batch_size as before; a sampler of "
                "your own must draw from a torch.Generator in its attribute `generator`, or from torch's "
                "default generator, or have state_dict() and load_state_dict()"
            )

    def _expect_own_share(self, loader: DataLoader[Any], state: SavedState) -> None:
        """Check that a sampler with the state of another rank does not give that rank's indices."""
        rank, order = rank_and_order(loader)
        has_state = any(not place.endswith(".epoch") for place in state.samplers)
        if (
            order.num_ranks is not None
            and has_state
            and state.num_yielded
            and (self.num_received, self.checksum) == state.checksum
        ):
            raise ResumeError(
                f"the sampler of rank {rank} gives the indices of rank {state.rank}, which saved the "
                "state: save and load a state for each rank, or leave the rank out of the sampler's "
                "state_dict()"
            )


def _checksum(index: Any, checksum: int) -> int:
    """The checksum after one more index or list of indices; the same in every process."""
    try:
        # Version 2 writes the same bytes for equal values, however many references they have.
        return zlib.crc32(marshal.dumps(index, 2), checksum)
    except ValueError:  # the index contains types that are not built-in
        pass
    try:
        numbers = np.asarray(index, np.int64)
    except (TypeError, ValueError, OverflowError):  # keys of another kind
        return zlib.crc32(_text(index).encode("utf-8", "surrogatepass"), checksum)
    return zlib.crc32(numbers.tobytes(), checksum)


def _text(index: Any) -> str:
    """The repr of a key without memory addresses, which differ between processes."""
    try:
        return _ADDRESS.sub("", repr(index))
    except Exception:  # noqa: BLE001  # the index may be of a class of the user's
        return type(index).__name__
