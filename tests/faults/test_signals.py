"""The user's handlers for signals stay in the parent, and their exceptions lose no batch in silence."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import fastload
from fastload.workers import process_pool
from tests.faults import zoo
from tests.kit import datasets, leaks

if TYPE_CHECKING:
    from collections.abc import Iterator

IGNORES_HANGUP = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # a suite under nohup


@pytest.fixture
def handlers() -> Iterator[None]:
    """The parent handles every signal that the zoo watches."""
    before = {number: signal.signal(number, lambda *_: None) for number in zoo.WATCHED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_no_handler_of_the_parent_runs_in_a_worker(handlers: None, method: str) -> None:
    """Workers answer signals as new processes do, but ignore those that are sent to all processes at once."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
    try:
        dataset = datasets.Made(zoo.signal_state, 4)
        loader = fastload.DataLoader(dataset, 2, num_workers=1, multiprocessing_context=method)
        told = {state for batch in loader for state in batch}
    finally:
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(read)
        os.close(write)

    user = "ignore" if method == "fork" else "default"  # a process that starts anew inherits no handler
    # Under nohup, a fork server that was started by an earlier test ignores it, too.
    hangups = {user, "ignore"} if IGNORES_HANGUP else {user}
    (state,) = told
    expected = [f"{['ignore', 'default', hangup, user, 'default', 'default']} " for hangup in hangups]
    assert state.startswith(tuple(expected))
    assert state.endswith(" -1")
    assert method != "fork" or f" [{int(signal.SIGWINCH)}] " in state  # blocked is what the parent blocks


@pytest.mark.timeout(60)
def test_close_that_is_interrupted_may_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while workers are given time: they are killed at once, and the interruption goes on."""
    original, errors = process_pool.wait_for_all, [KeyboardInterrupt]

    def wait_or_interrupt(processes: Any, limit_s: float) -> bool:
        if errors:
            raise errors.pop()
        return original(processes, limit_s)

    loader = fastload.DataLoader(datasets.Made(zoo.blocks_at_4, 40), 2, num_workers=2)
    iterator: Any = iter(loader)
    next(iterator)
    pids = [one.pid for one in iterator._workers]
    monkeypatch.setattr(process_pool, "wait_for_all", wait_or_interrupt)
    with pytest.raises(KeyboardInterrupt):
        loader.close()

    assert not any(psutil.pid_exists(pid) for pid in pids)
    loader.close()
    with pytest.raises(fastload.errors.LoaderClosedError):
        next(iterator)


class AlarmError(Exception):
    """What a user's handler raises."""


# A descriptor that is received or closed belongs to no object for a moment: who raises there leaves it open.
# So does an index that the sampler has given: who raises there loses it, as with torch's loader.
HAND_OVER = {"Channel.receive", "Channel._loaded", "Channel._close_received", "Epoch._put_index"}


class Injection:
    """Raises at the n-th place in fastload where CPython would run a handler: calls, and returns from C."""

    def __init__(self, place: int, error: type[BaseException]) -> None:
        self.left = place
        self.error = error
        self.pid = os.getpid()

    def __enter__(self) -> Injection:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: Any, event: str, _: Any) -> None:
        if os.getpid() != self.pid or signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            return  # a worker, or a place at which signals are blocked
        code = frame.f_code
        if code.co_name == "<genexpr>":
            return  # one that is closed by the garbage collector would swallow the error
        if code.co_qualname in HAND_OVER:
            return
        if event in ("call", "c_return") and f"{os.sep}fastload{os.sep}" in code.co_filename:
            self.left -= 1
            if not self.left:
                sys.setprofile(None)
                raise self.error


KINDS: dict[str, dict[str, Any]] = {
    "processes": {"num_workers": 2},
    "one process": {"num_workers": 1, "prefetch_factor": 1},
    "threads": {"num_workers": 2, "worker_type": "thread"},
    "no workers": {"num_workers": 0},
    "pinned": {"num_workers": 2},
}


EVERY = pytest.param(1, marks=pytest.mark.thorough)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("step", [11, EVERY])
@pytest.mark.parametrize(
    ("kind", "error"), [*((kind, AlarmError) for kind in KINDS), ("processes", KeyboardInterrupt)]
)
def test_a_handler_that_raises_never_loses_a_batch_in_silence(
    kind: str, error: type[BaseException], step: int, pretend_accelerator: Any
) -> None:
    """Wherever it comes in next(): the next batches come in order, without one at most, or an error comes."""
    if kind == "pinned":
        pretend_accelerator()
    loader = fastload.DataLoader(datasets.Made(zoo.array, 40_000), 2, **KINDS[kind])
    iterator = iter(loader)
    number = _value(next(iterator))
    place, num_closed, was_reached = 0, 0, True
    while was_reached:
        place += step
        injection = Injection(place, error)
        try:
            with injection:
                batch = next(iterator)
            got = _value(batch)
            assert got == number + 2
            number = got
            was_reached = injection.left <= 0
            continue
        except error:
            pass  # the caller knows
        try:
            got = _value(next(iterator))
        except (fastload.errors.LoaderClosedError, fastload.errors.BatchLostError):
            num_closed += 1
            iterator = iter(loader)
            got = _value(next(iterator))
            assert got == 0
        else:
            assert got in (number + 2, number + 4)
        number = got
    del iterator
    loader.close()

    assert place > 20  # or the places were not found
    assert num_closed < place / step  # where a batch is waited for, the next call waits for it again


def _value(batch: Any) -> int:
    first, second = (zoo.value_of(sample) for sample in batch)
    assert second == first + 1
    return first


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # sockets that Python closes on the way out
@pytest.mark.parametrize("step", [11, EVERY])
@pytest.mark.parametrize("kind", ["one process", "threads", "pinned"])
def test_a_handler_that_raises_in_iter_leaves_nothing(kind: str, step: int, pretend_accelerator: Any) -> None:
    """Wherever it comes: no process, thread or descriptor outlives the iterator that was not made."""
    options = KINDS[kind]
    if kind == "pinned":
        pretend_accelerator()
        options = {"num_workers": 1}
    loader = fastload.DataLoader(datasets.Made(zoo.array, 4), 2, **options)
    list(loader)
    before = leaks.held()
    place, was_reached = 0, True
    while was_reached:
        place += step
        injection = Injection(place, AlarmError)
        iterator = None
        with contextlib.suppress(AlarmError), injection:
            iterator = iter(loader)
        was_reached = injection.left <= 0
        del iterator

        assert leaks.held_soon(before) == before, place

    assert place > 50  # or the places were not found


@pytest.mark.parametrize("prefetch_factor", [1, 2])
def test_after_an_exception_in_the_sampler_it_is_asked_again(prefetch_factor: int) -> None:
    """Also if no request was left: the batches after it are not missing in silence."""

    class Indices:
        number = -1

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> list[int]:
            self.number += 1
            if self.number == 4:
                raise AlarmError
            if self.number == 10:
                raise StopIteration
            return [2 * self.number, 2 * self.number + 1]

    loader = fastload.DataLoader(
        datasets.Made(zoo.array, 20),
        batch_sampler=Indices(),  # type: ignore[arg-type]  # it has no length
        num_workers=1,
        prefetch_factor=prefetch_factor,
    )
    iterator, numbers = iter(loader), []
    with pytest.raises(AlarmError):
        numbers.extend(map(_value, iterator))
    numbers.extend(map(_value, iterator))

    assert numbers[-5:] == [10, 12, 14, 16, 18]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_threads_may_share_one_iterator(num_workers: int) -> None:
    """Each batch comes once, whole, to one of them."""
    iterator = iter(fastload.DataLoader(datasets.Made(zoo.array, 800), 2, num_workers=num_workers))
    begin = threading.Barrier(4)

    def consume(_: int) -> list[int]:
        begin.wait()
        got = []
        for batch in iterator:
            assert (batch == batch[:, :1]).all()
            got.append(_value(batch))
        return got

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        got = sorted(itertools.chain(*threads.map(consume, range(4))))

    assert got == list(range(0, 800, 2))


def test_a_dataset_that_asks_its_own_iterator_for_a_batch_is_told_so() -> None:
    """The batch that is being read would be overwritten."""
    asked: list[Any] = []
    loader = fastload.DataLoader(datasets.Made(lambda index: next(asked[0]), 4), 2)
    asked.append(iter(loader))

    with pytest.raises(RuntimeError, match="make a second iterator"):
        next(asked[0])
    asked.clear()
