"""Workers that are killed in the middle of a write, or out of turn: an error at once, never a wait.

Every test here runs under the leak guard of conftest.py: no process, thread, segment or socket remains.
"""

from __future__ import annotations

from typing import Any

import pytest

import fastload
from fastload.workers import pool
from tests.kit import datasets
from tests.survival import killing_zoo

METHODS = ["fork", pytest.param("forkserver", marks=pytest.mark.slow)]  # faults/test_table.py has spawn


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("make", "collate_fn"),
    [(killing_zoo.fatal_to_write, None), (killing_zoo.plain, killing_zoo.collate_and_die)],
    ids=["row", "collate"],
)
def test_a_worker_killed_while_it_writes_a_slot_costs_no_other_batch(
    make: Any, collate_fn: Any, method: str
) -> None:
    """The error names worker, signal and cause, and the batches received before stay as they were."""
    loader = fastload.DataLoader(
        datasets.Made(make), 4, num_workers=2, collate_fn=collate_fn, multiprocessing_context=method
    )
    iterator = iter(loader)
    held = []

    with pytest.raises(
        fastload.WorkerDiedError, match=r"worker 1 was killed by SIGKILL .*out-of-memory.*batch 3"
    ):
        held.extend(iterator)

    assert len(held) in (0, 2, 3)  # the death may be seen while a batch of worker 0 is waited for
    for number, (images, labels) in enumerate(held):
        assert labels.tolist() == list(range(number * 4, number * 4 + 4))
        assert (images == labels[:, None, None, None]).all()


@pytest.mark.timeout(30)
def test_the_death_of_the_worker_that_is_waited_for_is_an_error_though_no_batch_will_ever_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Timeout=0 and the other worker blocked: the watch ends the wait, and no grace is given first."""
    monkeypatch.setattr(pool, "_GRACE_S", 3600.0)
    iterator = iter(fastload.DataLoader(datasets.Made(killing_zoo.killed_while_others_hang), num_workers=2))

    with pytest.raises(fastload.WorkerDiedError, match="worker 0 was killed by SIGKILL"):
        next(iterator)


@pytest.mark.timeout(30)
def test_a_worker_that_dies_out_of_turn_ends_the_wait_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error comes when the death is seen, though the worker whose turn it is lives and may answer."""
    monkeypatch.setattr(pool, "_GRACE_S", 3600.0)
    iterator = iter(fastload.DataLoader(datasets.Made(killing_zoo.killed_out_of_turn), num_workers=2))

    with pytest.raises(fastload.WorkerDiedError, match="worker 1 was killed by SIGKILL"):
        next(iterator)


def test_an_init_function_that_raises_in_one_worker_is_an_error_at_that_workers_turn() -> None:
    """Worker 0's batch comes first, then worker 1's error with its own type."""
    loader = fastload.DataLoader(
        datasets.Made(killing_zoo.plain), 4, num_workers=2, worker_init_fn=killing_zoo.raises_in_worker_one
    )
    iterator = iter(loader)

    assert next(iterator)[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="no device for worker 1"):
        next(iterator)
