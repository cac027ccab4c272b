"""One worker's work by itself: any transport may bring indices and take packed batches away."""

from __future__ import annotations

import threading
from typing import Any

import fastload
from fastload.batch.packing import pack, unpack
from fastload.memory.lease import Arena, private_memory
from fastload.workers.core import WorkerCore
from fastload.workers.job import Job
from fastload.workers.messages import Answer, Kind
from tests.kit import datasets


def third_is_bad(index: int) -> int:
    if index == 3:
        raise ValueError("three")
    return index


def refuse(worker_id: int) -> None:
    raise ArithmeticError("not today")


def answers_of(indices: list[Any], **options: Any) -> list[tuple[Answer, bytes]]:
    """The answers of a core without a process or queue, each with the bytes of its batch."""
    loader: Any = fastload.DataLoader(datasets.Made(third_is_bad, 8), 2, num_workers=1, **options)
    arena = Arena(private_memory)
    core = WorkerCore(0, Job.of(loader, 1), arena, lambda batch: pack(batch, arena), is_thread=True)
    answers = []

    def run() -> None:
        core.begin()
        core.begin_epoch(None, None)
        for index in indices:
            arena.begin(None)
            answer = core.answer(index, None, None)
            used = answer.payload.used_bytes if answer.kind is Kind.BATCH else 0
            answers.append((answer, bytes(arena.lease)[:used] if used else b""))

    thread = threading.Thread(target=run)  # which is the worker
    thread.start()
    thread.join()
    return answers


def test_a_core_alone_makes_packed_batches_and_errors() -> None:
    """Every index has its answer, with its number of samples; after an error it goes on."""
    first, bad, last = answers_of([[0, 1], [2, 3], [4, 5]])

    batches = [unpack(answer.payload, bytearray(data)).tolist() for answer, data in (first, last)]
    assert batches == [[0, 1], [4, 5]]
    assert [answer.num_samples for answer, _ in (first, last)] == [2, 2]
    assert (bad[0].kind, bad[0].payload.place) == (Kind.ERROR, "dataset index 3")


def test_an_error_at_the_start_is_the_answer_to_every_index() -> None:
    """The epoch that begins after it changes nothing."""
    answers = answers_of([[0], [1]], worker_init_fn=refuse)

    assert [answer.kind for answer, _ in answers] == [Kind.ERROR] * 2
    assert {answer.payload.place for answer, _ in answers} == {"at its start"}
