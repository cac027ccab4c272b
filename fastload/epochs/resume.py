"""Begin, save and resume epochs: what `iter(loader)`, `state_dict()` and `load_state_dict()` do.

A state holds the beginning of the epoch (the states of generators and samplers before anything was drawn, and
the base seed drawn then) and the number of batches that the caller has received since. To resume, the loader
replays the beginning in the same order, and skips the indices of that many batches; it reads no samples. See
`EpochCursor` for the states of a position.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from fastload.batch.dataset_state import ENDED, NOT_BEGUN, DatasetState, keeps_state
from fastload.epochs import saved_cursor
from fastload.epochs.cursor import EpochCursor
from fastload.epochs.loader_state import state_of
from fastload.epochs.sampler_state import (
    DEFAULT,
    LOADER,
    OrderSources,
    is_drawn_from_seed,
    length_or_none,
    rank_and_facts,
    sharding_of,
)
from fastload.errors import ResumeError
from fastload.rng.keys import occurrence_counter
from fastload.system.checks import as_int
from fastload.system.logs import log, say_once
from fastload.system.remote_error import RemoteError
from fastload.system.torch_private import has_auto_collation, is_iterable
from fastload.workers.settings import pool_type_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader

_OUT_OF_ORDER = (
    "with in_order=False, batches do not come in the order of the sampler: save a state between epochs, or "
    "use in_order=True"
)


def current_cursor(loader: Any) -> EpochCursor:
    """The cursor of the epoch that this loader's iterators began last."""
    cursor = state_of(loader).cursor
    if cursor is None:
        raise AssertionError("an iterator begins an epoch before it is asked for a batch")
    return cursor


def make_iterator(loader: DataLoader[Any], make: Callable[[], Any]) -> Any:
    """The iterator that ``make`` returns; if ``make`` raises, the loader keeps its position.

    A loaded state then stays loaded, and all generators and samplers are restored, so the next `iter(loader)`
    begins at the same place. Without a loaded state, the loader's generator stays as torch leaves it.
    """
    state = state_of(loader)
    before = state.next_epoch, state.cursor, state.loaded
    try:
        if state.loaded is None:
            return make()
        with OrderSources(loader).unchanged_on_error():
            return make()
    except BaseException:
        state.next_epoch, state.cursor, state.loaded = before
        raise


def warn_of_unknown_position(loader: DataLoader[Any]) -> None:
    """Warn once if a subclass makes its own iterators, whose batches are not counted.

    An error would end training while it saves a checkpoint.
    """
    state, kind = state_of(loader), type(loader)
    is_counted = state.cursor is not None or state.loaded is not None
    methods: list[Any] = [kind.__iter__, kind._get_iterator]
    if is_counted or state.has_warned or all(m.__module__.startswith("fastload.") for m in methods):
        return
    state.has_warned = True
    log.warning(
        "the state of this %s is that of the beginning of an epoch. If it makes its iterators by itself, its "
        "position is unknown: define state_dict() and load_state_dict() in the class, or take the batches "
        "from super().__iter__() and super()._get_iterator()",
        kind.__name__,
    )


def begin_epoch(loader: DataLoader[Any], iterator_kind: str, reason: str | None = None) -> EpochCursor:
    """Begin a new epoch, or the epoch of a loaded state, before anything is drawn for it.

    Args:
        loader: The loader whose epoch begins.
        iterator_kind: See EpochCursor.
        reason: Why the epoch cannot be resumed in the middle.

    Raises:
        ResumeError: The loaded state is in the middle of an epoch, and this loader cannot resume there.
    """
    state = state_of(loader)
    loaded, state.loaded = state.loaded, None  # `make_iterator` restores it after an error
    sources = OrderSources(loader)
    cursor = EpochCursor(state.next_epoch, iterator_kind, sources.generator_states(), why_unresumable=reason)
    cursor.is_iterable = is_iterable(loader)
    cursor.checks_some = is_drawn_from_seed(loader)
    try:
        cursor.samplers = sources.sampler_states()
    except Exception:  # noqa: BLE001  # fails no epoch; raised when the loader's state is requested
        cursor.error = RemoteError.current("in a sampler's state_dict()")
    if reason is None and has_dataset_states(loader):
        _begin_dataset_states(loader, cursor, loaded)
    if loaded is not None and loaded.is_within_epoch:
        _resume_at(loader, cursor, loaded)
    elif loaded is not None and reason is None and _has_persistent_workers(loader, loaded, iterator_kind):
        cursor.follow(loaded)
    if iterator_kind != "local" and not loader.in_order:
        cursor.why_unresumable = reason or _OUT_OF_ORDER
    cursor.sample_seed = sample_seed_of(loader)
    transforms = (getattr(loader, name, None) for name in ("batch_transform", "device_transform"))
    if any(transform is not None for transform in transforms):
        cursor.rank = sharding_of(loader)[0]
    if getattr(loader, "seeding", "worker") == "sample":
        num_samples = length_or_none(loader.dataset) or 0
        cursor.count_occurrences = occurrence_counter(num_samples, auto_collation=has_auto_collation(loader))
    state.next_epoch = cursor.epoch + 1
    state.cursor = cursor
    return cursor


def _has_persistent_workers(loader: DataLoader[Any], loaded: EpochCursor, iterator_kind: str) -> bool:
    """Whether a state between two epochs was saved while workers waited for the next epoch."""
    had_workers = loaded.is_finished and loaded.iterator_kind in ("workers", "again")
    return had_workers and iterator_kind == "workers" and loader.persistent_workers


def why_unresumable(loader: DataLoader[Any]) -> str | None:
    """Why an epoch of this loader cannot be resumed in the middle; None if it can."""
    dataset = loader.dataset
    if not is_iterable(loader) or keeps_state(dataset):
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
    if is_iterable(loader):
        return True
    pool_type = pool_type_of(getattr(loader, "worker_type", "process"))
    shares = loader.num_workers > 0 and pool_type.uses_threads
    return not shares and not isinstance(loader.dataset, torch.nn.Module) and keeps_state(loader.dataset)


def _begin_dataset_states(loader: DataLoader[Any], cursor: EpochCursor, loaded: EpochCursor | None) -> None:
    """Set the states of the copies of the dataset before the first batch of an epoch.

    A map-style dataset in persistent workers enters an epoch with the state in which it left the previous
    one. An iterable-style dataset starts over.
    """
    num_copies = max(1, loader.num_workers)
    cursor.dataset_states = [NOT_BEGUN] * num_copies
    if cursor.is_iterable or not loader.persistent_workers:
        return
    before = loaded
    if loaded is not None:
        cursor.loads_dataset_states = True
    elif cursor.iterator_kind == "again":
        before = state_of(loader).cursor
    last = before.dataset_states if before is not None and before.is_finished else None
    if last is not None and len(last) == num_copies:
        cursor.dataset_states = list(last)


def sample_seed_of(loader: DataLoader[Any]) -> int:
    """The seed of the loaded run; else the user's seed of the loader's generator, or of torch."""
    seed = state_of(loader).sample_seed
    if seed is not None:
        return seed
    return (torch.default_generator if loader.generator is None else loader.generator).initial_seed()


def _resume_at(loader: DataLoader[Any], cursor: EpochCursor, loaded: EpochCursor) -> None:
    """Turn a new epoch into the loaded one."""
    is_of_other_rank = _check(loader, loaded)
    if is_of_other_rank and any(copy.has_state for copy in loaded.dataset_states or ()):
        log.warning(
            "this rank loads the states of a dataset that rank %s saved, which is correct only if the "
            "dataset's state_dict() does not depend on the rank; otherwise save and load a state for "
            "each rank",
            loaded.rank,
        )
    cursor.epoch = loaded.epoch
    reason = loaded.why_unresumable or cursor.why_unresumable
    if reason is not None and loaded.num_received:
        raise ResumeError(f"this epoch cannot be resumed after {loaded.num_received} batches: {reason}")
    if cursor.why_unresumable is not None:
        # Without received batches no replay is needed. torch's default generator is the user's: not set.
        sources = OrderSources(loader)
        sources.set_generators({k: v for k, v in loaded.generators.items() if k != DEFAULT})
        sources.set_samplers(loaded.samplers)
        cursor.generators, cursor.samplers = sources.generator_states(), sources.sampler_states()
        return
    _set_dataset_states(loader, cursor, loaded)
    cursor.resume_at(loaded, is_of_other_rank=is_of_other_rank)


def _set_dataset_states(loader: DataLoader[Any], cursor: EpochCursor, loaded: EpochCursor) -> None:
    num_saved, num_own = (len(states or ()) for states in (loaded.dataset_states, cursor.dataset_states))
    if num_saved != num_own:
        if loaded.num_received:
            raise ResumeError(
                f"the state has a dataset state for each of {num_saved} workers, but this loader has "
                f"{num_own}: give it the same dataset and num_workers as before"
            )
        return
    if loaded.dataset_states is None:
        return
    copies = list(loaded.dataset_states)
    if any(copy.data for copy in copies) and not keeps_state(loader.dataset):
        raise ResumeError(
            f"the state has states of the dataset, but this loader's, a {type(loader.dataset).__name__}, has "
            "no state_dict() and load_state_dict(): give it the same dataset as before"
        )
    num_batches = sum(copy.num_to_read_again for copy in copies) if cursor.is_iterable else 0
    if num_batches > loaded.num_received:  # Accelerate subtracts batches that it has prefetched
        if len(copies) > 1:
            raise ResumeError(
                f"the state was changed: it has {loaded.num_received} batches, but workers have read "
                f"{num_batches} of a stream without a state: give the dataset a state_dict(), or use "
                "num_workers=0"
            )
        num_batches = loaded.num_received
        copies = [copies[0]._replace(num_batches=num_batches)]
    cursor.dataset_states, cursor.next_worker = copies, loaded.next_worker
    cursor.loads_dataset_states = True
    if num_batches:
        log.warning(
            "epoch %s is resumed by reading %s batches again and dropping them, because neither the dataset, "
            "a %s, nor its iterator has state_dict() and load_state_dict(): it must give the same samples in "
            "the same order as before",
            *(loaded.epoch, num_batches, type(loader.dataset).__name__),
        )


_FACTS = {  # as errors name them
    "batch_size": "batch_size",
    "num_ranks": "number of ranks",
    "num_nodes": "number of nodes",
    "num_samples": "length of the dataset",
    "sampler": "kind of sampler",
    "seed": "seed of the sampler",
}


def _check(loader: DataLoader[Any], loaded: EpochCursor) -> bool:
    """Whether another rank saved the state.

    Raises:
        ResumeError: The state is valid neither for this loader nor for this rank.
    """
    rank, sharding = rank_and_facts(loader)
    is_of_other_rank = None not in (loaded.rank, rank) and loaded.rank != rank
    skips = loaded.is_within_epoch and loaded.num_received > 0
    reads_again = any(copy.num_to_read_again for copy in loaded.dataset_states or ())
    is_split = sharding.num_ranks is not None
    is_compared = {
        "batch_size": skips and (reads_again or not is_iterable(loader)),
        "num_ranks": skips,
        "num_nodes": skips,
        "num_samples": skips and is_of_other_rank,
        "sampler": skips and is_of_other_rank,
        "seed": is_of_other_rank and (skips if is_split else loaded.sharding.num_ranks is None),
    }
    for name, description in _FACTS.items():
        saved, own = getattr(loaded.sharding, name), getattr(sharding, name)
        if is_compared[name] and None not in (saved, own) and saved != own:
            raise ResumeError(
                f"the state was saved by a loader with {description} {saved}, after "
                f"{loaded.num_received} batches, but this loader has {own}: give it {saved}, or load a "
                "state that was saved between two epochs, or one for each rank"
            )
    return is_of_other_rank


def state_dict(loader: DataLoader[Any]) -> dict[str, Any]:
    """The position of the loader as a new dict of plain types; starts nothing.

    Raises:
        Exception: An error of a sampler's or a dataset's `state_dict()` within this epoch.
    """
    state = state_of(loader)
    if state.loaded is not None:
        return saved_cursor.to_dict(state.loaded)
    cursor = state.cursor or EpochCursor(state.next_epoch, sample_seed=sample_seed_of(loader))
    if cursor.is_within_epoch:
        if cursor.why_unresumable == _OUT_OF_ORDER:
            say_once(f"state_dict() was called within an epoch that cannot be resumed: {_OUT_OF_ORDER}")
        if cursor.error is not None:
            cursor.error.reraise()
        for dataset_state in cursor.dataset_states or ():
            dataset_state.raise_error()
        generators, samplers = cursor.generators, cursor.samplers
    else:
        # Between epochs, a resumed loader continues with the current states of its own generators.
        sources = OrderSources(loader)
        generators, samplers = sources.generator_states(with_default=False), sources.sampler_states()
    states = cursor.dataset_states
    if states is not None and cursor.is_finished and cursor.is_iterable:
        states = [ENDED] * len(states)
    saved = dataclasses.replace(cursor, generators=generators, samplers=samplers, dataset_states=states)
    saved.rank, saved.sharding = rank_and_facts(loader, generators)
    return saved_cursor.to_dict(saved)


def load(loader: DataLoader[Any], saved: dict[str, Any]) -> None:
    """Make the next epoch of the loader resume from the state.

    Raises:
        ResumeError: This is not a state of this release's loader, or another rank with another order saved
            it. Nothing has changed.
    """
    loaded = saved_cursor.from_dict(saved)
    sources = OrderSources(loader)
    for place in loaded.generators.keys() & sources.generators.keys():
        sources.generator_at(place, loaded.generators[place])  # raises now if it is damaged
    _check_complete(loader, sources, loaded)
    if not loaded.is_within_epoch:
        _check(loader, loaded)
    if not loaded.is_within_epoch:  # set now, so a later set_epoch() takes precedence
        with sources.unchanged_on_error():
            sources.set_generators(loaded.generators)
            sources.set_samplers({k: v for k, v in loaded.samplers.items() if k in sources.keys})
            if not loader.num_workers:
                _set_own_dataset(loader, loaded)
    state = state_of(loader)
    state.loaded = loaded
    state.sample_seed = loaded.sample_seed
    state.next_epoch = loaded.epoch + loaded.is_finished


def has_no_rest(loader: DataLoader[Any]) -> bool:
    """Whether a state was loaded that was saved after the last batch of an epoch, but before its end."""
    loaded = state_of(loader).loaded
    if loaded is None or not loaded.is_within_epoch:
        return False
    try:
        return loaded.num_received >= len(loader)
    except (TypeError, NotImplementedError):  # a sampler without a length
        return False


def _check_complete(loader: DataLoader[Any], sources: OrderSources, loaded: EpochCursor) -> None:
    """Check that the state has each part that determines the loader's batches.

    The sampler may be of another kind than the one of the state; the parts of that one are then ignored.

    Raises:
        ResumeError: One is missing: the loader would continue from wherever that part happens to be.
    """
    generators, samplers = set(sources.generators), sources.keys
    if rank_and_facts(loader)[1].sampler != loaded.sharding.sampler:
        generators, samplers = generators & {LOADER}, set()
    missing = {f"generators[{place!r}]" for place in generators - loaded.generators.keys() - {DEFAULT}}
    missing |= {f"samplers[{key!r}]" for key in samplers - loaded.samplers.keys()}
    if not is_iterable(loader) and has_dataset_states(loader):
        copies = loaded.dataset_states or []
        if any(copy is ENDED or (copy.progress == "begun" and not copy.data) for copy in copies):
            missing.add("dataset_states")
    if missing:
        raise ResumeError(
            f"the state lacks {', '.join(sorted(missing))}, which determines the batches of this loader: "
            "give it the same dataset, sampler and generator as before, or load another checkpoint"
        )


def _set_own_dataset(loader: DataLoader[Any], loaded: EpochCursor) -> None:
    """Between epochs, set the state of a map-style dataset read without workers; an error changes nothing."""
    copies, dataset = loaded.dataset_states or [], loader.dataset
    if is_iterable(loader) or isinstance(dataset, torch.nn.Module) or not keeps_state(dataset):
        return
    if len(copies) == 1 and copies[0].data:
        before = DatasetState.of(dataset.state_dict())  # type: ignore[attr-defined]  # as `keeps_state` says
        try:
            dataset.load_state_dict(copies[0].load())  # type: ignore[attr-defined]
        except BaseException:
            with contextlib.suppress(Exception):  # the caller must see the first error
                dataset.load_state_dict(before.load())  # type: ignore[attr-defined]
            raise


def set_epoch(loader: DataLoader[Any], number: int) -> None:
    """Set the number of the next epoch, also in samplers and datasets that count epochs.

    Raises:
        TypeError: The number is not an integer.
    """
    number = as_int("epoch", number)
    state = state_of(loader)
    state.next_epoch = number
    state.has_set_epoch = True
    for owner in [*OrderSources(loader).samplers.values(), loader.dataset]:
        tell = getattr(owner, "set_epoch", None)
        if callable(tell):
            tell(number)
