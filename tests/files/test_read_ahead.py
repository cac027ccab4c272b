"""Announced files are read in threads, in bounded memory; `take` always returns the right file."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.files.read_ahead import ReadAhead
from tests.kit.remote import TIMEOUT_S, until_set

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NBYTES = 100


def content(number: int) -> bytes:
    """The content of a file."""
    return number.to_bytes(4, "big") * (NBYTES // 4)


@pytest.fixture
def opened() -> Iterator[Callable[..., tuple[ReadAhead, list[int]]]]:
    """Makes readers, each with the list of its reads, which go through a gate; closes them after the test."""
    made: list[ReadAhead] = []

    def make(gate: Callable[[int], object] = str, **options: int) -> tuple[ReadAhead, list[int]]:
        reads: list[int] = []

        def read(number: int) -> bytes:
            gate(number)
            reads.append(number)
            return content(number)

        made.append(ReadAhead(read, lambda _: NBYTES, **{"num_threads": 8, **options}))
        return made[-1], reads

    yield make
    for reader in made:
        reader.close()


def test_an_announced_file_is_read_once(opened: Any) -> None:
    """Announcing it again, or taking it while it is being read, does not read it again."""
    reader, reads = opened(num_threads=1)
    reader.announce([1, 2, 1])
    reader.announce([2, 1])
    found = [reader.take(number) for number in (1, 2)]
    _until(reader._for_threads.empty)  # the thread would have read them again
    assert found == [content(1), content(2)]
    assert sorted(reads) == [1, 2]


def test_a_file_that_no_thread_has_begun_is_read_by_the_caller(opened: Any) -> None:
    """The only thread is stuck in another file."""
    begun, may_end = threading.Event(), threading.Event()
    gate = lambda number: number or (begun.set(), until_set(may_end))  # noqa: E731
    reader, _ = opened(gate, num_threads=1)
    reader.announce([0, 1])
    until_set(begun)
    found = reader.take(1)
    may_end.set()
    assert [found, reader.take(0)] == [content(1), content(0)]


def test_the_window_is_filled_and_files_that_nobody_takes_make_room(opened: Any) -> None:
    """With room for five files, five are read, and one more for each that is taken."""
    reader, reads = opened(window_bytes=5 * NBYTES)
    reader.announce(range(100, 150))  # nobody takes these
    _until(lambda: len(reads) >= 5)
    reader.announce(range(20))
    first = len(reads)
    assert [reader.take(number) for number in range(5)] == [content(number) for number in range(5)]
    for number in range(5, 15):
        _until(lambda: reader._for_threads.empty() and reader._used_bytes == 5 * NBYTES)
        assert reader.take(number) == content(number)
    assert len(reads) <= first + 20


def test_close_ends_the_threads(opened: Any) -> None:
    """Files that are being read come to an end first; `take` reads by itself afterwards."""
    begun, may_end = threading.Semaphore(0), threading.Event()
    reader, reads = opened(lambda _: (begun.release(), until_set(may_end)))
    reader.announce(range(20))
    assert all(begun.acquire(timeout=TIMEOUT_S) for _ in range(8))

    reader.close()
    reader.announce([3])
    may_end.set()

    _until(lambda: not any(t.name == "fastload-read-ahead" for t in threading.enumerate()))
    assert sorted(reads) == list(range(8))
    assert reader.take(3) == content(3)
    assert reads[8:] == [3]


def test_close_in_a_forked_child_returns(opened: Any) -> None:
    """The child has a copy of a lock that a thread of its parent holds, and no such thread."""
    reader, _ = opened()
    reader.announce(range(20))
    with reader._lock:
        pid = os.fork()
        if pid == 0:
            reader.close()
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@settings(max_examples=60)
@given(
    operations=st.lists(
        st.tuples(st.sampled_from(["announce", "take", "forget"]), st.lists(st.integers(0, 9), max_size=6)),
        max_size=20,
    ),
    num_threads=st.integers(1, 4),
    window=st.integers(1, 6),
    broken=st.sets(st.integers(0, 9)),
)
def test_take_returns_the_right_file_after_any_announcements(
    operations: list[tuple[str, list[int]]], num_threads: int, window: int, broken: set[int]
) -> None:
    """Files come in any order, twice, or never; a broken one raises once; afterwards no bytes are held."""
    left = set(broken)

    def read(number: int) -> bytes:
        if number in left:
            left.discard(number)
            raise OSError(number)
        return content(number)

    found: Any = None
    reader = ReadAhead(read, lambda _: NBYTES, num_threads=num_threads, window_bytes=window * NBYTES)
    try:
        for name, numbers in operations:
            if name != "take":
                getattr(reader, name)(numbers)
                continue
            for number in numbers:
                try:
                    found = reader.take(number)
                except OSError as error:
                    found = error.args  # of the file, not of those beside it
                assert found == content(number) or (found == (number,) and number in broken)
                broken -= {number} if found == (number,) else set()
        reader.forget(range(10))
        _until(lambda: reader._used_bytes == 0)
        assert not reader._files
    finally:
        reader.close()


def _until(is_so: Callable[[], bool]) -> None:
    """Wait for other threads."""
    pause = threading.Event()
    for _ in range(int(TIMEOUT_S * 1000)):
        if is_so():
            return
        pause.wait(0.001)
    raise TimeoutError
