"""`_workers` of an iterator: the worker processes, which tools and frameworks read from torch's iterators."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch.utils.data as tud

from fastload import DataLoader
from tests.kit import datasets

JOIN_S = 60.0


def iterator_of(**options: Any) -> Any:
    return iter(DataLoader(datasets.Made(datasets.image, 12), 2, **options))


@pytest.mark.parametrize("options", [{}, {"device": "cpu", "device_transform": list}], ids=["host", "device"])
def test_it_lists_the_living_processes(options: dict[str, Any]) -> None:
    """One for each worker, with a pid, a name, no exit code, and alive."""
    iterator = iterator_of(num_workers=2, **options)
    next(iterator)
    workers = iterator._workers

    assert len({worker.pid for worker in workers} - {os.getpid()}) == 2
    assert [worker.ident for worker in workers] == [worker.pid for worker in workers]
    assert len({worker.name for worker in workers}) == 2
    assert {(worker.is_alive(), worker.exitcode, worker.daemon) for worker in workers} == {(True, None, True)}
    assert str(workers[0].pid) in repr(workers[0])
    iterator.close()


def test_the_list_outlives_the_iterator() -> None:
    """Torch's own tests join the processes after the iterator is gone: they ended with exit code 0."""
    iterator = iterator_of(num_workers=2, multiprocessing_context="fork")
    next(iterator)
    workers = iterator._workers
    del iterator

    for worker in workers:
        worker.join(JOIN_S)
        worker.terminate()  # has no effect any more
        worker.kill()
        assert not worker.is_alive()
        assert worker.exitcode == 0


@pytest.mark.parametrize(("method", "number"), [("terminate", signal.SIGTERM), ("kill", signal.SIGKILL)])
def test_a_process_can_be_stopped_and_one_in_its_place_is_listed(method: str, number: int) -> None:
    """`join` without a limit waits for its end, and `exitcode` is minus the signal, also after close()."""
    iterator = iterator_of(num_workers=1, max_worker_restarts=1)
    (worker,) = iterator._workers
    worker.join(0.0)
    assert worker.is_alive()
    getattr(worker, method)()
    worker.join()
    before = worker.exitcode
    assert len(list(iterator)) == 6
    assert iterator._workers[0].pid != worker.pid
    iterator.close()

    assert before == worker.exitcode == -number
    assert not worker.is_alive()


def test_a_forked_process_has_no_such_children() -> None:
    """As with multiprocessing, is_alive() and join() are for the parent; pid and name can be read."""
    iterator = iterator_of(num_workers=1)
    next(iterator)
    (worker,) = iterator._workers
    child = os.fork()
    if child == 0:
        try:
            worker.is_alive()
        except AssertionError as error:
            os._exit(0 if str(error) == "can only test a child process" and worker.exitcode is None else 1)
        os._exit(2)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    iterator.close()


def test_threads_and_no_workers() -> None:
    """Threads are no processes: the list is empty. Without workers there is no attribute, as in torch."""
    iterator = iterator_of(num_workers=2, worker_type="thread")
    assert iterator._workers == []
    iterator.close()
    for local in (iterator_of(), iterator_of(device="cpu", device_transform=list), iter(tud.DataLoader([1]))):
        assert not hasattr(local, "_workers")
