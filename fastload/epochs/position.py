"""The position in an epoch: begin one, count its batches, save where it stands, and go on there.

A state holds the beginning of the epoch (the states of generators and samplers before anything was drawn, and
the base seed drawn then) and the number of batches that the caller has received since. To resume, the loader
draws the beginning again in the same order, and skips the indices of that many batches; it reads no samples.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import json
import marshal
import pickle
import re
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fastload.batch.dataset_state import ENDED, NOT_BEGUN, DatasetState
from fastload.epochs.order import DEFAULT, Order, length_or_zero, sharding_of
from fastload.epochs.runtime import runtime_of
from fastload.errors import ResumeError
from fastload.rng.keys import BatchKey, occurrence_counter
from fastload.system.checks import as_int, integer
from fastload.system.logs import log, say_once
from fastload.system.notes import short_repr
from fastload.system.remote_error import RemoteError
from fastload.system.torch_private import has_auto_collation, index_sampler, is_iterable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.data import DataLoader

    from fastload.batch.plan import Plan

VERSION = 9
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NUM_CHECKED = 16  # indices of a batch, about
_SAME = "the same dataset, sampler, batch_size and number of ranks as before"
_OUT_OF_ORDER = (
    "with in_order=False, batches do not come in the order of the sampler: save a state between epochs, or "
    "use in_order=True"
)


@dataclass(eq=False)
class Position:
    """The beginning of one epoch of one loader, and the batches that the caller has received since.

    `begin` makes it when an epoch begins. A position that `load` has read stays as it is: `begin` makes the
    next one of it. The first group of fields is saved, the second one is not.

    Attributes:
        epoch: The number that set_epoch() gave, or else the previous number plus one.
        kind: The iterator that torch began the epoch with, which determines the order of torch's draws:
            `"local"` (no workers), `"workers"`, or `"again"` (persistent workers); None: no epoch has begun.
        generators: States of the generators before anything was drawn, by place (see `Order`).
        samplers: States of the samplers, as `Order.sampler_states` returns them.
        base_seed: The seed from which torch seeds its workers.
        sample_seed: The seed from which `seeding="sample"` seeds each sample.
        num_received: How many batches of the epoch the caller has received.
        checksum: How many lists of indices the checksum covers, and the checksum.
        is_finished: Whether the caller has seen the end of the epoch.
        why_unresumable: Why the epoch cannot be resumed in the middle; None if it can.
        dataset_states: Of an iterable dataset: the state of each worker's copy after its last batch that the
            caller received.
        next_worker: The worker whose batch is due next.
        rank: The rank that the loader reads for; None: unknown. While an epoch runs, it is set only for
            transforms of batches.
        batch_size: The loader's.
        error: The error of a sampler's state_dict(): it fails no batch, but `state_dict()` of the loader.
        ahead: The index, worker and dataset state of batches that were fetched and that the caller has not
            received: they are prefetched, or an error came instead of them.
        has_ended: Whether no batch is left to be fetched.
        count_occurrences: With `seeding="sample"`: an `occurrence_counter`.
    """

    epoch: int = 0
    kind: str | None = None
    generators: dict[str, bytes] = field(default_factory=dict)
    samplers: dict[str, bytes] = field(default_factory=dict)
    base_seed: int = 0
    sample_seed: int = 0
    num_received: int = 0
    checksum: tuple[int, int] = (0, 0)
    is_finished: bool = False
    why_unresumable: str | None = None
    dataset_states: list[DatasetState] | None = None
    next_worker: int = 0
    rank: int | None = None
    batch_size: int | None = None

    error: RemoteError | None = field(init=False, default=None)
    ahead: deque[tuple[Any, int, DatasetState | None]] = field(init=False, default_factory=deque)
    has_ended: bool = field(init=False, default=False)
    count_occurrences: Callable[[Any], tuple[Any, tuple[int, ...]]] | None = field(init=False, default=None)
    # What `replay` goes on from, whether another rank saved it, and the user's state of torch's default
    # generator, which `replay` leaves unchanged.
    _loaded: Position | None = field(init=False, default=None)
    _is_of_other_rank: bool = field(init=False, default=False)
    _default_state: torch.Tensor | None = field(init=False, default=None)
    _next_number: int = field(init=False, default=0)

    @property
    def is_within_epoch(self) -> bool:
        """Whether an epoch has begun, and the caller has not seen its end."""
        return self.kind is not None and not self.is_finished

    # --- beginning, perhaps in the middle -----------------------------------------------------------------

    @classmethod
    def begin(cls, loader: Any, kind: str, reason: str | None = None, plan: Plan | None = None) -> Position:
        """Begin a new epoch, or the epoch of a loaded state, before anything is drawn for it.

        Args:
            loader: The loader whose epoch begins; the caller holds its lock.
            kind: As the attribute.
            reason: Why the epoch cannot be resumed in the middle.
            plan: Of persistent workers, which keep it: the loader's attributes can be others by now.

        Raises:
            ResumeError: The loaded state is in the middle of an epoch, and this loader cannot resume there.
        """
        runtime, order = runtime_of(loader), Order(loader)
        loaded, runtime.loaded = runtime.loaded, None  # `make_iterator` restores it after an error
        self = cls(runtime.next_epoch, kind, order.generator_states(), why_unresumable=reason)
        self.batch_size = loader.batch_size
        try:
            self.samplers = order.sampler_states()
        except Exception:  # noqa: BLE001  # fails no epoch; raised when the loader's state is requested
            self.error = RemoteError.current("in a sampler's state_dict()")
        if reason is None and is_iterable(loader):
            self.dataset_states = [NOT_BEGUN] * max(1, (plan or loader).num_workers)
        if loaded is not None and loaded.is_within_epoch:
            self._resume_at(loader, order, loaded)
        elif (
            loaded is not None
            and (reason, kind, loader.persistent_workers) == (None, "workers", True)
            and loaded.kind in ("workers", "again")
        ):
            # Workers waited for this epoch when the state was saved: torch draws no base seed then.
            self.kind = "again"
            self._loaded = dataclasses.replace(loaded, num_received=0, checksum=(0, 0))
        if kind != "local" and not (plan or loader).in_order:
            self.why_unresumable = reason or _OUT_OF_ORDER
        self.sample_seed = sample_seed_of(loader)
        if loader.batch_transform is not None or loader.device_transform is not None:
            self.rank = sharding_of(loader)[0]
        if loader.seeding == "sample":
            num_samples, is_batch = length_or_zero(loader.dataset), has_auto_collation(loader)
            self.count_occurrences = occurrence_counter(num_samples, auto_collation=is_batch)
        runtime.next_epoch, runtime.position = self.epoch + 1, self
        return self

    def _resume_at(self, loader: DataLoader[Any], order: Order, loaded: Position) -> None:
        """Become a loaded position within an epoch; `replay` then goes on from there."""
        reason = self.why_unresumable or (loaded.why_unresumable if loaded.num_received else None)
        if reason is not None:
            raise ResumeError(f"this epoch cannot be resumed at batch {loaded.num_received}: {reason}")
        self._is_of_other_rank = loaded.check_rank(loader, order)
        self._set_dataset_states(loader, loaded)
        self.epoch, self.kind = loaded.epoch, loaded.kind
        self.generators, self.samplers = loaded.generators, loaded.samplers
        self._loaded, self._default_state = loaded, torch.default_generator.get_state()

    def _set_dataset_states(self, loader: DataLoader[Any], loaded: Position) -> None:
        copies, own = list(loaded.dataset_states or ()), self.dataset_states or ()
        if len(copies) != len(own) and loaded.num_received:
            raise ResumeError(
                f"the state has a dataset state for each of {len(copies)} workers, but this loader has "
                f"{len(own)}: give it the same dataset and num_workers as before"
            )
        if len(copies) != len(own) or not copies:
            return
        if self._is_of_other_rank and any(copy.data or copy.iterator for copy in copies):
            log.warning(
                "this rank loads the states of a dataset that rank %s saved, which is correct only if the "
                "dataset's state_dict() does not depend on the rank; otherwise save and load a state for "
                "each rank",
                loaded.rank,
            )
        num_batches = sum(copy.num_to_read_again for copy in copies)
        if num_batches and hasattr(loader.dataset, "state_dict"):
            raise ResumeError(
                f"this epoch cannot be resumed at batch {loaded.num_received}: the dataset, a "
                f"{type(loader.dataset).__name__}, has a state that fastload cannot save or load, because "
                "state_dict() is called without arguments and load_state_dict() with the state"
            )
        if num_batches and loaded.batch_size != loader.batch_size:
            raise ResumeError(
                f"{num_batches} batches must be read again, of batch_size {loaded.batch_size}, but this "
                f"loader has {loader.batch_size}: give it {loaded.batch_size}"
            )
        if num_batches > loaded.num_received:  # Accelerate subtracts batches that it has prefetched
            if len(copies) > 1:
                raise ResumeError(
                    f"the state was changed: it has {loaded.num_received} batches, but workers have read "
                    f"{num_batches} of a stream without a state: give the dataset a state_dict(), or use "
                    "num_workers=0"
                )
            num_batches = loaded.num_received
            copies = [copies[0]._replace(num_batches=num_batches)]
        self.dataset_states, self.next_worker = copies, loaded.next_worker
        if num_batches:
            log.warning(
                "epoch %s is resumed by reading %s batches again and dropping them, because neither the "
                "dataset, a %s, nor its iterator has state_dict() and load_state_dict(): it must give the "
                "same samples in the same order as before",
                *(loaded.epoch, num_batches, type(loader.dataset).__name__),
            )

    def check_rank(self, loader: DataLoader[Any], order: Order) -> bool:
        """Whether another rank saved this position, whose indices can be others.

        Raises:
            ResumeError: The ranks do not share one order, but each draws from its own seed.
        """
        rank, is_split = sharding_of(loader)
        if None in (self.rank, rank) or self.rank == rank:
            return False
        place = None if is_split else order.drawn_from
        if place is not None and place in self.generators:
            saved = order.generator_at(place, self.generators[place]).initial_seed()
            own = order.generators[place].initial_seed()
            if saved != own:
                raise ResumeError(
                    f"rank {self.rank} saved the state with the seed {saved} of its sampler, but this one "
                    f"has {own}: give it {saved}, or load a state for each rank"
                )
        return True

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
        order = Order(loader)
        order.set_generators(self.generators)
        order.set_samplers(self.samplers)
        indices: Iterator[Any] = iter(index_sampler(loader))
        if self.kind != "again":  # persistent workers keep their base seed
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        if self.kind == "workers":
            indices = iter(index_sampler(loader))  # with workers, torch calls iter() twice
        self._skip(loader, indices, loaded)
        if self._default_state is not None:
            has_drawn = loaded.num_received or self.dataset_states is not None
            if not has_drawn and not torch.equal(torch.default_generator.get_state(), self._default_state):
                # A sampler can draw its order when the first index is requested. This must happen before
                # torch's default generator is set back to the user's state.
                indices = itertools.chain(list(itertools.islice(indices, 1)), indices)
            torch.default_generator.set_state(self._default_state)
        return indices

    def _skip(self, loader: DataLoader[Any], indices: Iterator[Any], loaded: Position) -> None:
        num_batches = self._next_number = loaded.num_received
        num_checked, expected = loaded.checksum
        if self.dataset_states is not None:  # torch's sampler is endless then: nothing to check
            self.num_received, self.checksum = num_batches, (num_batches, expected)
            return
        for number in range(num_batches):
            try:
                self._advance(self.keyed(next(indices), number)[0])
            except StopIteration:
                raise ResumeError(
                    f"the epoch is to be resumed at batch {num_batches}, but the sampler has only "
                    f"{self.num_received} now: give the loader {_SAME}{_changed_size(loaded, loader)}"
                ) from None
        is_same = num_batches != num_checked or self.checksum[1] == expected
        if not is_same and not self._is_of_other_rank:
            raise ResumeError(
                f"before batch {num_batches}, the sampler gave other indices than in the epoch to be "
                f"resumed: give the loader {_SAME}{_changed_size(loaded, loader)}; a custom sampler must "
                "draw from a torch.Generator in its attribute `generator` or from torch's default one, or "
                "have a state_dict()"
            )

    # --- batches ------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """The number of the batch whose index was drawn now; call it once for each, in order."""
        self._next_number += 1
        return self._next_number - 1

    def batch_key(self, number: int) -> BatchKey:
        """The key of the batch of this number, whose draws do not depend on its samples."""
        return BatchKey(self.sample_seed, self.epoch, number, self.base_seed, self.rank or 0)

    def keyed(self, index: Any, number: int) -> tuple[Any, BatchKey]:
        """An index from the sampler, and the key of its batch, of this number; call it once for each."""
        key = self.batch_key(number)
        if self.count_occurrences is None:
            return index, key
        index, occurrences = self.count_occurrences(index)
        return index, key._replace(occurrences=occurrences)

    @property
    def num_fetched(self) -> int:
        """How many batches were fetched: the caller has received them, or they are ahead."""
        return self.num_received + len(self.ahead)

    def fetched(self, index: Any, worker: int = 0, dataset_state: DatasetState | None = None) -> None:
        """Record that a batch was fetched, or an error instead of it; `receive_until` counts it.

        Args:
            index: Its index, or list of indices, from the sampler.
            worker: The worker that made it.
            dataset_state: The state of the worker's copy of the dataset after it; None keeps the one before:
                a stream reads a batch again that was lost on its way.
        """
        self.ahead.append((index, worker, dataset_state))

    def receive_until(self, number: int | None) -> None:
        """Record that the caller receives fetched batches, until it has received this number; None: all.

        A batch with an error instead of it counts with the next one, so a state between the two repeats it.
        """
        while self.ahead and (number is None or self.num_received < number):
            self._advance(*self.ahead[0])
            del self.ahead[0]  # no call since the last line of `_advance`, so no signal either

    def receive_end(self) -> None:
        """Record that the caller sees the end, if this is the end."""
        if self.has_ended:
            self.receive_until(None)
            self.is_finished = True

    def _advance(self, index: Any, worker: int = 0, dataset_state: DatasetState | None = None) -> None:
        num_received, states = self.num_received + 1, self.dataset_states
        num_copies = len(states or ())
        checksum = num_received, _checksum_with(index, self.checksum[1])
        # From here on without a call: signals interrupt calls, and all of this is true or none of it.
        if states is not None:
            if dataset_state is not None:
                states[worker] = dataset_state
            self.next_worker = (worker + 1) % num_copies
        self.num_received, self.checksum = num_received, checksum

    # --- saving and loading -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain types for the user, which shares no mutable objects with this object.

        JSON and `torch.load(weights_only=True)` support all types in it, if they support the user's own parts
        (states of samplers and datasets).
        """
        states = self.dataset_states
        saved = {name: getattr(self, name) for name in _PLAIN} | {
            "version": VERSION,
            # torchdata and Accelerate use these names; Accelerate changes all three.
            "_num_yielded": self.num_received,
            "_sampler_iter_yielded": self.num_received,
            "_iterator_finished": self.is_finished,
            "checksum": list(self.checksum),
            "generators": {place: base64.b64encode(s).decode() for place, s in self.generators.items()},
            "samplers": {place: pickle.loads(state) for place, state in self.samplers.items()},
            "dataset_states": None if states is None else [state.to_dict() for state in states],
        }
        return saved | {"crc": _crc_of(saved)}

    @classmethod
    def from_dict(cls, saved: Any) -> Position:
        """The position of a dict of `to_dict`, also after a round trip through JSON; runs no code from it.

        Raises:
            ResumeError: This is not such a dict, or it was changed.
        """
        if not isinstance(saved, Mapping) or "version" not in saved:
            found = "a dict without 'version'" if isinstance(saved, Mapping) else short_repr(saved)
            raise ResumeError(
                f"this is not a state of a fastload.DataLoader, but {found}: pass what loader.state_dict() "
                "returned"
            )
        try:
            if saved["version"] != VERSION:
                raise ValueError(f"its 'version' should be {VERSION}, but is {short_repr(saved['version'])}")
            if saved["crc"] != _crc_of(saved):
                raise ValueError("its 'crc' is not that of its other values, so one of these was changed")
            states = saved["dataset_states"]
            self = cls(
                generators={place: base64.b64decode(text) for place, text in saved["generators"].items()},
                samplers={place: pickle.dumps(state) for place, state in saved["samplers"].items()},
                num_received=integer(0, saved["checksum"][0] + 1)(saved["_num_yielded"]),
                checksum=tuple(saved["checksum"]),
                dataset_states=None if states is None else [DatasetState.from_dict(part) for part in states],
                **{name: saved[name] for name in _PLAIN},
            )
        except Exception as error:
            raise ResumeError(
                f"this is not a state of a fastload.DataLoader of this release, or it is damaged: {error!r}. "
                "Pass what loader.state_dict() returned, or start without a state"
            ) from error
        # Between two epochs, a state has none of torch's default generator, which belongs to the user.
        self.is_finished = self.kind is not None and DEFAULT not in self.generators
        return self


_PLAIN = (
    *("epoch", "kind", "base_seed", "sample_seed"),
    *("why_unresumable", "next_worker", "rank", "batch_size"),
)


def _changed_size(loaded: Position, loader: DataLoader[Any]) -> str:
    """Both values of batch_size, if they differ."""
    before, now = loaded.batch_size, loader.batch_size
    return "" if before == now else f" (batch_size was {before}, and is {now})"


def _crc_of(saved: Mapping[str, Any]) -> int:
    """The checksum of a saved position, without what frameworks change and without the user's own states."""
    plain: dict[str, Any] = {name: saved[name] for name in (*_PLAIN, "checksum", "generators")}
    states = saved["dataset_states"]
    plain["samplers"] = sorted(saved["samplers"])
    plain["dataset_states"] = states and [
        [state["num_batches"], state["has_ended"], sorted(state)] for state in states
    ]
    return zlib.crc32(json.dumps(plain, sort_keys=True).encode())


def _checksum_with(index: Any, checksum: int) -> int:
    """The checksum after one more index or list of indices; the same in every process.

    Args:
        index: The index, or the list, some of which are enough: another order differs there, too.
        checksum: The one before.
    """
    if type(index) is list and len(index) > 2 * _NUM_CHECKED:
        index = index[:: len(index) // _NUM_CHECKED]
    try:
        # Version 2 writes the same bytes for equal values, however many references they have.
        return zlib.crc32(marshal.dumps(index, 2), checksum)
    except ValueError:  # the index contains types that are not built-in
        pass
    try:
        text = _ADDRESS.sub("", repr(index))  # memory addresses differ between processes
    except Exception:  # noqa: BLE001  # the index can be of a user's class
        text = type(index).__name__
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), checksum)


# --- a loader and its position ----------------------------------------------------------------------------


def make_iterator(loader: DataLoader[Any], make: Callable[[], Any]) -> Any:
    """The iterator that ``make`` returns; if ``make`` raises, the loader keeps its position.

    A loaded state then stays loaded, and all generators and samplers are restored, so the next `iter(loader)`
    begins at the same place. Without a loaded state, the loader's generator stays as torch leaves it.
    """
    runtime = runtime_of(loader)
    before = runtime.next_epoch, runtime.position, runtime.loaded
    try:
        with contextlib.nullcontext() if runtime.loaded is None else Order(loader).unchanged_on_error():
            return make()
    except BaseException:
        runtime.next_epoch, runtime.position, runtime.loaded = before
        raise


def sample_seed_of(loader: DataLoader[Any]) -> int:
    """The seed of the loaded run; else the user's seed of the loader's generator, or of torch."""
    seed = runtime_of(loader).sample_seed
    if seed is not None:
        return seed
    return (torch.default_generator if loader.generator is None else loader.generator).initial_seed()


def state_dict(loader: DataLoader[Any]) -> dict[str, Any]:
    """The position of the loader as a new dict of plain types; starts nothing.

    Raises:
        Exception: An error of a sampler's or a dataset's `state_dict()` within this epoch.
    """
    runtime = runtime_of(loader)
    if isinstance(runtime.loaded, Position):
        return runtime.loaded.to_dict()
    position: Position = runtime.position or Position(runtime.next_epoch, sample_seed=sample_seed_of(loader))
    saved = dataclasses.replace(position, rank=sharding_of(loader)[0])
    if position.is_within_epoch:
        if position.why_unresumable == _OUT_OF_ORDER:
            say_once(f"state_dict() was called within an epoch that cannot be resumed: {_OUT_OF_ORDER}")
        for error in (position.error, *(copy.error for copy in position.dataset_states or ())):
            if error is not None:
                error.reraise()
    else:
        # Between epochs, a resumed loader continues with the current states of its own generators.
        order = Order(loader)
        saved.generators, saved.samplers = order.generator_states(with_default=False), order.sampler_states()
        if saved.dataset_states is not None:
            saved.dataset_states = [ENDED] * len(saved.dataset_states)
    return saved.to_dict()


def load(loader: DataLoader[Any], saved: dict[str, Any]) -> None:
    """Make the next epoch of the loader resume from the state.

    Raises:
        ResumeError: This is not a state of this release's loader, or another rank with another order saved
            it. Nothing has changed.
    """
    loaded, order, runtime = Position.from_dict(saved), Order(loader), runtime_of(loader)
    for place in loaded.generators.keys() & order.generators.keys():
        order.generator_at(place, loaded.generators[place])  # raises now if it is damaged
    missing = {
        f"generators[{place!r}]" for place in order.generators.keys() - loaded.generators.keys() - {DEFAULT}
    }
    missing |= {f"samplers[{key!r}]" for key in order.keys - loaded.samplers.keys()}
    if missing:  # the loader would continue from wherever that part happens to be
        raise ResumeError(
            f"the state lacks {', '.join(sorted(missing))}, which determines the batches of this loader: "
            "give it the same sampler and generator as before, or load another checkpoint"
        )
    if not loaded.is_within_epoch:  # set now, so a later set_epoch() takes precedence
        loaded.check_rank(loader, order)
        with order.unchanged_on_error():
            order.set_generators(loaded.generators)
            order.set_samplers({k: v for k, v in loaded.samplers.items() if k in order.keys})
    runtime.loaded, runtime.sample_seed = loaded, loaded.sample_seed
    runtime.next_epoch = loaded.epoch + loaded.is_finished


def has_no_rest(loader: DataLoader[Any]) -> bool:
    """Whether a state was loaded that was saved after the last batch of an epoch, but before its end."""
    loaded: Position | None = runtime_of(loader).loaded
    if loaded is None or not loaded.is_within_epoch:
        return False
    try:
        return loaded.num_received >= len(loader)
    except (TypeError, NotImplementedError):  # a sampler without a length
        return False


def set_epoch(loader: DataLoader[Any], number: int) -> None:
    """Set the number of the next epoch, also in samplers and datasets that count epochs.

    Raises:
        TypeError: The number is not an integer.
    """
    number, runtime = as_int("epoch", number), runtime_of(loader)
    runtime.next_epoch = runtime.set_epoch = number
    for owner in [*Order(loader).samplers.values(), loader.dataset]:
        tell = getattr(owner, "set_epoch", None)
        if callable(tell):
            tell(number)
