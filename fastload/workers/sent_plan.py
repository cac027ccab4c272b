"""What workers run (dataset and settings), and how it gets to worker processes: pickled once for all.

Under fork nothing is pickled. Under spawn and forkserver the parent pickles the plan once into a segment.
Each worker gets the segment's descriptor, and duplicates of the descriptors that the plan refers to (pipes of
locks and queues, shared tensors, caches). Functions and classes without a name that workers can import travel
by value, if cloudpickle is installed (see `by_value`).
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
from multiprocessing import context, reduction
from typing import TYPE_CHECKING, Any

from fastload.errors import FastloadError, WorkerStartError
from fastload.memory.segment import Segment, round_up
from fastload.system import by_value
from fastload.system.notes import add_note

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.batch.plan import Plan

    _Way = Callable[[Any, io.BytesIO, Callable[[pickle.PickleBuffer], bool]], None]


class PickledPlan:
    """A plan as a segment and its descriptors; can be pickled for a process that is being started."""

    def __init__(self, segment: Segment, sizes: list[int], fds: list[int]) -> None:
        self._segment = segment
        self._sizes = sizes
        self._fds = fds

    def load(self) -> Plan:
        """Unpickle the plan, in the worker.

        Large arrays are views of private copy-on-write pages: all workers share the pages they do not change.

        Raises:
            WorkerStartError: The worker cannot import a class or unpickle an object.
            FastloadError: The worker cannot open a cache.
        """
        pages = mmap.mmap(
            self._segment.fd, self._segment.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        )
        parts = []
        offset = 0
        for size in self._sizes:
            parts.append(memoryview(pages)[offset : offset + size])
            offset += round_up(size, mmap.PAGESIZE)
        _received_fds[:] = self._fds
        try:
            return pickle.loads(parts[0], buffers=parts[1:])  # type: ignore[no-any-return]
        except FastloadError:
            raise  # of a cache that this process cannot open
        except Exception as error:  # the user's objects can raise anything
            raise WorkerStartError(
                f"a worker cannot unpickle the dataset, or what is sent with it: {type(error).__name__}: "
                f"{error}. Workers that are spawned or come from a fork server import classes and functions "
                "by name: define them at the top level of a module file that they can import, not at a "
                "prompt, in a notebook, or under `if __name__ == '__main__':`"
                f"{_or_install()}. Open files and connections on first use, not in __setstate__ or a "
                'constructor. Or use multiprocessing_context="fork"'
            ) from error
        finally:
            _received_fds.clear()
            self.close()

    def close(self) -> None:
        """Close the descriptors; the parent calls this once all workers have been started."""
        self._segment.close()
        _close_all(self._fds)

    def __reduce__(self) -> tuple[Any, ...]:
        duplicates = [reduction.DupFd(fd) for fd in self._fds]
        return _attach_plan, (self._segment, self._sizes, duplicates)


def _attach_plan(segment: Segment, sizes: list[int], duplicates: list[Any]) -> PickledPlan:
    return PickledPlan(segment, sizes, [duplicate.detach() for duplicate in duplicates])


def _or_install() -> str:
    return "" if by_value.is_possible() else f"; or {by_value.ADVICE}"


def pickle_plan(plan: Plan) -> PickledPlan:
    """Pickle ``plan`` once for any number of workers.

    Raises:
        Exception: The error of pickle, with a note that names the attribute that cannot be pickled.
    """
    ways = _ways()  # before the attributes are looked at: the error of a missing main guard is none of theirs
    try:
        head, buffers, fds = _dump(plan, ways)
    except Exception as error:
        add_note(error, explain(plan, ways))
        raise
    views: list[memoryview] = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    nbytes, offset = sum(round_up(len(view), mmap.PAGESIZE) for view in views), 0
    with contextlib.ExitStack() as undo:
        undo.callback(_close_all, fds)
        segment = Segment.create(nbytes, name="fastload-plan")
        undo.callback(segment.close)
        for view in views:
            segment.write(view, offset)
            offset += round_up(len(view), mmap.PAGESIZE)
        undo.pop_all()
    return PickledPlan(segment, [len(view) for view in views], fds)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()


def _ways() -> list[_Way]:
    """The ways to pickle, in the order in which they are tried.

    Plain pickle comes first, unless workers cannot import the main module: then it would write names that no
    worker finds, and not fail.

    Raises:
        RuntimeError: This process, a worker, is importing the main module, which has no guard.
    """
    ways: list[_Way] = [by_value.dump] if by_value.is_possible() else []
    if not ways or by_value.workers_find_main():
        ways.insert(0, _dump_by_name)
    return ways


def _dump(value: Any, ways: list[_Way]) -> tuple[bytes, list[pickle.PickleBuffer], list[int]]:
    """The pickle of a value, the buffers outside of it, and duplicates of the descriptors in it.

    Raises:
        Exception: The error of the first way to pickle it.
    """
    buffers: list[pickle.PickleBuffer] = []
    fds: list[int] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        # A read-only buffer or a small one stays in the pickle.
        view = buffer.raw()
        if view.readonly or len(view) < mmap.PAGESIZE:
            return True
        buffers.append(buffer)
        return False

    reasons: list[Exception] = []
    for dump in ways:
        file = io.BytesIO()
        try:
            with _collect_descriptors(fds):
                dump(value, file, take)
            return file.getvalue(), buffers, fds
        except Exception as error:  # noqa: BLE001 - of the user's objects; raised if there is no other way
            reasons.append(error)
            buffers.clear()
            _close_all(fds)
    raise reasons[0] from None


def _dump_by_name(value: Any, file: io.BytesIO, take: Callable[[pickle.PickleBuffer], bool]) -> None:
    # ForkingPickler can send locks, queues, connections and torch's tensors to another process.
    reduction.ForkingPickler(file, 5, True, take).dump(value)


# --- descriptors inside the pickle -----------------------------------------------------------------------

_received_fds: list[int] = []


class _InheritedFd:
    """A descriptor, named by its place in the plan's list; stands in for multiprocessing's DupFd."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        return os.dup(_received_fds[self._number])


class _Collector:
    """Stands in for the process that multiprocessing is starting, and collects its descriptors."""

    DupFd = _InheritedFd

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(os.dup(fd))
        return len(self._fds) - 1


@contextlib.contextmanager
def _collect_descriptors(fds: list[int]) -> Any:
    context.set_spawning_popen(_Collector(fds))  # type: ignore[arg-type]  # typeshed expects a real Popen
    try:
        yield
    finally:
        context.set_spawning_popen(None)


# --- finding the attribute that cannot be pickled ---------------------------------------------------------


def explain(plan: Plan, ways: list[_Way]) -> str:
    """A note for an error that kept ``plan`` from being pickled: which attribute it is, and what to do."""
    for name in ("dataset", "collate_fn", "worker_init_fn", "batch_transform"):
        owner = getattr(plan, name)
        attributes = getattr(owner, "__dict__", {})
        for path, value in [*((f"{name}.{key}", part) for key, part in attributes.items()), (name, owner)]:
            try:
                _close_all(_dump(value, ways)[2])
            except Exception:  # noqa: BLE001  # any error means that it cannot be pickled
                return (
                    f"fastload: {path} cannot be sent to a worker process: it is {value!r:.200}. Define "
                    f"functions and classes at the top level of a module, not as lambdas or local functions"
                    f"{_or_install()}; open files and connections in the worker, on first use; or use "
                    "multiprocessing_context='fork'."
                )
    return "fastload: the dataset could not be sent to a worker process"
