"""Stores that keep a request waiting: it ends, is tried again on another connection, and is a warning."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import fsspec.asyn
import pytest

import fastload
from fastload.files import attempts
from fastload.files.remote import RemoteFolder
from tests.kit.stalling import Stalling

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.kit.stalling import Fault

CONTENT = bytes(range(256)) * 16


@pytest.fixture(scope="module", autouse=True)
def _loop() -> None:
    """Fsspec starts one thread for all requests of a process, and keeps it."""
    fsspec.asyn.get_loop()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> Iterator[Stalling]:
    """A server whose clients wait for 0.3 s."""
    monkeypatch.setenv(attempts.READ_VARIABLE, "0.3")
    (tmp_path / "a.bin").write_bytes(CONTENT)
    with Stalling(tmp_path) as found:
        yield found


@pytest.mark.parametrize("fault", ["never answers", "half of the body", "drops the connection"])
def test_a_request_that_stalls_is_tried_again(fault: Fault, server: Stalling) -> None:
    """The content is complete, and came with the second request."""
    server.faults = [fault]

    assert RemoteFolder(server.url).read("a.bin", len(CONTENT)) == CONTENT
    assert len(server.requests) == 2


def test_a_store_that_always_stalls_is_an_error(server: Stalling) -> None:
    """It names the file and how often it was tried."""
    server.faults = ["never answers"] * 20

    with pytest.raises(fastload.ImageReadError, match=rf"{server.url}/a\.bin.*tried \d times in"):
        RemoteFolder(server.url).read("a.bin", len(CONTENT))


def test_a_slow_request_is_a_warning(
    server: Stalling, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It names the URL, and the variable that limits the wait."""
    monkeypatch.setattr(attempts, "_SLOW_S", 0.0)
    monkeypatch.setitem(attempts._warned, "at_s", float("-inf"))
    server.faults = ["never answers"]
    RemoteFolder(server.url).read("a.bin", len(CONTENT))

    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"{server.url}/a.bin: no complete answer")
    assert attempts.READ_VARIABLE in warning


@pytest.mark.parametrize("value", ["soon", "-1", "0", "inf", "nan"])
@pytest.mark.parametrize("variable", [attempts.READ_VARIABLE, attempts.CONNECT_VARIABLE])
def test_a_limit_that_is_no_time_is_an_error(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the variable."""
    monkeypatch.setenv(variable, value)

    with pytest.raises(ValueError, match=f"{variable}='{value}' should be a number of seconds above zero"):
        RemoteFolder("http://127.0.0.1:1")


def test_a_forked_reader_that_ends_leaves_the_connections_of_its_parent(server: Stalling) -> None:
    """The processes share an epoll instance, out of which the child must not take the parent's sockets."""
    folder = RemoteFolder(server.url)
    assert folder.read("a.bin", len(CONTENT)) == CONTENT
    pid = os.fork()
    if pid == 0:
        folder._opened = None  # what a worker's exit does: the last reference goes
        os._exit(0 if folder.read("a.bin", len(CONTENT)) == CONTENT else 1)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert folder.read("a.bin", len(CONTENT)) == CONTENT
    assert len(server.requests) == 3  # none stalled
