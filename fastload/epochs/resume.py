"""Save and resume the position in an epoch: `state_dict()` and `load_state_dict()` of the loader.

A state holds the beginning of the epoch (the states of generators and samplers before anything was drawn, and
the base seed that was drawn then) and the number of batches that the caller has received since. To resume,
the loader replays the beginning in the same order, and skips the indices of that many batches; it reads no
sample. Rules:

1. A state counts the batches that the caller received, not those that workers have fetched ahead.
2. torch's default generator belongs to the user: resuming leaves it unchanged.
3. If a sampler gives other indices the second time, a checksum shows it, and an error is raised. The ranks
   of a run may load the state of one of them: then the facts that are common to the ranks are compared
   instead (see `order`).
4. An `iter(loader)` that fails changes nothing: a loaded state stays loaded.
5. An error of a user's `state_dict()` fails no epoch and no batch: it is raised when a state is requested.
6. The batches of an iterator that a subclass makes by itself are not counted. A state then is that of the
   beginning of an epoch, with a warning: an error would end a training while it saves a checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from fastload.batch.iterable_state import ENDED, NOT_BEGUN, keeps_state
from fastload.epochs.epoch import Epoch
from fastload.epochs.order import length_or_none, rank_and_order, rank_of
from fastload.epochs.position import Position
from fastload.epochs.sampler_state import (
    DEFAULT,
    LOADER,
    check_generators,
    fitting,
    generators_of,
    sampler_keys,
    samplers_by_place,
    samplers_of,
    set_generators,
    set_samplers,
    unchanged_on_error,
)
from fastload.errors import BatchLostError, ResumeError, add_note
from fastload.rng.sample_streams import StreamCounter
from fastload.system.logs import log
from fastload.system.sent_error import SentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader


class Progress:
    """The record of one loader's epochs."""

    def __init__(self) -> None:
        self.next_number = 0
        self.has_set_epoch = False
        self.current: Epoch | None = None
        self.loaded: Position | None = None
        self.sample_seed: int | None = None  # the seed of the run that was loaded
        # None unless a subclass returned an iterator before an epoch began here. If the iterator is a
        # generator and alive, a call gives it.
        self.other_iterator: Callable[[], types.GeneratorType[Any, Any, Any] | None] | None = None
        self.has_warned = False

    @property
    def counts_batches(self) -> bool:
        """Whether an epoch has begun here, which is that of the loaded state if there is one."""
        return self.current is not None and self.loaded is None


def _no_generator() -> None:
    return None


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

    A loaded state then stays loaded, and all generators and samplers are restored, so that another
    `iter(loader)` begins at the same place. Without a loaded state, the loader's generator stays as torch
    leaves it.
    """
    progress = progress_of(loader)
    before = progress.next_number, progress.current, progress.loaded
    try:
        if progress.loaded is None:
            return make()
        with unchanged_on_error(loader):
            return make()
    except BaseException:
        progress.next_number, progress.current, progress.loaded = before
        raise


def note_iterators_of(subclass: Any) -> None:
    """Note from now on what the `__iter__` of a subclass returns, if the subclass defines one."""
    make: Any = vars(subclass).get("__iter__")
    if not isinstance(make, types.FunctionType):
        return

    @functools.wraps(make)
    def __iter__(self: Any) -> Any:  # noqa: N807  # its name in tracebacks
        return noted(self, make(self))

    subclass.__iter__ = __iter__


def noted(loader: DataLoader[Any], iterator: Any) -> Any:
    """Note an iterator that is about to be returned to the caller, and return it.

    The iterator of a subclass may never begin an epoch here, and then nobody counts its batches. A generator
    is noted when it starts to run, because one that never runs has delivered no batch.
    """
    progress = progress_of(loader)
    if progress.counts_batches:
        return iterator
    if type(iterator) is types.GeneratorType:
        return _noted_at_its_start(progress, iterator)
    progress.other_iterator = _no_generator
    return iterator


def _noted_at_its_start(progress: Progress, generator: types.GeneratorType[Any, Any, Any]) -> Any:
    progress.other_iterator = weakref.ref(generator)
    return (yield from generator)


def warn_of_unknown_position(loader: DataLoader[Any]) -> None:
    """Warn once if a subclass without a `state_dict()` made an iterator, whose batches nobody counts."""
    progress = progress_of(loader)
    if progress.counts_batches or progress.other_iterator is None or progress.has_warned:
        return
    generator = progress.other_iterator()
    if generator is not None and generator.gi_running:
        return  # it asks for the state itself, before it calls super().__iter__()
    progress.has_warned = True
    log.warning(
        "the state of this loader is that of the beginning of an epoch, because its position is unknown: %s "
        "makes its iterators by itself, so that fastload does not count the batches that the caller has "
        "received. A training that resumes from this state repeats them. Define state_dict() and "
        "load_state_dict() in %s, or let its __iter__() take the batches from super().__iter__(), and its "
        "_get_iterator() from super()._get_iterator()",
        *(type(loader).__name__, type(loader).__name__),
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
    samplers = samplers_by_place(loader)
    generators = generators_of(loader, samplers)
    position = Position(progress.next_number, iterator_kind, generators, obstacle=obstacle)
    epoch = Epoch(position, is_iterable=loader._dataset_kind == _DatasetKind.Iterable)
    try:
        position.samplers = samplers_of(samplers)
    except Exception:  # noqa: BLE001  # fails no epoch; raised when the loader's state is requested
        epoch.error = SentError.current("in a sampler's state_dict()")
    if obstacle is None and has_dataset_states(loader):
        _begin_dataset_states(loader, epoch, state)
    if state is not None and state.is_within_epoch:
        _return_to(loader, epoch, state)
    elif state is not None and obstacle is None and _has_persistent_workers(loader, state, iterator_kind):
        epoch.go_on_from(state)
    position.sample_seed = sample_seed_of(loader)
    if getattr(loader, "rng", "worker") == "sample":
        num_samples = length_or_none(loader.dataset) or 0
        epoch.stream_counter = StreamCounter(
            position.sample_seed, position.epoch, num_samples, auto_collation=loader._auto_collation
        )
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
        return None  # its iterator may keep a state; otherwise its batches are read again
    return (
        "the iterable-style dataset has a state that fastload cannot save or load; use a map-style dataset, "
        "or give it methods that fastload can call: it calls state_dict() without arguments and "
        f"load_state_dict() with only the state, but {type(dataset).__name__} lacks one of them, or they "
        "need other arguments"
    )


def has_dataset_states(loader: DataLoader[Any]) -> bool:
    """Whether a state of the loader has a state of each worker's copy of the dataset.

    Worker threads share the dataset, so that a batch has no state of its own. A module's `state_dict()` has
    its weights.
    """
    if loader._dataset_kind == _DatasetKind.Iterable:
        return True
    shares = loader.num_workers > 0 and getattr(loader, "worker_method", "process") == "thread"
    return not shares and not isinstance(loader.dataset, torch.nn.Module) and keeps_state(loader.dataset)


def _begin_dataset_states(loader: DataLoader[Any], epoch: Epoch, state: Position | None) -> None:
    """Set the states of the copies of the dataset before the first batch of an epoch.

    A map-style dataset in persistent workers enters an epoch with the state in which it left the epoch
    before. An iterable-style dataset starts over.
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
    """The seed of the run that was loaded; else the user's seed of the loader's generator, or of torch."""
    loaded = progress_of(loader).sample_seed
    if loaded is not None:
        return loaded
    return (torch.default_generator if loader.generator is None else loader.generator).initial_seed()


def _return_to(loader: DataLoader[Any], epoch: Epoch, state: Position) -> None:
    """Turn a new epoch into the epoch of the state."""
    position = epoch.position
    is_of_other_rank = _check(loader, state)
    if is_of_other_rank and any(copy.has_state for copy in state.dataset_states or ()):
        log.warning(
            "rank %s loads the states of a dataset that rank %s saved: they are right only if the dataset's "
            "state_dict() does not depend on the rank; otherwise, save and load a state for each rank",
            rank_of(loader),
            state.rank,
        )
    position.epoch = state.epoch
    reason = state.obstacle or position.obstacle
    if reason is not None and state.num_received:
        raise ResumeError(f"this epoch cannot be resumed after {state.num_received} batches: {reason}")
    if position.obstacle is not None:
        # Without received batches no replay is needed. torch's default generator is the user's: not set.
        set_generators(loader, {k: v for k, v in state.generators.items() if k != DEFAULT})
        set_samplers(loader, state.samplers)
        samplers = samplers_by_place(loader)
        position.generators, position.samplers = generators_of(loader, samplers), samplers_of(samplers)
        return
    _set_dataset_states(loader, epoch, state)
    epoch.return_to(state, is_of_other_rank=is_of_other_rank)


def _set_dataset_states(loader: DataLoader[Any], epoch: Epoch, state: Position) -> None:
    theirs, ours = state.dataset_states, epoch.position.dataset_states
    num_theirs, num_ours = (0 if states is None else len(states) for states in (theirs, ours))
    if num_theirs != num_ours:
        if state.num_received:
            raise ResumeError(
                f"the state was saved with copies of the dataset, which have a state each, in {num_theirs} "
                f"workers, but this loader has {num_ours}: give it the same dataset and num_workers as before"
            )
        return
    if theirs is None:
        return
    if any(copy.data for copy in theirs) and not keeps_state(loader.dataset):
        raise ResumeError(
            "the state has the states of a dataset with state_dict() and load_state_dict(), but this "
            f"loader's dataset, a {type(loader.dataset).__name__}, lacks them: give it the same dataset as "
            "before"
        )
    copies = list(theirs)
    num_batches = (
        sum(copy.num_to_read_again for copy in copies) if loader._dataset_kind == _DatasetKind.Iterable else 0
    )
    if num_batches > state.num_received:  # Accelerate takes off batches that it has prefetched
        if len(copies) > 1:
            raise ResumeError(
                f"the state was changed: it has {state.num_received} batches, but the workers have read "
                f"{num_batches} batches of a stream without a state: give the dataset state_dict() and "
                "load_state_dict(), or use num_workers=0"
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
            state.epoch,
            num_batches,
            type(loader.dataset).__name__,
        )


def _check(loader: DataLoader[Any], state: Position) -> bool:
    """Whether another rank saved the state.

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
    if epoch is None:
        position = Position(progress.next_number, sample_seed=sample_seed_of(loader))
    else:
        position = epoch.position
    if epoch is not None and not position.is_finished:
        _raise_errors(epoch)
        generators, samplers = position.generators, position.samplers
    else:
        # Between epochs, a resumed loader continues with the current states of its own generators.
        held = samplers_by_place(loader)
        generators = {k: v for k, v in generators_of(loader, held).items() if k != DEFAULT}
        samplers = samplers_of(held)
    rank, order = rank_and_order(loader, generators)
    states = position.dataset_states
    if states is not None and position.is_finished and loader._dataset_kind == _DatasetKind.Iterable:
        states = [ENDED] * len(states)
    saved = dataclasses.replace(
        position, generators=generators, samplers=samplers, dataset_states=states, rank=rank, order=order
    )
    return saved.to_plain()


def _raise_errors(epoch: Epoch) -> None:
    """Raise the error of a `state_dict()` that this epoch's state needs, if there was one."""
    try:
        if epoch.error is not None:
            epoch.error.reraise()
        for state in epoch.position.dataset_states or ():
            state.raise_error()
    except BatchLostError:
        raise
    except Exception as error:
        add_note(
            error,
            f"fastload: a state_dict() raised this in the first {epoch.position.num_received} batches of "
            f"epoch {epoch.position.epoch}; the loader kept the error until its state was requested, and "
            "lost no batch",
        )
        raise


def load(loader: DataLoader[Any], state: dict[str, Any]) -> None:
    """Make the next epoch of the loader resume from the state.

    Raises:
        ResumeError: This is not a state of this release's loader, or another rank saved it whose order is
            not this rank's. Nothing has changed.
    """
    saved = Position.parse(state)
    check_generators(loader, saved.generators)
    _check_nothing_is_missing(loader, saved)
    if not saved.is_within_epoch:
        _check(loader, saved)
    _keep_num_workers(loader, saved)
    if not saved.is_within_epoch:  # set now, so that a later set_epoch() takes precedence
        with unchanged_on_error(loader):
            set_generators(loader, {k: v for k, v in saved.generators.items() if k != DEFAULT})
            set_samplers(loader, fitting(loader, saved.samplers))
            _set_own_dataset(loader, saved)
    progress = progress_of(loader)
    progress.loaded = saved
    progress.other_iterator = None
    progress.sample_seed = saved.sample_seed
    progress.next_number = saved.epoch + saved.is_finished


def _check_nothing_is_missing(loader: DataLoader[Any], state: Position) -> None:
    """Check that the state has each part that determines the loader's batches.

    A loader can have a different kind of sampler than the one that saved the state: that one's parts are
    no business of its.

    Raises:
        ResumeError: One is missing: the loader would go on from where that one happens to be.
    """
    held = samplers_by_place(loader)
    generators, samplers = set(generators_of(loader, held)), sampler_keys(held)
    if rank_and_order(loader)[1].sampler != state.order.sampler:
        generators, samplers = generators & {LOADER}, set()
    missing = [f"the generator of the {place}" for place in generators - state.generators.keys() - {DEFAULT}]
    missing += [repr(key) for key in samplers - state.samplers.keys()]
    if loader._dataset_kind == _DatasetKind.Map and has_dataset_states(loader):
        copies = state.dataset_states or []
        missing += [
            f"the dataset's state in dataset_states[{number}]"
            for number, copy in enumerate(copies)
            if copy is ENDED or (copy.progress == "begun" and not copy.data)
        ]
    if missing:
        raise ResumeError(
            f"the state lacks {', '.join(sorted(missing))}, which decides on the batches of this loader: "
            "give the loader the dataset, sampler and generator with which the state was saved, or load "
            "another checkpoint"
        )


def _keep_num_workers(loader: DataLoader[Any], state: Position) -> None:
    """Let `num_workers="auto"` choose the number that the state of a dataset needs: one copy for each."""
    auto_workers = getattr(loader, "_auto_workers", None)
    if auto_workers is not None and state.dataset_states is not None:
        auto_workers.keep(0 if state.iterator_kind == "local" else len(state.dataset_states))
        loader._set_num_workers(auto_workers.number)  # type: ignore[attr-defined]  # a loader of ours


def _set_own_dataset(loader: DataLoader[Any], state: Position) -> None:
    """Between epochs, set the state of a map-style dataset that is read without workers."""
    copies = state.dataset_states or []
    is_own = loader._dataset_kind == _DatasetKind.Map and not loader.num_workers
    if is_own and len(copies) == 1 and copies[0].data and has_dataset_states(loader):
        dataset: Any = loader.dataset
        dataset.load_state_dict(copies[0].load())


def set_epoch(loader: DataLoader[Any], number: int) -> None:
    """Give the next epoch this number, also in samplers and datasets that count epochs.

    Raises:
        TypeError: The number is not an integer.
    """
    number = operator.index(number)
    progress = progress_of(loader)
    progress.next_number = number
    progress.has_set_epoch = True
    for owner in [*samplers_by_place(loader).values(), loader.dataset]:
        tell = getattr(owner, "set_epoch", None)
        if callable(tell):
            tell(number)
