"""The base class of all iterators over an epoch."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, NoReturn

from fastload.system.notes import add_place
from fastload.workers.batch_maker import AT_START

if TYPE_CHECKING:
    import weakref

    from fastload.epochs.position import Position
    from fastload.epochs.stats import Clock
    from fastload.system.remote_error import RemoteError
    from fastload.workers.messages import PendingBatch


class EpochIterator:
    """The base of all iterators.

    Attributes:
        owner: The loader that made it; not kept alive.
        position: Of the epoch. Only `__next__` counts batches as received, so an iterator around this one
            counts them instead.
        turn: Held by the one thread that takes and counts batches.
        clock: Measures the epoch; None: an iterator around this one measures.
        num_workers: The number of workers.
        last: What was asked for with the last batch.
        num_taken: How many batches of the epoch the caller has with the one that `next_sized` returned last;
            None: all that were fetched.
        device_wait_ns: How long `next` has waited for the device to catch up, not for data, so far.
    """

    owner: weakref.ref[Any]
    position: Position
    turn: Any = contextlib.nullcontext()  # an RLock where threads can share the iterator
    clock: Clock | None = None
    num_workers: int
    last: PendingBatch
    num_taken: int | None = None
    device_wait_ns: int = 0

    def next_sized(self) -> tuple[Any, int]:
        """The next batch and how many samples it has."""
        raise NotImplementedError

    def poll_sized(self) -> tuple[Any, int] | None:
        """As `next_sized`; None if the batch would have to be waited for, where the iterator can tell."""
        return self.next_sized()

    def __next__(self) -> Any:
        clock = self.clock
        called_ns, before_ns = time.perf_counter_ns(), self.device_wait_ns
        try:
            batch, num_samples = self.next_sized()
        except StopIteration:
            if clock is not None:
                clock.end(called_ns, self.device_wait_ns - before_ns)
            with self.turn:
                self.position.receive_end()
            raise
        except BaseException:
            if clock is not None:
                clock.count(called_ns, None, self.device_wait_ns - before_ns)
            raise
        if clock is not None:
            clock.count(called_ns, num_samples, self.device_wait_ns - before_ns)
        with self.turn:  # comes last: a batch counts if nothing can keep it from the caller any more
            self.position.receive_until(self.num_taken)
        return batch

    def close(self) -> None:
        """Stop the workers and free the memory; batches that the caller holds stay valid."""


def raise_remote(remote_error: RemoteError, batch: str, unknown_place: str = "") -> NoReturn:
    """Raise the error that a caller gets instead of a batch, with a note of where it occurred.

    Args:
        remote_error: The error.
        batch: The batch and the worker, in words.
        unknown_place: What to say if the error does not say its place.
    """
    try:
        remote_error.reraise()
    except BaseException as error:
        place = remote_error.place or unknown_place
        who = batch.partition(", ")[2] if place == AT_START else batch
        add_place(error, f"{who}, {place}")
        raise
    finally:
        del remote_error  # an error of this process has a traceback that holds this frame
