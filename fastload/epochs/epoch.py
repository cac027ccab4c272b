"""One epoch of one loader: how it begins or is returned to, and the batches that are received.

`resume` makes it in the consumer's process, and the iterators keep it up to date.
"""

from __future__ import annotations

import collections
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fastload.batch.iterable_state import LOST
from fastload.batch.replacing import BatchId
from fastload.epochs.order import rank_and_order
from fastload.epochs.sampler_state import set_generators, set_samplers
from fastload.errors import ResumeError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterator

    from torch.utils.data import DataLoader

    from fastload.batch.iterable_state import IterableState
    from fastload.epochs.position import Position
    from fastload.rng.sample_streams import StreamCounter, StreamOrigin
    from fastload.system.sent_error import SentError


class Epoch:
    """One epoch of one loader, from before its first draw to the last batch that the caller received.

    Args:
        position: Of the loader before the epoch.
        is_iterable: Whether the dataset is iterable-style.

    Attributes:
        position: Of the loader now; `state_dict()` saves it.
        error: The error of a sampler's state_dict(), as torch sends errors.
        ahead: The arguments of `received` for batches that were fetched and that the caller has not received;
            None if nothing is fetched ahead.
        fetched_origin: With `rng="sample"`: the index of the batch that was fetched last, and the origin of
            its samples' random streams. With `in_order=False` torch's workers fetch in another order than
            that of the indices, and the two do not belong together.
        loads_dataset_states: Whether the states of the dataset come from a state, so that the copies must
            load them.
        stream_counter: Counts the samples' random streams with `rng="sample"`.
    """

    def __init__(self, position: Position, *, is_iterable: bool) -> None:
        self.position = position
        self.error: SentError | None = None
        self.ahead: deque[tuple[Any, int, IterableState | None]] | None = None
        self.fetched_origin: tuple[Any, StreamOrigin] | None = None
        self.loads_dataset_states = False
        self.stream_counter: StreamCounter | None = None
        self._is_iterable = is_iterable
        self._goal: Position | None = None  # the position to return to, until `replay`
        self._is_of_other_rank = False  # whether another rank saved it
        self._default_state: torch.Tensor | None = None  # the user's, which `replay` leaves unchanged
        # With rng="sample": what was counted and not yet fetched.
        self._counted: deque[tuple[Any, StreamOrigin]] = collections.deque()

    def return_to(self, goal: Position, *, is_of_other_rank: bool) -> None:
        """Let `replay` return to a position within an epoch, which this epoch becomes."""
        self.position.iterator_kind = goal.iterator_kind
        self.position.generators, self.position.samplers = goal.generators, goal.samplers
        self._goal, self._is_of_other_rank = goal, is_of_other_rank
        self._default_state = torch.default_generator.get_state()

    def go_on_from(self, goal: Position) -> None:
        """Begin this epoch as the workers of the finished one before would: torch draws no base seed."""
        self.position.iterator_kind = "again"
        self._goal = replace(goal, num_received=0, checksum=(0, 0))

    def count(self, index: Any) -> tuple[Any, StreamOrigin | None]:
        """Count an index from the sampler; return it and the origin of its samples' random streams."""
        if self.stream_counter is None:
            return index, None
        counted = self.stream_counter.count(index)
        self._counted.append(counted)
        return counted

    def batch_id(self, number: int) -> BatchId:
        """What identifies the batch of this number, so that replacements follow from it."""
        return BatchId(self.position.sample_seed, self.position.epoch, number)

    @property
    def num_fetched(self) -> int:
        """How many batches were fetched: the caller has received them, or they are ahead."""
        return self.position.num_received + (0 if self.ahead is None else len(self.ahead))

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
        self.position.is_finished = self.ahead is None

    def received(self, index: Any, worker: int = 0, dataset_state: IterableState | None = None) -> None:
        """Record that the caller receives the batch of this index, and the dataset's state after it."""
        states = self.position.dataset_states
        if states is not None and dataset_state == LOST and self._is_iterable:
            dataset_state = states[worker]  # a stream reads a lost batch again
        self.position.advance(index, worker, dataset_state)

    def choose_base_seed(self, drawn: int) -> int:
        """The base seed: the seed that was just drawn, or the seed of the epoch that is resumed."""
        self.position.base_seed = drawn if self._goal is None else self._goal.base_seed
        return self.position.base_seed

    def replay(self, loader: DataLoader[Any], drawn: Iterator[Any]) -> Iterator[Any]:
        """The iterator over indices: ``drawn``, or, if an epoch is resumed, its indices that are left.

        Raises:
            ResumeError: The sampler gives other indices than before.
        """
        goal, self._goal = self._goal, None
        if goal is None:
            return drawn
        set_generators(loader, self.position.generators)
        set_samplers(loader, self.position.samplers)
        indices: Iterator[Any] = iter(loader._index_sampler)
        self._draw_base_seed(loader)
        if self.position.iterator_kind == "workers":
            indices = iter(loader._index_sampler)  # with workers, torch calls iter() twice
        self._skip(loader, indices, goal)
        if self._default_state is not None:
            has_drawn = goal.num_received or self._is_iterable
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
        is_drawn = self.position.iterator_kind != "again"
        if not is_drawn:
            generator = generator.clone_state()
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        if (seed == self.position.base_seed) is not is_drawn:
            raise ResumeError(
                "the state contradicts itself, or another loader saved it: with "
                f"{self.position.iterator_kind!r} as 'iterator_kind', its generators do not give its "
                "'base_seed': load another checkpoint, or give the loader the same sampler and generator as "
                "before"
            )

    def _skip(self, loader: DataLoader[Any], indices: Iterator[Any], goal: Position) -> None:
        count = goal.num_received
        checked, expected = goal.checksum
        if self._is_iterable:  # torch's sampler for iterable datasets is endless: nothing to check
            self.position.num_received, self.position.checksum = count, (count, expected)
            return
        for _ in range(count):
            try:
                self.received(self.count(next(indices))[0])
            except StopIteration:
                raise ResumeError(
                    f"the epoch to be resumed had at least {count} batches, but the sampler now has "
                    f"{self.position.num_received}: give the loader the same dataset, sampler and batch_size "
                    "as before"
                ) from None
        self._counted.clear()  # the skipped batches are not fetched
        if self._is_of_other_rank:  # its indices are others; `order.check` has compared the rest
            self._expect_own_share(loader, goal)
            return
        if count == checked and self.position.checksum[1] != expected:
            raise ResumeError(
                f"the sampler gave other indices for the first {count} batches than in the epoch to be "
                "resumed: give the loader the same dataset, sampler and batch_size as before; a sampler of "
                "your own must draw from a torch.Generator in its attribute `generator`, or from torch's "
                "default generator, or have state_dict() and load_state_dict()"
            )

    def _expect_own_share(self, loader: DataLoader[Any], goal: Position) -> None:
        """Check that a sampler with the state of another rank does not give that rank's indices."""
        rank, order = rank_and_order(loader)
        has_state = any(not place.endswith(".epoch") for place in goal.samplers)
        if (
            order.num_ranks is not None
            and has_state
            and goal.num_received
            and self.position.checksum == goal.checksum
        ):
            raise ResumeError(
                f"the sampler of rank {rank} gives the indices of rank {goal.rank}, which saved the "
                "state: save and load a state for each rank, or leave the rank out of the sampler's "
                "state_dict()"
            )
