"""Workers that die, parents that die, callers that hold on: always an error or the right batch, never a rest.

Every test here runs under the leak guard of conftest.py: no process, thread, segment or socket remains.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import fastload
from fastload.workers import pool
from tests.kit import datasets
from tests.kit.processes import still_running
from tests.survival import killing_zoo
from tests.survival.attack_zoo import assert_numbered, numbered

# --- workers that die ------------------------------------------------------------------------------------


def test_a_worker_that_dies_while_it_writes_a_row_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batches received before stay as they were; tests/faults/test_table.py has all other deaths."""
    for name in ("_GRACE_S", "_WATCH_INTERVAL_S"):  # a death that is noticed late is a time-out of the test
        monkeypatch.setattr(pool, name, 1000.0)
    iterator = iter(fastload.DataLoader(datasets.Made(killing_zoo.fatal_to_write), 4, num_workers=2))
    held = []

    with pytest.raises(
        fastload.errors.WorkerDiedError, match=r"worker 1 was killed by SIGKILL .*out-of-memory killer"
    ):
        held.extend(iterator)

    assert len(held) in (0, 2, 3)  # the death may be seen while a batch of worker 0 is waited for
    for number, (images, labels) in enumerate(held):
        assert labels.tolist() == list(range(number * 4, number * 4 + 4))
        assert (images == labels[:, None, None, None]).all()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_ends_the_wait_for_a_batch_that_will_never_come(
    victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the worker whose turn it is, or of the other one, while the living one never answers."""
    monkeypatch.setattr(pool, "_GRACE_S", 3600.0)
    make = functools.partial(killing_zoo.killed_while_others_hang, victim)
    iterator = iter(fastload.DataLoader(datasets.Made(make), num_workers=2))

    with pytest.raises(fastload.errors.WorkerDiedError, match=f"worker {victim} was killed by SIGKILL"):
        next(iterator)


# --- parents that die ------------------------------------------------------------------------------------

_PARENT = """
import os, signal, sys, time
sys.path[:0] = {path!r}
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
import fastload
from tests.kit import datasets
from tests.survival.attack_zoo import numbered
from tests.survival.killing_zoo import hangs

if __name__ == "__main__":
    iterators = []
    for make in ({makes}):
        dataset = datasets.Made(make)
        options = dict(num_workers={num_workers}, multiprocessing_context={method!r})
        loader = fastload.DataLoader(dataset, 2, **options)
        iterators.append(iterator := iter(loader))
        if make is numbered:
            next(iterator)
        print(*(one.pid for one in iterator._workers), end=" ")
    print(flush=True)
    {then}
"""


def _start_parent(tmp_path: Any, *, method: str, makes: str, then: str) -> subprocess.Popen[str]:
    script = tmp_path / "parent.py"
    num_workers = 2 if method == "fork" else 1
    script.write_text(
        _PARENT.format(path=sys.path, makes=makes, method=method, num_workers=num_workers, then=then)
    )
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_workers_leave_with_a_parent_that_was_killed(tmp_path: Any, method: str) -> None:
    """SIGKILL of the parent ends its workers: those that wait for work, and those stuck in user code."""
    parent = _start_parent(tmp_path, method=method, makes="numbered, hangs", then="signal.pause()")
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == (4 if method == "fork" else 2)

    parent.kill()
    parent.communicate()

    assert still_running(pids, 60) == []


@pytest.mark.thorough
def test_an_interpreter_exits_in_silence_with_spawned_workers(tmp_path: Any) -> None:
    """Exit code 0, nothing on stderr, no worker left; other workers are in test_exit.py."""
    parent = _start_parent(tmp_path, method="spawn", makes="numbered,", then="pass")
    out, err = parent.communicate(timeout=100)

    assert (parent.returncode, err) == (0, "")
    assert not any(psutil.pid_exists(int(pid)) for pid in out.split())


@pytest.mark.slow
def test_interrupt_from_the_keyboard_ends_all_with_one_traceback(tmp_path: Any) -> None:
    """SIGINT to the whole group, as a terminal sends it: workers leave without a word."""
    parent = _start_parent(tmp_path, method="fork", makes="hangs,", then="next(iterator)")
    assert parent.stdout is not None
    pids = parent.stdout.readline().split()

    os.killpg(parent.pid, signal.SIGINT)
    try:
        _, err = parent.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(parent.pid, signal.SIGKILL)
        raise

    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)


@pytest.mark.slow
def test_a_missing_main_guard_under_spawn_is_explained(tmp_path: Any) -> None:
    """The error in the parent points to the guard, and the child says so itself."""
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent("""
        import fastload
        list(fastload.DataLoader([1, 2, 3], num_workers=1, multiprocessing_context="spawn"))
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False
    )

    assert done.returncode == 1
    assert "if __name__ == '__main__':" in done.stderr.rstrip().splitlines()[-1]
    assert "bootstrapping phase" in done.stderr


# --- forks of the parent ---------------------------------------------------------------------------------


def test_a_forked_child_keeps_its_batch_and_leaves_the_parents_workers_alone() -> None:
    """What the child inherited stays as it was while the parent goes on, and its exit disturbs nothing."""
    iterator = iter(fastload.DataLoader(datasets.Made(numbered, 400), 10, num_workers=2))
    held = next(iterator)
    image = held[0].numpy()
    wake, waker = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.read(wake, 1)
            as_it_was = bool((image == np.arange(10, dtype=np.uint8)[:, None, None, None]).all())
            try:
                next(iterator)
            except RuntimeError as error:
                code = 0 if as_it_was and "belongs to the parent of this forked process" in str(error) else 2
            iterator.close()
        finally:
            os._exit(code)
    del held, image
    for number, batch in enumerate(iterator, 1):
        assert_numbered(batch, number * 10, number * 10 + 10)
    os.write(waker, b".")
    _, status = os.waitpid(child, 0)
    os.close(wake)
    os.close(waker)

    assert os.waitstatus_to_exitcode(status) == 0


def test_a_forked_child_has_persistent_workers_of_its_own() -> None:
    """The child reads a whole epoch, and the parent's next epochs are as they should be."""
    with fastload.DataLoader(
        datasets.Made(numbered, 40), 10, num_workers=2, persistent_workers=True
    ) as loader:
        assert len(list(loader)) == 4
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(30)
                code = 0 if len(list(loader)) == 4 else 2
                loader.close()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        for _ in range(2):
            for number, batch in enumerate(loader):
                assert_numbered(batch, number * 10, number * 10 + 10)

    assert os.waitstatus_to_exitcode(status) == 0


# --- callers that hold on --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "prefetch_memory"), [(0, "auto"), (1, 1), (2, "100KB"), (3, 1), (3, "auto")]
)
def test_list_of_a_loader_holds_all_batches_right(num_workers: int, prefetch_memory: Any) -> None:
    """However little memory the ring may take, keeping every batch works."""
    batches = list(
        fastload.DataLoader(
            datasets.Made(numbered, 300), 10, num_workers=num_workers, prefetch_memory=prefetch_memory
        )
    )

    assert len(batches) == 30
    for number, batch in enumerate(batches):
        assert_numbered(batch, number * 10, number * 10 + 10)


@pytest.mark.parametrize(("num_workers", "seed"), [(0, 0), (1, 1), (1, 2), (2, 3), (2, 4)])
def test_a_held_batch_never_changes_and_what_the_caller_writes_stays_with_it(
    num_workers: int, seed: int
) -> None:
    """A caller that holds, drops, aliases and overwrites batches at random sees only its own doing."""
    rng = random.Random(seed)
    held: list[tuple[Any, Any]] = []
    loader = fastload.DataLoader(
        datasets.Made(datasets.growing, 160), 4, num_workers=num_workers, prefetch_memory="200KB"
    )
    for number, batch in enumerate(loader):
        assert batch.flatten(1)[:, 0].tolist() == list(range(number * 4, number * 4 + 4))
        alias = rng.choice(
            [batch, batch[1:], batch.numpy(), memoryview(batch.numpy()), batch.untyped_storage()]
        )
        if rng.random() < 0.3:
            batch.fill_(rng.randrange(256))
        held.append((alias, bytes(_bytes_of(alias))))
        del batch, alias
        while held and rng.random() < 0.4:
            held.pop(rng.randrange(len(held)))
        for kept, content in held:
            assert bytes(_bytes_of(kept)) == content


def _bytes_of(alias: Any) -> bytes:
    if isinstance(alias, torch.UntypedStorage):
        return torch.tensor([], dtype=torch.uint8).set_(alias).numpy().tobytes()[:64]
    return np.asarray(alias).tobytes()


def test_two_iterators_over_one_loader_go_side_by_side() -> None:
    """Each has its own workers and slots."""
    loader = fastload.DataLoader(datasets.Made(numbered, 60), 10, num_workers=2)

    for number, (one, other) in enumerate(zip(loader, loader, strict=True)):
        assert_numbered(one, number * 10, number * 10 + 10)
        assert_numbered(other, number * 10, number * 10 + 10)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_may_be_left_by_break_or_by_an_error(num_workers: int) -> None:
    """The loader starts anew afterwards, also with persistent workers that were ahead."""
    loader = fastload.DataLoader(
        datasets.Made(numbered, 60), 10, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    for _ in loader:
        break
    with pytest.raises(ZeroDivisionError):
        _fail_in_the_loop(loader)

    for number, batch in enumerate(loader):
        assert_numbered(batch, number * 10, number * 10 + 10)
    loader.close()


def _fail_in_the_loop(loader: Any) -> None:
    for _ in loader:
        raise ZeroDivisionError


# --- sizes -----------------------------------------------------------------------------------------------


def _long_error(index: int) -> Any:
    raise ValueError("y" * 1_000_000)


def test_messages_of_a_megabyte_travel_both_ways() -> None:
    """Index lists and error texts beyond the pipe's 4 KB go through segments; nobody waits for anybody."""
    indices = [list(range(20)) * 10_000 for _ in range(4)]

    lengths = [len(batch) for batch in fastload.DataLoader(range(20), batch_sampler=indices, num_workers=2)]
    errors = []
    iterator = iter(fastload.DataLoader(datasets.Made(_long_error, 4), num_workers=2))
    for _ in range(4):
        with pytest.raises(ValueError, match="yyy") as caught:
            next(iterator)
        errors.append(len(str(caught.value)))

    assert lengths == [200_000] * 4
    assert min(errors) > 1_000_000


def test_prefetching_a_thousand_batches_blocks_nobody() -> None:
    """More messages than a socket holds wait in the parent's outbox."""
    loader = fastload.DataLoader(datasets.Made(numbered, 2000), num_workers=2, prefetch_factor=500)

    assert [int(labels) for _, labels in loader] == list(range(2000))


_TINY_SHM = """
import os, sys
sys.path[:0] = {path!r}
import numpy as np, fastload
from tests.kit import datasets
from tests.survival.attack_zoo import numbered
size = os.statvfs("/dev/shm")
assert size.f_blocks * size.f_frsize == 1 << 20, size
def large(index):
    return np.full((512, 512, 3), index, np.uint8)
batches = list(fastload.DataLoader(datasets.Made(large, 32), 8, num_workers=2))
assert [int(batch[0, 0, 0, 0]) for batch in batches] == [0, 8, 16, 24]
dataset = datasets.Made(datasets.image, 4000)
mixed = list(fastload.DataLoader(dataset, 2000, num_workers=2, collate_fn=datasets.mixed_up))
assert len(mixed) == 2
assert os.listdir("/dev/shm") == []
print("fine")
"""


@pytest.mark.slow
def test_dev_shm_of_one_megabyte_is_enough(tmp_path: Any) -> None:
    """Nothing of ours is on /dev/shm, also when a custom collate function calls torch's."""
    script = tmp_path / "tiny.py"
    script.write_text(_TINY_SHM.format(path=sys.path))
    command = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {sys.executable} {script}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, timeout=100, check=False
    )
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")

    assert (done.stdout, done.stderr) == ("fine\n", "")


# --- close -----------------------------------------------------------------------------------------------


def test_a_loader_in_a_cycle_is_collected_with_its_workers() -> None:
    """Nobody needs to call close()."""
    loader: Any = fastload.DataLoader(datasets.Made(numbered, 60), 10, num_workers=2, persistent_workers=True)
    next(iter(loader))
    pids = [one.pid for one in loader._iterator._workers]
    cycle = [loader]
    cycle.append(cycle)

    del loader, cycle
    gc.collect()

    assert not any(psutil.pid_exists(pid) for pid in pids)
