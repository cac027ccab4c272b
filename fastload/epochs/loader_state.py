"""What is alive of a loader, beside its settings: iterators, position, figures, buffers, streams."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastload.epochs.stats import Recorder

if TYPE_CHECKING:
    from fastload.batch.failures import FailedSample
    from fastload.device.devices import Backend
    from fastload.epochs.cursor import EpochCursor
    from fastload.epochs.iterator import EpochIterator
    from fastload.memory.lease import BufferPool


@dataclass(eq=False)
class LoaderState:
    """The live state of one loader; each group of fields belongs to the file named above it."""

    owner: weakref.ref[Any] | None = None  # the loader; see `state_of`

    # loader.py. close() closes these; `keyrefs()` copies them atomically.
    iterators: weakref.WeakKeyDictionary[EpochIterator, None] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    has_searched_generators: bool = False  # for a warning about generators that cannot be seeded

    # resume.py
    cursor: EpochCursor | None = None  # of the epoch that an iterator began last
    loaded: EpochCursor | None = None  # by load_state_dict(), until the next iter(loader)
    next_epoch: int = 0
    has_set_epoch: bool = False  # whether the user called set_epoch()
    sample_seed: int | None = None  # of the run that was loaded
    has_warned: bool = False  # that the position is unknown

    # stats.py, through `recorder_of`
    recorder: Recorder = field(default_factory=Recorder)

    # batch/failures.py: of all epochs, in the order in which the caller received the batches
    failed_samples: list[FailedSample] = field(default_factory=list)

    # on_device.py: by device, its backend and the one stream that all epochs copy on
    copy_streams: dict[str, tuple[Backend, Any]] = field(default_factory=dict)

    # without_workers.py: buffers whose pages stay warm between epochs, and their current user
    buffers: tuple[BufferPool, weakref.ref[Any]] | None = None

    # rank_consistency.py: the key to compare with other ranks at the first epoch
    rank_key: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return LoaderState, ()  # without an owner: an unpickled or deeply copied loader begins anew


_NAME = "_fastload_state"


def state_of(loader: Any) -> LoaderState:
    """The live state of this loader object; a new one if it has none yet."""
    # Frameworks copy the attributes of a loader into another one, and loaders are pickled: neither may carry
    # workers, streams or a position along, so a state knows its owner. It is an attribute all the same: a
    # `log_stats` callback can refer to the loader, and a WeakKeyDictionary would then keep both forever.
    attributes = vars(loader)
    state: LoaderState | None = attributes.get(_NAME)
    if state is None:  # setdefault: threads can ask for the first time together
        state = attributes.setdefault(_NAME, LoaderState(weakref.ref(loader)))
    if state.owner is None or state.owner() is not loader:
        state = attributes[_NAME] = LoaderState(weakref.ref(loader))
    return state


def recorder_of(loader: Any) -> Recorder:
    """The figures of this loader in this process."""
    state = state_of(loader)
    if state.recorder.pid != os.getpid():  # those of the process that forked this one
        state.recorder = Recorder()
    return state.recorder
