"""Callers that hold on, that fork, and that die: always the right batch or an error, and nobody is left."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import os
import random
import signal
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
import torch.utils.data as tud

import fastload
from tests.kit import datasets
from tests.kit.batches import assert_same_batches
from tests.survival import zoo
from tests.survival.zoo import assert_numbered, assert_rest, numbered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kit.processes import Interpreter

NUMBERED = datasets.Made(numbered, 40)
STARTED = {"num_workers": 2, "multiprocessing_context": "forkserver"}


@functools.cache
def _batches_of(make: Any, size: int) -> list[Any]:
    return list(tud.DataLoader(datasets.Made(make, size), 4))


def _aliases(batch: Any) -> list[Any]:
    """The batch, or what views the memory of one of a single tensor."""
    if not isinstance(batch, torch.Tensor):
        return [batch]
    array = batch.numpy()
    return [batch, batch[:], array, torch.from_numpy(array)]


@pytest.mark.usefixtures("lends_small")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (datasets.growing, {}),
        (datasets.growing, {"num_workers": 1, "max_prefetch_memory": "200KB"}),
        (datasets.growing, {"num_workers": 2, "worker_type": "thread"}),
        (zoo.nest, {"num_workers": 2, "max_prefetch_memory": "1B"}),
        pytest.param(zoo.nest, {"max_prefetch_memory": "20KB"} | STARTED, marks=pytest.mark.slow),
        (zoo.large, {"num_workers": 1, "max_prefetch_memory": "64KB"}),  # smaller than a sample
        (numbered, {"num_workers": 3, "max_prefetch_memory": "1B", "prefetch_factor": 9}),
    ],
)
@pytest.mark.parametrize("drops", [0.0, 0.4])
def test_a_held_batch_never_changes(make: Any, options: dict[str, Any], drops: float) -> None:
    """A caller that holds, drops, aliases and overwrites torch's batches in a tiny ring sees only that."""
    size = 24 if make is zoo.large else 120
    expected, rng = _batches_of(make, size), random.Random(1)
    held: list[tuple[Any, Any]] = []
    for number, batch in enumerate(fastload.DataLoader(datasets.Made(make, size), 4, **options)):
        assert_same_batches(expected[number], batch)
        alias, wanted = rng.choice(_aliases(batch)), expected[number]
        if isinstance(batch, torch.Tensor) and rng.random() < 0.3:
            batch.fill_(number)
            wanted = torch.full_like(batch, number)
        held.append((alias, wanted))
        del batch, alias
        while held and rng.random() < drops:
            held.pop(rng.randrange(len(held)))
        for kept, content in held if drops or number == size // 4 - 1 else ():
            assert_same_batches(content, torch.as_tensor(kept) if isinstance(kept, np.ndarray) else kept)

    assert number == size // 4 - 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterators_interleaved_at_random_do_not_disturb_each_other(num_workers: int) -> None:
    """Two over one loader, and one over another, which is left before its end; all batches are held."""
    rng = random.Random(1)
    one, other = (
        fastload.DataLoader(NUMBERED, size, num_workers=num_workers, max_prefetch_memory=memory)
        for size, memory in ((2, "1B"), (5, "auto"))
    )
    iterators = [(2, iter(one)), (2, iter(one)), (5, iter(other))]
    held: list[tuple[int, int, Any]] = []
    done = [0, 0, 0]
    while max(done) < 40:
        which = rng.randrange(3)
        size, iterator = iterators[which]
        held.append((done[which], done[which] + size, next(iterator)))
        done[which] += size

    for start, stop, batch in held:
        assert_numbered(batch, start, stop)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_may_be_abandoned_by_a_thread_or_be_handed_on(persistent: bool) -> None:
    """Workers live as long as the process, not as the thread that started them; its batch stays."""
    loader = fastload.DataLoader(NUMBERED, 4, num_workers=2, persistent_workers=persistent)
    held = []

    def consume() -> Any:
        iterator = iter(loader)
        held.append(next(iterator))
        return iterator

    for _ in range(2):
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            handed = thread.submit(consume).result()
    assert_rest(handed, 4, stop=40)
    assert_rest(loader, 0, stop=40)
    loader.close()

    for batch in held:
        assert_numbered(batch, 0, 4)


def test_messages_beyond_a_pipe_and_more_than_a_socket_holds_block_nobody() -> None:
    """Lists of indices and error texts of a megabyte go through segments; others wait for room."""

    def long_error(index: int) -> Any:
        raise ValueError("y" * 1_000_000)

    indices = [list(range(20)) * 10_000 for _ in range(4)]
    lengths = [len(batch) for batch in fastload.DataLoader(range(20), batch_sampler=indices, num_workers=2)]
    errors = []
    iterator = iter(fastload.DataLoader(datasets.Made(long_error, 4), num_workers=2))
    for _ in range(4):
        with pytest.raises(ValueError, match="yyy") as caught:
            next(iterator)
        errors.append(len(str(caught.value)))
    many = fastload.DataLoader(datasets.Made(numbered, 2000), num_workers=2, prefetch_factor=500)

    assert lengths == [200_000] * 4
    assert min(errors) > 1_000_000
    assert [int(labels) for _, labels in many] == list(range(2000))


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        *(("finished", "process"), ("left", "process"), ("after an error", "process")),
        *(("after a death", "process"), ("left", "pinned"), ("after a death", "pinned")),
        ("after an error", "thread"),
    ],
)
def test_an_iterator_goes_with_its_last_name(
    no_gc: None, how: str, kind: str, pretend_accelerator: Any
) -> None:
    """No cycle keeps it and its workers, also not one through an error's traceback into the dataset."""
    if kind == "pinned":
        pretend_accelerator()
    make = {"after an error": zoo.bad_seventh, "after a death": datasets.killed}.get(how, numbered)
    method: Any = "thread" if kind == "thread" else "process"
    iterator: Any = iter(fastload.DataLoader(datasets.Made(make), 4, num_workers=2, worker_type=method))
    pids, alive = [one.pid for one in iterator._workers], weakref.ref(iterator)
    next(iterator)
    if how == "finished":
        assert len(list(iterator)) == 5
    elif how != "left":
        with pytest.raises((ValueError, fastload.errors.WorkerDiedError)) as caught:
            list(iterator)
        assert kind != "thread" or caught.traceback[-1].name == "bad_seventh"
        del caught

    del iterator

    assert alive() is None
    assert not any(psutil.pid_exists(pid) for pid in pids)


def _large(index: int) -> Any:
    """A sample whose batches lie in pages of their own: on the heap, malloc chooses among what is free."""
    return np.full((128, 128, 3), index % 251, np.uint8), index


@pytest.mark.parametrize("method", ["process", "thread"])
def test_without_a_garbage_collector_batches_are_returned(no_gc: None, method: Any) -> None:
    """An epoch of many batches takes no more slots, memories and addresses than a few."""
    options: Any = {"num_workers": 1, "worker_type": method}
    iterator: Any = iter(fastload.DataLoader(datasets.Made(_large, 400), 4, **options))
    addresses, memories = set(), {}  # held, so that no other gets its id
    for images, _ in iterator:
        addresses.add(images.data_ptr())
        slots = iterator._pool.ring.slots if method == "process" else []
        memories |= {id(slot.memory): slot.memory for slot in slots if slot.memory is not None}

    assert len(addresses) <= 6
    assert len(memories) in (range(1, 7) if method == "process" else [0])


@pytest.mark.parametrize("method", ["process", "thread"])
def test_a_loader_in_a_cycle_is_collected(method: Any) -> None:
    """Nobody needs to call close(); what is left is found by the leak guard."""
    options: Any = {"num_workers": 2, "persistent_workers": True, "worker_type": method}
    loader = fastload.DataLoader(NUMBERED, 10, **options)
    next(iter(loader))
    cycle, alive = [loader], weakref.ref(loader)
    cycle.append(cycle)

    del loader, cycle
    gc.collect()

    assert alive() is None


def _in_child(work: Any) -> int:
    """Run a function in a fork of this process; its pid. The function returns the exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(30)
            code = work()
        finally:
            os._exit(code)
    return child


@pytest.mark.usefixtures("lends_small")
def test_a_forked_child_keeps_its_batch_and_leaves_the_parents_workers_alone() -> None:
    """What the child inherited stays as it was while the parent goes on, and its exit disturbs nothing."""
    iterator: Any = iter(fastload.DataLoader(datasets.Made(numbered, 400), 10, num_workers=2))
    held = next(iterator)
    images = [held[0].numpy()]
    wake, waker = os.pipe()

    def look() -> int:
        os.read(wake, 1)
        as_it_was = bool((images[0] == np.arange(10, dtype=np.uint8)[:, None, None, None]).all())
        try:
            next(iterator)
        except RuntimeError as error:
            iterator.close()
            return 0 if as_it_was and "belongs to the parent of this forked process" in str(error) else 2
        return 3

    child = _in_child(look)
    del held
    images.clear()
    assert_rest(iterator, 10, stop=400, step=10)
    os.write(waker, b".")
    _, status = os.waitpid(child, 0)
    os.close(wake)
    os.close(waker)

    assert os.waitstatus_to_exitcode(status) == 0


def test_other_processes_between_batches_and_epochs_disturb_nothing() -> None:
    """Run and fork: none holds on to the workers' pipes; a child has persistent workers of its own."""
    with fastload.DataLoader(NUMBERED, 10, num_workers=2, persistent_workers=True) as loader:

        def read_an_epoch() -> int:
            found = len(list(loader))
            loader.close()
            return 0 if found == 4 else 2

        for epoch in range(2):
            held = []
            for number, batch in enumerate(loader):
                subprocess.run([sys.executable, "-S", "-c", ""], check=True, close_fds=number % 2 == 0)
                held.append(batch)
            if not epoch:
                _, status = os.waitpid(_in_child(read_an_epoch), 0)
                assert os.waitstatus_to_exitcode(status) == 0
            assert_rest(held, 0, stop=40, step=10)


_PARENT = """
import functools
import fastload
from tests.kit import datasets
from tests.survival import zoo


def start(make, *args):
    dataset = datasets.Made(functools.partial(make, *args), 2)
    return iter(fastload.DataLoader(dataset, num_workers=2, multiprocessing_context={method!r}))


os.setpgrp()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
waits = start(zoo.numbered)
next(waits)
{then}
"""
ENDS = {
    "kill": ("next(start(zoo.signals_and_hangs, os.getpid(), signal.SIGKILL))", -9),
    "interrupt": ("next(start(zoo.signals_and_hangs, 0, signal.SIGINT))", -2),  # as a terminal does
    "exit": ("", 0),
}


@pytest.mark.parametrize(
    ("method", "how"),
    [
        *(("fork", "kill"), ("forkserver", "kill"), ("fork", "interrupt")),
        *(pytest.param("spawn", how, marks=pytest.mark.thorough) for how in ("kill", "exit")),
    ],
)
def test_workers_leave_with_their_parent(method: str, how: str, interpreter: Interpreter) -> None:
    """From waits and from user code, after which nobody holds the run's output; Ctrl-C is one traceback."""
    then, code = ENDS[how]
    done = interpreter.run(_PARENT.format(method=method, then=then))

    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count("Traceback") == (how == "interrupt")
    assert how != "interrupt" or done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert how != "exit" or done.stderr == ""


_TINY_SHM = """
import numpy as np, fastload
from tests.kit import datasets, faults

if not faults.mount_over("/dev/shm", "size=1m"):
    sys.exit("this user may not mount")


def large(index):
    return np.full((512, 512, 3), index, np.uint8)


batches = list(fastload.DataLoader(datasets.Made(large, 32), 8, num_workers=2))
assert [int(batch[0, 0, 0, 0]) for batch in batches] == [0, 8, 16, 24]
dataset = datasets.Made(datasets.image, 4000)
mixed = list(fastload.DataLoader(dataset, 2000, num_workers=2, collate_fn=datasets.mixed_up))
print(len(mixed), os.listdir("/dev/shm"))
"""


def test_dev_shm_of_one_megabyte_is_enough(interpreter: Interpreter) -> None:
    """Nothing of ours is on /dev/shm, also when a custom collate function calls torch's."""
    done = interpreter.run(_TINY_SHM, exits=False)
    if "may not mount" in done.stderr:
        pytest.skip(done.stderr)

    assert (done.stdout, done.stderr) == ("2 []\n", "")
