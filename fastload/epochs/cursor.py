"""The position in an epoch: an `EpochCursor` is advanced with each batch, saved, and loaded again."""

from __future__ import annotations

import dataclasses
import itertools
import marshal
import re
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.batch.dataset_state import LOST, DatasetState
from fastload.epochs.sampler_state import OrderSources, ShardingFacts, rank_and_facts
from fastload.errors import ResumeError
from fastload.rng.keys import BatchKey
from fastload.system.torch_private import index_sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.data import DataLoader

    from fastload.system.remote_error import RemoteError

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SAME = "the same dataset, sampler and batch_size as before"
_ALL_CHECKED, _SOME_CHECKED = 32, 8  # see `EpochCursor.checks_some`


@dataclass(eq=False)
class EpochCursor:
    """The beginning of one epoch of one loader, and the batches that the caller has received since.

    ::

        load_state_dict()               iter(loader)
               |                             |
               v                             v
            LOADED --- iter(loader) ---->  BEGUN <-------------------+
                       resume_at()           |                       |
                                             | replay(): draws the   |
                                             | order, skips batches  |
                                             v received before       |
                          +------------->  WITHIN                    |
                          |                |    |                    |
                          +-- advance() ---+    | receive_end()      |
                                                v                    |
                                            FINISHED --- iter(loader): a new cursor

    A loaded cursor is read from a dict (`saved_cursor`) and never advanced: `iter(loader)` begins a new
    cursor, which takes the place of the loaded one by `resume_at`, or begins the epoch after it.
    `state_dict()` saves a cursor in any of these states. A cursor counts the batches that the caller has
    received, not those that workers have fetched ahead.

    The first group of fields is saved, the second one is not.

    Attributes:
        epoch: The number that set_epoch() gave, or else the previous number plus one.
        iterator_kind: The iterator that torch began the epoch with, which determines the order of torch's
            draws: `"local"` (no workers), `"workers"`, or `"again"` (persistent workers); None: no epoch has
            begun.
        generators: States of the generators before anything was drawn, by place (see `sampler_state`).
        samplers: States of the samplers, as `OrderSources.sampler_states` returns them, pickled by this
            process.
        base_seed: The seed from which torch seeds its workers.
        sample_seed: The seed from which `seeding="sample"` seeds each sample.
        num_received: How many batches of the epoch the caller has received.
        checksum: How many lists of indices the checksum covers, and the checksum.
        checks_some: Whether it covers some indices of each long list. This is enough where samplers of torch
            draw all of them from one seed, and takes an eighth of the time.
        is_finished: Whether the caller has seen the end of the epoch.
        why_unresumable: Why the epoch cannot be resumed in the middle; None if it can.
        dataset_states: For an iterable dataset, and for a map-style dataset with a `state_dict()`: the state
            of each worker's copy after its last batch that the caller received.
        next_worker: The worker whose batch is due next.
        rank: The rank that the loader reads for; None: unknown. While an epoch runs, it is set only for
            transforms of batches.
        sharding: The facts about the order that are the same on every rank.
        is_iterable: Whether the dataset is iterable-style.
        error: The error of a sampler's state_dict(): it fails no batch, but `state_dict()` of the loader.
        ahead: The arguments of `advance` for batches that were fetched, and that the caller has not received:
            they are prefetched, or an error came instead of them.
        has_ended: Whether no batch is left to be fetched.
        fetched_number: The number of the last fetched batch. It is a guess where torch's own workers fetch
            with `in_order=False`.
        fetched_key: With `seeding="sample"`: its index, and its key; None where the number is a guess.
        sampler_iter: The sampler's iterator in a resumed epoch, which `replay` can wrap.
        loads_dataset_states: Whether the states of the dataset come from a loaded state, so the copies must
            load them.
        count_occurrences: With `seeding="sample"`: an `occurrence_counter`.
    """

    epoch: int
    iterator_kind: str | None = None
    generators: dict[str, bytes] = field(default_factory=dict)
    samplers: dict[str, bytes] = field(default_factory=dict)
    base_seed: int = 0
    sample_seed: int = 0
    num_received: int = 0
    checksum: tuple[int, int] = (0, 0)
    checks_some: bool = False
    is_finished: bool = False
    why_unresumable: str | None = None
    dataset_states: list[DatasetState] | None = None
    next_worker: int = 0
    rank: int | None = None
    sharding: ShardingFacts = ShardingFacts()  # noqa: RUF009

    is_iterable: bool = field(init=False, default=False)
    error: RemoteError | None = field(init=False, default=None)
    ahead: deque[tuple[Any, int, DatasetState | None]] = field(init=False, default_factory=deque)
    has_ended: bool = field(init=False, default=False)
    fetched_number: int = field(init=False, default=0)
    fetched_key: tuple[Any, BatchKey] | None = field(init=False, default=None)
    sampler_iter: Iterator[Any] | None = field(init=False, default=None)
    loads_dataset_states: bool = field(init=False, default=False)
    count_occurrences: Callable[[Any], tuple[Any, tuple[int, ...]]] | None = field(init=False, default=None)
    # The loaded cursor that `replay` continues from, whether another rank saved it, and the user's state of
    # torch's default generator, which `replay` leaves unchanged.
    _loaded: EpochCursor | None = field(init=False, default=None)
    _is_of_other_rank: bool = field(init=False, default=False)
    _default_state: torch.Tensor | None = field(init=False, default=None)
    # With seeding="sample": what was counted and not yet fetched, by the number of the batch.
    _counted: dict[int, tuple[Any, BatchKey]] = field(init=False, default_factory=dict)
    _next_number: int = field(init=False, default=0)

    @property
    def is_within_epoch(self) -> bool:
        """Whether an epoch has begun, and the caller has not seen its end."""
        return self.iterator_kind is not None and not self.is_finished

    # --- beginning, perhaps in the middle -----------------------------------------------------------------

    def resume_at(self, loaded: EpochCursor, *, is_of_other_rank: bool) -> None:
        """Become a loaded cursor within an epoch; `replay` then continues from there."""
        self.iterator_kind = loaded.iterator_kind
        self.generators, self.samplers = loaded.generators, loaded.samplers
        self.checks_some = loaded.checks_some
        self._loaded, self._is_of_other_rank = loaded, is_of_other_rank
        self._default_state = torch.default_generator.get_state()

    def follow(self, loaded: EpochCursor) -> None:
        """Begin as persistent workers would after a loaded, finished epoch: torch draws no base seed."""
        self.iterator_kind = "again"
        self._loaded = dataclasses.replace(loaded, num_received=0, checksum=(0, 0))

    def choose_base_seed(self, drawn: int) -> int:
        """The base seed: the one just drawn, or that of the resumed epoch."""
        self.base_seed = drawn if self._loaded is None else self._loaded.base_seed
        return self.base_seed

    def replay(self, loader: DataLoader[Any], drawn: Iterator[Any]) -> Iterator[Any]:
        """The iterator over indices: ``drawn``, or the remaining indices of a resumed epoch.

        Reads no samples.

        Raises:
            ResumeError: The sampler gives different indices than before.
        """
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return drawn
        # The order of torch: base seed after the first iter() of the sampler.
        sources = OrderSources(loader)
        sources.set_generators(self.generators)
        sources.set_samplers(self.samplers)
        indices: Iterator[Any] = iter(index_sampler(loader))
        self._draw_base_seed(loader)
        if self.iterator_kind == "workers":
            indices = iter(index_sampler(loader))  # with workers, torch calls iter() twice
        self.sampler_iter = indices
        self._skip(loader, indices, loaded)
        if self._default_state is not None:
            has_drawn = loaded.num_received or self.is_iterable
            if not has_drawn and not torch.equal(torch.default_generator.get_state(), self._default_state):
                # A sampler can draw its order when the first index is requested. This must happen before
                # torch's default generator is set back to the user's state.
                indices = itertools.chain(list(itertools.islice(indices, 1)), indices)
            torch.default_generator.set_state(self._default_state)
        return indices

    def _draw_base_seed(self, loader: DataLoader[Any]) -> None:
        """Draw the base seed as torch did when the epoch began; persistent workers kept the one before.

        Raises:
            ResumeError: The state's base seed was not drawn this way.
        """
        generator = torch.default_generator if loader.generator is None else loader.generator
        is_drawn = self.iterator_kind != "again"
        if not is_drawn:
            generator = generator.clone_state()
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        if (seed == self.base_seed) is not is_drawn:
            raise ResumeError(
                "the state contradicts itself, or another loader saved it: its generators do not "
                "produce its 'base_seed': load another checkpoint, or give the loader the same sampler "
                "and generator"
            )

    def _skip(self, loader: DataLoader[Any], indices: Iterator[Any], loaded: EpochCursor) -> None:
        num_batches = self._next_number = loaded.num_received
        num_checked, expected = loaded.checksum
        if self.is_iterable:  # torch's sampler for iterable datasets is endless: nothing to check
            self.num_received, self.checksum = num_batches, (num_batches, expected)
            return
        for number in range(num_batches):
            try:
                self.advance(self.keyed(next(indices), number)[0])
            except StopIteration:
                raise ResumeError(
                    f"the epoch to be resumed had at least {num_batches} batches, but the sampler now has "
                    f"{self.num_received}: give the loader {_SAME}"
                ) from None
        self._counted.clear()  # the skipped batches are not fetched
        # Another rank's indices differ, so their checksum says nothing; the sharding facts were compared.
        if self._is_of_other_rank:
            self._expect_own_share(loader, loaded)
            return
        if num_batches == num_checked and self.checksum[1] != expected:
            raise ResumeError(
                f"the sampler gave different indices for the first {num_batches} batches than in the epoch "
                f"to be resumed: give the loader {_SAME}; a custom sampler must draw from a torch.Generator "
                "in its attribute `generator` or from torch's default one, or have a state_dict()"
            )

    def _expect_own_share(self, loader: DataLoader[Any], loaded: EpochCursor) -> None:
        """Check that a sampler with the state of another rank does not give that rank's indices."""
        rank, sharding = rank_and_facts(loader)
        has_state = any(not key.endswith(".epoch") for key in loaded.samplers)
        is_same = loaded.num_received > 0 and self.checksum == loaded.checksum
        if sharding.num_ranks is not None and has_state and is_same:
            raise ResumeError(
                f"the sampler of rank {rank} gives the indices of rank {loaded.rank}, which saved the "
                "state: save and load a state for each rank, or leave the rank out of the sampler's "
                "state_dict()"
            )

    # --- batches ------------------------------------------------------------------------------------------

    def keyed(self, index: Any, number: int) -> tuple[Any, BatchKey]:
        """An index from the sampler, and the key of its batch, of this number; call it once for each."""
        key = self.batch_key(number)
        if self.count_occurrences is None:
            return index, key
        index, occurrences = self.count_occurrences(index)
        counted = self._counted[number] = index, key._replace(occurrences=occurrences)
        return counted

    def next_number(self) -> int:
        """The number of the batch whose index was drawn now; call it once for each, in order."""
        self._next_number += 1
        return self._next_number - 1

    def batch_key(self, number: int) -> BatchKey:
        """The key of the batch of this number, whose draws do not depend on its samples."""
        return BatchKey(self.sample_seed, self.epoch, number, self.base_seed, self.rank or 0)

    @property
    def num_fetched(self) -> int:
        """How many batches were fetched: the caller has received them, or they are ahead."""
        return self.num_received + len(self.ahead)

    def fetched(
        self,
        index: Any,
        worker: int = 0,
        dataset_state: DatasetState | None = None,
        number: int | None = None,
    ) -> None:
        """Record that a batch was fetched, or an error instead of it; `receive_until` counts it.

        Args:
            index: As for `advance`.
            worker: As for `advance`.
            dataset_state: As for `advance`.
            number: The number of the batch; None: nobody knows, and so many were fetched before it.
        """
        self.fetched_number = self.num_fetched if number is None else number
        counted = self._counted.pop(self.fetched_number, None) if self._counted else None
        self.fetched_key = None if number is None else counted
        self.ahead.append((index, worker, dataset_state))

    def receive_until(self, number: int) -> None:
        """Record that the caller receives fetched batches, until it has received this number.

        A batch with an error instead of it counts with the next one, so a state between the two repeats it.
        """
        while self.ahead and self.num_received < number:
            self.advance(*self.ahead[0])
            del self.ahead[0]  # no call since the last line of `advance`, so no signal either

    def receive_end(self) -> None:
        """Record that the caller sees the end, if this is the end."""
        if self.has_ended:
            self.receive_until(self.num_fetched)
            self.is_finished = True

    def advance(self, index: Any, worker: int = 0, dataset_state: DatasetState | None = None) -> None:
        """Count a batch that the caller receives.

        Args:
            index: Its index, or list of indices, from the sampler.
            worker: The worker that made it.
            dataset_state: The state of the worker's copy of the dataset after it; None keeps the one before.
        """
        num_received, states = self.num_received + 1, self.dataset_states
        num_copies = len(states or ())
        checksum = num_received, _checksum_with(index, self.checksum[1], some=self.checks_some)
        # From here on without a call: signals interrupt calls, and all of this is true or none of it.
        if states is not None and dataset_state is not None:
            if not (self.is_iterable and dataset_state == LOST):  # a stream reads a lost batch again
                states[worker] = dataset_state
            self.next_worker = (worker + 1) % num_copies
        self.num_received, self.checksum = num_received, checksum


def _checksum_with(index: Any, checksum: int, *, some: bool) -> int:
    """The checksum after one more index or list of indices; the same in every process.

    Args:
        index: The index, or the list.
        checksum: The one before.
        some: Whether some indices of a long list are enough.
    """
    if some and type(index) is list and len(index) > _ALL_CHECKED:
        index = index[:: len(index) // _SOME_CHECKED]
    try:
        # Version 2 writes the same bytes for equal values, however many references they have.
        return zlib.crc32(marshal.dumps(index, 2), checksum)
    except ValueError:  # the index contains types that are not built-in
        pass
    try:
        return zlib.crc32(np.asarray(index, np.int64).tobytes(), checksum)
    except (TypeError, ValueError, OverflowError):  # keys of another kind
        pass
    try:
        text = _ADDRESS.sub("", repr(index))  # memory addresses differ between processes
    except Exception:  # noqa: BLE001  # the index can be of a user's class
        text = type(index).__name__
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), checksum)
