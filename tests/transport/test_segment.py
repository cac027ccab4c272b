"""Segments: tried and not looked up by name, errors that name a limit, and descriptors of other processes."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest

from fastload.errors import SharedMemoryError
from fastload.memory import segment
from fastload.memory.segment import Segment, open_in_process
from fastload.workers import process as starting
from tests.kit.faults import OTHER_KINDS, limited, something_else

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def forget() -> None:
    for answer in (segment.why_unsupported, starting.why_no_processes):
        answer.cache_clear()


@pytest.fixture(autouse=True)
def new_answers() -> Iterator[None]:
    """What the system answered is asked again in each test, and after it."""
    forget()
    yield
    forget()


def refusing(number: int) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_refused_memfd_create_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is there and the call is refused: nothing is supported, and the reason is the system's."""
    monkeypatch.setattr(os, "memfd_create", refusing(1))

    assert "denies anonymous shared memory" in (segment.why_unsupported() or "")
    assert "Operation not permitted" in (segment.why_unsupported() or "")
    assert starting.why_no_processes() == segment.why_unsupported()


@pytest.mark.parametrize(
    ("module", "call"), [(os, "pidfd_open"), (signal, "pidfd_send_signal"), (socket, "socketpair")]
)
def test_memory_needs_less_than_workers(module: Any, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are shared all the same."""
    monkeypatch.setattr(module, call, refusing(38))

    assert segment.why_unsupported() is None
    reason = "this system denies pidfd_open, pidfd_send_signal or socketpair: [Errno 38] Function not"
    assert (starting.why_no_processes() or "").startswith(reason)


@pytest.mark.parametrize(
    ("module", "call"), [(os, "memfd_create"), (os, "pidfd_open"), (socket, "socketpair")]
)
def test_no_descriptors_left_is_no_reason(module: Any, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process has used up now says nothing of the system."""
    monkeypatch.setattr(module, call, refusing(24))

    assert starting.why_no_processes() is None


def test_an_error_names_the_limit() -> None:
    """That on descriptors is usually met first; test_shared_list.py meets that on files."""
    told = r"create .*Too many open files.*RLIMIT_NOFILE is 3"
    with limited(resource.RLIMIT_NOFILE, 3), pytest.raises(SharedMemoryError, match=told):
        Segment.create(1)


def any_segment(status: os.stat_result, link: str) -> bool:
    return link.startswith("/memfd:")


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_nothing_but_a_segment_is_opened(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number, or a pickled handle's, that stands for something else is an error, and that is not opened."""
    real, flags = os.open, []
    memory = Segment.create(1)
    handle = pickle.dumps(memory)
    monkeypatch.setattr(os, "open", lambda path, given: flags.append(given) or real(path, given))
    with contextlib.closing(memory), something_else(kind) as fd:
        os.dup2(fd, memory.fd)
        flags.clear()
        for attach in (lambda: open_in_process(os.getpid(), fd, any_segment), lambda: pickle.loads(handle)):
            with pytest.raises(SharedMemoryError, match=r"is now .*, and no longer the segment"):
                attach()

    assert set(flags) == {os.O_PATH | os.O_CLOEXEC}


def test_a_number_that_changes_hands_after_the_look_changes_nothing() -> None:
    """What was looked at is what is opened."""
    memory = Segment.create(1)
    os.pwrite(memory.fd, b"mine", 0)

    def look(status: os.stat_result, link: str) -> bool:
        with something_else("directory") as other:
            os.dup2(other, memory.fd)
        return any_segment(status, link)

    with contextlib.closing(memory), contextlib.closing(open_in_process(os.getpid(), memory.fd, look)) as own:
        assert os.pread(own.fd, 4, 0) == b"mine"


def test_what_is_opened_has_a_file_description_of_its_own() -> None:
    """Locks and offsets are not shared with the owner."""
    with (
        contextlib.closing(Segment.create(1)) as memory,
        contextlib.closing(open_in_process(os.getpid(), memory.fd, any_segment)) as own,
    ):
        os.lseek(memory.fd, 7, os.SEEK_SET)
        assert os.lseek(own.fd, 0, os.SEEK_CUR) == 0
        assert os.path.samestat(os.fstat(memory.fd), os.fstat(own.fd))
