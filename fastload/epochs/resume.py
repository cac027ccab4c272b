"""Save and resume the position in an epoch: `state_dict()` and `load_state_dict()` of the loader.

A state holds the beginning of the epoch (the states of generators and samplers before anything was drawn, and
the base seed drawn then) and the number of batches that the caller has received since. To resume, the loader
replays the beginning in the same order, and skips the indices of that many batches; it reads no samples.
Rules:

1. A state counts the batches that the caller received, not those that workers have prefetched.
2. torch's default generator belongs to the user: resuming leaves it unchanged.
3. If a sampler returns different indices on replay, a checksum detects it, and an error is raised. The ranks
   of a run can load the state of one of them: then the facts that all ranks share are compared instead (see
   `order`).
4. An `iter(loader)` that fails changes nothing: a loaded state stays loaded.
5. An error of a user's `state_dict()` fails no epoch and no batch: it is raised when a state is requested.
6. The batches of an iterator that a subclass makes by itself are not counted. A state is then that of the
   beginning of an epoch, with a warning: an error would end training while it saves a checkpoint.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import operator
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from fastload.batch.dataset_state import ENDED, LOST, NOT_BEGUN, keeps_state
from fastload.epochs.position import Position
from fastload.epochs.sampler_state import DEFAULT, LOADER, Sources, length_or_none, rank_and_order, rank_of
from fastload.errors import ResumeError
from fastload.rng.keys import BatchKey, occurrence_counter
from fastload.system.logs import log
from fastload.system.remote_error import RemoteError
from fastload.workers.worker_types import pool_type_of

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterator

    from torch.utils.data import DataLoader

    from fastload.batch.dataset_state import DatasetState


_SAME = "the same dataset, sampler and batch_size as before"


class Epoch:
    """One epoch of one loader, from before its first draw to the last batch that the caller received.

    Args:
        position: Of the loader before the epoch.
        is_iterable: Whether the dataset is iterable-style.

    Attributes:
        position: Of the loader now; `state_dict()` saves it.
        error: The error of a sampler's state_dict(), as torch sends errors.
        ahead: The arguments of `received` for batches fetched but not yet received by the caller; None if
            nothing is prefetched.
        fetched_key: With `seeding="sample"`: the index of the last fetched batch, and its key. With
            `in_order=False` torch's workers do not fetch in the order of the indices, and the two do not
            belong together.
        loads_dataset_states: Whether the states of the dataset come from a loaded state, so the copies must
            load them.
        count_occurrences: With `seeding="sample"`: an `occurrence_counter`.
        rank: That the loader reads for, if it transforms batches; 0 if it is unknown.
    """

    def __init__(self, position: Position, *, is_iterable: bool) -> None:
        self.position = position
        self.error: RemoteError | None = None
        self.ahead: deque[tuple[Any, int, DatasetState | None]] | None = None
        self.fetched_key: tuple[Any, BatchKey] | None = None
        self.loads_dataset_states = False
        self.count_occurrences: Callable[[Any], tuple[Any, tuple[int, ...]]] | None = None
        self.rank = 0
        self._is_iterable = is_iterable
        self._goal: Position | None = None  # the position to return to, until `replay`
        self._is_of_other_rank = False  # whether a different rank saved it
        self._default_state: torch.Tensor | None = None  # the user's, which `replay` leaves unchanged
        # With seeding="sample": what was counted and not yet fetched.
        self._counted: deque[tuple[Any, BatchKey]] = collections.deque()

    def return_to(self, goal: Position, *, is_of_other_rank: bool) -> None:
        """Let `replay` return to a position within an epoch, which this epoch becomes."""
        self.position.iterator_kind = goal.iterator_kind
        self.position.generators, self.position.samplers = goal.generators, goal.samplers
        self._goal, self._is_of_other_rank = goal, is_of_other_rank
        self._default_state = torch.default_generator.get_state()

    def go_on_from(self, goal: Position) -> None:
        """Begin this epoch as persistent workers of the previous one would: torch draws no base seed."""
        self.position.iterator_kind = "again"
        self._goal = dataclasses.replace(goal, num_received=0, checksum=(0, 0))

    def keyed(self, index: Any, number: int) -> tuple[Any, BatchKey]:
        """An index from the sampler, and the key of its batch, of this number; call it once for each."""
        key = self.batch_key(number)
        if self.count_occurrences is None:
            return index, key
        index, occurrences = self.count_occurrences(index)
        counted = index, key._replace(occurrences=occurrences)
        self._counted.append(counted)
        return counted

    def batch_key(self, number: int) -> BatchKey:
        """The key of the batch of this number, whose draws do not depend on its samples."""
        position = self.position
        return BatchKey(position.sample_seed, position.epoch, number, position.base_seed, self.rank)

    @property
    def num_fetched(self) -> int:
        """How many batches were fetched: the caller has received them, or they are ahead."""
        return self.position.num_received + (0 if self.ahead is None else len(self.ahead))

    def fetched(self, index: Any, worker: int = 0, dataset_state: DatasetState | None = None) -> None:
        """Record that a batch was fetched: the caller gets it now, or later if `ahead` is set."""
        if self._counted:
            self.fetched_key = self._counted.popleft()
        if self.ahead is None:
            self.received(index, worker, dataset_state)
        else:
            self.ahead.append((index, worker, dataset_state))

    def receive_until(self, number: int) -> None:
        """Record that the caller receives prefetched batches, until it has received this number."""
        while self.ahead and self.position.num_received < number:
            self.received(*self.ahead.popleft())

    def ended(self) -> None:
        """Record the end. An iterator that fetches ahead records it itself when the caller sees it."""
        self.position.is_finished = self.ahead is None

    def received(self, index: Any, worker: int = 0, dataset_state: DatasetState | None = None) -> None:
        """Record that the caller receives the batch of this index, and the dataset's state after it."""
        states = self.position.dataset_states
        if states is not None and dataset_state == LOST and self._is_iterable:
            dataset_state = states[worker]  # a stream reads a lost batch again
        self.position.advance(index, worker, dataset_state)

    def choose_base_seed(self, drawn: int) -> int:
        """The base seed: the one just drawn, or that of the resumed epoch."""
        self.position.base_seed = drawn if self._goal is None else self._goal.base_seed
        return self.position.base_seed

    def replay(self, loader: DataLoader[Any], drawn: Iterator[Any]) -> Iterator[Any]:
        """The iterator over indices: ``drawn``, or the remaining indices of a resumed epoch.

        Raises:
            ResumeError: The sampler gives different indices than before.
        """
        goal, self._goal = self._goal, None
        if goal is None:
            return drawn
        sources = Sources(loader)
        sources.set_generators(self.position.generators)
        sources.set_samplers(self.position.samplers)
        indices: Iterator[Any] = iter(loader._index_sampler)
        self._draw_base_seed(loader)
        if self.position.iterator_kind == "workers":
            indices = iter(loader._index_sampler)  # with workers, torch calls iter() twice
        self._skip(loader, indices, goal)
        if self._default_state is not None:
            has_drawn = goal.num_received or self._is_iterable
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
        is_drawn = self.position.iterator_kind != "again"
        if not is_drawn:
            generator = generator.clone_state()
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        if (seed == self.position.base_seed) is not is_drawn:
            raise ResumeError(
                "the state contradicts itself, or a different loader saved it: its generators do not "
                "produce its 'base_seed': load a different checkpoint, or give the loader the same sampler "
                "and generator"
            )

    def _skip(self, loader: DataLoader[Any], indices: Iterator[Any], goal: Position) -> None:
        count = goal.num_received
        checked, expected = goal.checksum
        if self._is_iterable:  # torch's sampler for iterable datasets is endless: nothing to check
            self.position.num_received, self.position.checksum = count, (count, expected)
            return
        for number in range(count):
            try:
                self.received(self.keyed(next(indices), number)[0])
            except StopIteration:
                raise ResumeError(
                    f"the epoch to be resumed had at least {count} batches, but the sampler now has "
                    f"{self.position.num_received}: give the loader {_SAME}"
                ) from None
        self._counted.clear()  # the skipped batches are not fetched
        if self._is_of_other_rank:  # its indices differ; `order.check` has compared the rest
            self._expect_own_share(loader, goal)
            return
        if count == checked and self.position.checksum[1] != expected:
            raise ResumeError(
                f"the sampler gave different indices for the first {count} batches than in the epoch to be "
                f"resumed: give the loader {_SAME}; a custom sampler must draw from a torch.Generator in its "
                "attribute `generator` or from torch's default one, or have a state_dict()"
            )

    def _expect_own_share(self, loader: DataLoader[Any], goal: Position) -> None:
        """Check that a sampler with the state of a different rank does not give that rank's indices."""
        rank, order = rank_and_order(loader)
        has_state = order.num_ranks is not None and any(not key.endswith(".epoch") for key in goal.samplers)
        if has_state and goal.num_received and self.position.checksum == goal.checksum:
            raise ResumeError(
                f"the sampler of rank {rank} gives the indices of rank {goal.rank}, which saved the "
                "state: save and load a state for each rank, or leave the rank out of the sampler's "
                "state_dict()"
            )


@dataclass
class Progress:
    """The record of one loader's epochs.

    Attributes:
        next_number: Of the next epoch.
        has_set_epoch: Whether the user called set_epoch().
        current: The epoch that its iterators began last.
        loaded: The state from which the next epoch resumes.
        sample_seed: The seed of the run that was loaded.
        has_warned: Whether `warn_of_unknown_position` did.
    """

    next_number: int = 0
    has_set_epoch: bool = False
    current: Epoch | None = None
    loaded: Position | None = None
    sample_seed: int | None = None
    has_warned: bool = False


_progress: weakref.WeakKeyDictionary[Any, Progress] = weakref.WeakKeyDictionary()


def progress_of(loader: Any) -> Progress:
    """The loader's progress; not an attribute of the loader, because frameworks copy its attributes."""
    progress = _progress.get(loader)
    return _progress.setdefault(loader, Progress()) if progress is None else progress


def current_epoch(loader: Any) -> Epoch:
    """The epoch that this loader's iterators began last."""
    epoch = progress_of(loader).current
    if epoch is None:
        raise AssertionError("an iterator begins an epoch before it is asked for a batch")
    return epoch


def make_iterator(loader: DataLoader[Any], make: Callable[[], Any]) -> Any:
    """The iterator that ``make`` returns; if ``make`` raises, the loader keeps its position.

    A loaded state then stays loaded, and all generators and samplers are restored, so the next `iter(loader)`
    begins at the same place. Without a loaded state, the loader's generator stays as torch leaves it.
    """
    progress = progress_of(loader)
    before = progress.next_number, progress.current, progress.loaded
    try:
        if progress.loaded is None:
            return make()
        with Sources(loader).unchanged_on_error():
            return make()
    except BaseException:
        progress.next_number, progress.current, progress.loaded = before
        raise


def warn_of_unknown_position(loader: DataLoader[Any]) -> None:
    """Warn once if a subclass makes its own iterators, and no batch was counted."""
    progress, kind = progress_of(loader), type(loader)
    is_counted = progress.current is not None or progress.loaded is not None
    methods: list[Any] = [kind.__iter__, kind._get_iterator]
    if is_counted or progress.has_warned or all(m.__module__.startswith("fastload.") for m in methods):
        return
    progress.has_warned = True
    log.warning(
        "the state of this %s is that of the beginning of an epoch. If it makes its iterators by itself, its "
        "position is unknown: define state_dict() and load_state_dict() in the class, or take the batches "
        "from super().__iter__() and super()._get_iterator()",
        kind.__name__,
    )


def begin_epoch(loader: DataLoader[Any], iterator_kind: str, obstacle: str | None = None) -> Epoch:
    """Begin a new epoch, or the epoch of a loaded state, before anything is drawn for it.

    Args:
        loader: The loader whose epoch begins.
        iterator_kind: See Position.
        obstacle: Why the epoch cannot be resumed in the middle.

    Raises:
        ResumeError: The loaded state is in the middle of an epoch, and this loader cannot resume there.
    """
    progress = progress_of(loader)
    state, progress.loaded = progress.loaded, None
    sources = Sources(loader)
    position = Position(progress.next_number, iterator_kind, sources.generator_states(), obstacle=obstacle)
    epoch = Epoch(position, is_iterable=loader._dataset_kind == _DatasetKind.Iterable)
    try:
        position.samplers = sources.sampler_states()
    except Exception:  # noqa: BLE001  # fails no epoch; raised when the loader's state is requested
        epoch.error = RemoteError.current("in a sampler's state_dict()")
    if obstacle is None and has_dataset_states(loader):
        _begin_dataset_states(loader, epoch, state)
    if state is not None and state.is_within_epoch:
        _return_to(loader, epoch, state)
    elif state is not None and obstacle is None and _has_persistent_workers(loader, state, iterator_kind):
        epoch.go_on_from(state)
    position.sample_seed = sample_seed_of(loader)
    transforms = (getattr(loader, name, None) for name in ("batch_transform", "device_transform"))
    if any(transform is not None for transform in transforms):
        epoch.rank = rank_of(loader) or 0
    if getattr(loader, "seeding", "worker") == "sample":
        num_samples = length_or_none(loader.dataset) or 0
        epoch.count_occurrences = occurrence_counter(num_samples, auto_collation=loader._auto_collation)
    progress.next_number = position.epoch + 1
    progress.current = epoch
    return epoch


def _has_persistent_workers(loader: DataLoader[Any], state: Position, iterator_kind: str) -> bool:
    """Whether a state between two epochs was saved while workers waited for the next epoch."""
    had_workers = state.is_finished and state.iterator_kind in ("workers", "again")
    return had_workers and iterator_kind == "workers" and loader.persistent_workers


def obstacle(loader: DataLoader[Any]) -> str | None:
    """Why an epoch of this loader cannot be resumed in the middle; None if it can."""
    dataset = loader.dataset
    if loader._dataset_kind == _DatasetKind.Map or keeps_state(dataset):
        return None
    if not callable(getattr(dataset, "state_dict", None)):
        return None  # its iterator might keep a state; otherwise its batches are read again
    return (
        "the iterable-style dataset has a state that fastload cannot save or load: state_dict() is called "
        f"without arguments and load_state_dict() with the state, and {type(dataset).__name__} lacks one of "
        "them, or they need different arguments"
    )


def has_dataset_states(loader: DataLoader[Any]) -> bool:
    """Whether a state of the loader has a state of each worker's copy of the dataset.

    Worker threads share the dataset, so a batch has no state of its own. A module's `state_dict()` has its
    weights.
    """
    if loader._dataset_kind == _DatasetKind.Iterable:
        return True
    pool_type = pool_type_of(getattr(loader, "worker_type", "process"))
    shares = loader.num_workers > 0 and pool_type.runs_in_consumer
    return not shares and not isinstance(loader.dataset, torch.nn.Module) and keeps_state(loader.dataset)


def _begin_dataset_states(loader: DataLoader[Any], epoch: Epoch, state: Position | None) -> None:
    """Set the states of the copies of the dataset before the first batch of an epoch.

    A map-style dataset in persistent workers enters an epoch with the state in which it left the previous
    one. An iterable-style dataset starts over.
    """
    num_copies = max(1, loader.num_workers)
    epoch.position.dataset_states = [NOT_BEGUN] * num_copies
    if loader._dataset_kind == _DatasetKind.Iterable or not loader.persistent_workers:
        return
    before, current = state, progress_of(loader).current
    if state is not None:
        epoch.loads_dataset_states = True
    elif current is not None and epoch.position.iterator_kind == "again":
        before = current.position
    last = before.dataset_states if before is not None and before.is_finished else None
    if last is not None and len(last) == num_copies:
        epoch.position.dataset_states = list(last)


def sample_seed_of(loader: DataLoader[Any]) -> int:
    """The seed of the loaded run; else the user's seed of the loader's generator, or of torch."""
    loaded = progress_of(loader).sample_seed
    if loaded is not None:
        return loaded
    return (torch.default_generator if loader.generator is None else loader.generator).initial_seed()


def _return_to(loader: DataLoader[Any], epoch: Epoch, state: Position) -> None:
    """Turn a new epoch into the state's epoch."""
    position = epoch.position
    is_of_other_rank = _check(loader, state)
    if is_of_other_rank and any(copy.has_state for copy in state.dataset_states or ()):
        log.warning(
            "this rank loads the states of a dataset that rank %s saved, which is correct only if the "
            "dataset's state_dict() does not depend on the rank; otherwise save and load a state for "
            "each rank",
            state.rank,
        )
    position.epoch = state.epoch
    reason = state.obstacle or position.obstacle
    if reason is not None and state.num_received:
        raise ResumeError(f"this epoch cannot be resumed after {state.num_received} batches: {reason}")
    if position.obstacle is not None:
        # Without received batches no replay is needed. torch's default generator is the user's: not set.
        sources = Sources(loader)
        sources.set_generators({k: v for k, v in state.generators.items() if k != DEFAULT})
        sources.set_samplers(state.samplers)
        position.generators, position.samplers = sources.generator_states(), sources.sampler_states()
        return
    _set_dataset_states(loader, epoch, state)
    epoch.return_to(state, is_of_other_rank=is_of_other_rank)


def _set_dataset_states(loader: DataLoader[Any], epoch: Epoch, state: Position) -> None:
    theirs, ours = state.dataset_states, epoch.position.dataset_states
    num_theirs, num_ours = (0 if states is None else len(states) for states in (theirs, ours))
    if num_theirs != num_ours:
        if state.num_received:
            raise ResumeError(
                f"the state has a dataset state for each of {num_theirs} workers, but this loader has "
                f"{num_ours}: give it the same dataset and num_workers as before"
            )
        return
    if theirs is None:
        return
    if any(copy.data for copy in theirs) and not keeps_state(loader.dataset):
        raise ResumeError(
            f"the state has states of the dataset, but this loader's, a {type(loader.dataset).__name__}, has "
            "no state_dict() and load_state_dict(): give it the same dataset as before"
        )
    copies = list(theirs)
    is_stream = loader._dataset_kind == _DatasetKind.Iterable
    num_batches = sum(copy.num_to_read_again for copy in copies) if is_stream else 0
    if num_batches > state.num_received:  # Accelerate subtracts batches that it has prefetched
        if len(copies) > 1:
            raise ResumeError(
                f"the state was changed: it has {state.num_received} batches, but workers have read "
                f"{num_batches} of a stream without a state: give the dataset a state_dict(), or use "
                "num_workers=0"
            )
        num_batches = state.num_received
        copies = [copies[0]._replace(num_batches=num_batches)]
    epoch.position.dataset_states, epoch.position.next_worker = copies, state.next_worker
    epoch.loads_dataset_states = True
    if num_batches:
        log.warning(
            "epoch %s is resumed by reading %s batches again and dropping them, because neither the dataset, "
            "a %s, nor its iterator has state_dict() and load_state_dict(): it must give the same samples in "
            "the same order as before",
            *(state.epoch, num_batches, type(loader.dataset).__name__),
        )


def _check(loader: DataLoader[Any], state: Position) -> bool:
    """Whether a different rank saved the state.

    Raises:
        ResumeError: The state is not valid for this loader or for this rank.
    """
    reads_again = any(copy.num_to_read_again for copy in state.dataset_states or ())
    needs_batch_size = loader._dataset_kind == _DatasetKind.Map or reads_again
    return state.is_of_other_rank(*rank_and_order(loader), needs_batch_size=needs_batch_size)


def state_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The position of the loader as a new dict of plain types; starts nothing.

    Raises:
        Exception: An error of a sampler's or a dataset's `state_dict()` within this epoch.
    """
    progress = progress_of(loader)
    if progress.loaded is not None:
        return progress.loaded.to_plain()
    epoch = progress.current
    position = Position(progress.next_number, sample_seed=sample_seed_of(loader))
    if epoch is not None:
        position = epoch.position
    if epoch is not None and not position.is_finished:
        if epoch.error is not None:
            epoch.error.reraise()
        for state in position.dataset_states or ():
            state.raise_error()
        generators, samplers = position.generators, position.samplers
    else:
        # Between epochs, a resumed loader continues with the current states of its own generators.
        sources = Sources(loader)
        generators, samplers = sources.generator_states(with_default=False), sources.sampler_states()
    rank, order = rank_and_order(loader, generators)
    states = position.dataset_states
    if states is not None and position.is_finished and loader._dataset_kind == _DatasetKind.Iterable:
        states = [ENDED] * len(states)
    saved = dataclasses.replace(
        position, generators=generators, samplers=samplers, dataset_states=states, rank=rank, order=order
    )
    return saved.to_plain()


def load(loader: DataLoader[Any], state: dict[str, Any]) -> None:
    """Make the next epoch of the loader resume from the state.

    Raises:
        ResumeError: This is not a state of this release's loader, or a different rank with a different order
            saved it. Nothing has changed.
    """
    saved = Position.parse(state)
    sources = Sources(loader)
    for place in saved.generators.keys() & sources.generators.keys():
        sources.generator_at(place, saved.generators[place])
    _check_nothing_is_missing(loader, sources, saved)
    if not saved.is_within_epoch:
        _check(loader, saved)
    _keep_num_workers(loader, saved)
    if not saved.is_within_epoch:  # set now, so a later set_epoch() takes precedence
        with sources.unchanged_on_error():
            sources.set_generators(saved.generators)
            sources.set_samplers({k: v for k, v in saved.samplers.items() if k in sources.keys})
            _set_own_dataset(loader, saved)
    progress = progress_of(loader)
    progress.loaded = saved
    progress.sample_seed = saved.sample_seed
    progress.next_number = saved.epoch + saved.is_finished


def _check_nothing_is_missing(loader: DataLoader[Any], sources: Sources, state: Position) -> None:
    """Check that the state has each part that determines the loader's batches.

    A loader can have a different kind of sampler than the one that saved the state; that sampler's parts are
    ignored.

    Raises:
        ResumeError: One is missing: the loader would continue from wherever that part happens to be.
    """
    generators, samplers = set(sources.generators), sources.keys
    if rank_and_order(loader)[1].sampler != state.order.sampler:
        generators, samplers = generators & {LOADER}, set()
    missing = {f"generators[{place!r}]" for place in generators - state.generators.keys() - {DEFAULT}}
    missing |= {f"samplers[{key!r}]" for key in samplers - state.samplers.keys()}
    if loader._dataset_kind == _DatasetKind.Map and has_dataset_states(loader):
        copies = state.dataset_states or []
        if any(copy is ENDED or (copy.progress == "begun" and not copy.data) for copy in copies):
            missing.add("dataset_states")
    if missing:
        raise ResumeError(
            f"the state lacks {', '.join(sorted(missing))}, which determines the batches of this loader: "
            "give it the same dataset, sampler and generator as before, or load a different checkpoint"
        )


def _keep_num_workers(loader: DataLoader[Any], state: Position) -> None:
    """Let `num_workers="auto"` choose the number that the state of a dataset needs: one copy for each."""
    auto_workers = getattr(loader, "_auto_workers", None)
    if auto_workers is not None and state.dataset_states is not None:
        number = auto_workers.keep(0 if state.iterator_kind == "local" else len(state.dataset_states))
        loader._set_num_workers(number)  # type: ignore[attr-defined]  # a loader of ours


def _set_own_dataset(loader: DataLoader[Any], state: Position) -> None:
    """Between epochs, set the state of a map-style dataset read without workers."""
    copies = state.dataset_states or []
    is_own = loader._dataset_kind == _DatasetKind.Map and not loader.num_workers
    if is_own and len(copies) == 1 and copies[0].data and has_dataset_states(loader):
        dataset: Any = loader.dataset
        dataset.load_state_dict(copies[0].load())


def set_epoch(loader: DataLoader[Any], number: int) -> None:
    """Set the number of the next epoch, also in samplers and datasets that count epochs.

    Raises:
        TypeError: The number is not an integer.
    """
    number = operator.index(number)
    progress = progress_of(loader)
    progress.next_number = number
    progress.has_set_epoch = True
    for owner in [*Sources(loader).samplers.values(), loader.dataset]:
        tell = getattr(owner, "set_epoch", None)
        if callable(tell):
            tell(number)
