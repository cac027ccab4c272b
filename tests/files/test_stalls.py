"""Stores that keep a request waiting: it ends, is tried again on another connection, and is a warning."""

from __future__ import annotations

import functools
import http.server
import os
import threading
from typing import TYPE_CHECKING, Any

import fsspec.asyn
import pytest

import fastload
from fastload.files import attempts
from fastload.files.remote import RemoteFolder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONTENT = bytes(range(256)) * 16


class Stalling(http.server.ThreadingHTTPServer):
    """A web server; the next requests do what `faults` says.

    Attributes:
        faults: "never answers" or "half of the body", for one request each.
        num_requests: Requests that arrived.
        is_over: Ends the requests that stall.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.faults: list[str] = []
        self.num_requests = 0
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        server: Any = self.server
        server.num_requests += 1
        fault = server.faults.pop(0) if server.faults else None
        if fault is None:
            super().do_GET()
            return
        if fault == "half of the body":
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT[: len(CONTENT) // 2])
        server.is_over.wait(60)
        self.close_connection = True


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
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.is_over.set()
        found.shutdown()
        thread.join()


@pytest.mark.parametrize("fault", ["never answers", "half of the body"])
def test_a_request_that_stalls_is_tried_again(fault: str, server: Stalling) -> None:
    """The content is complete, and came with the second request."""
    server.faults = [fault]

    assert RemoteFolder(server.url).read("a.bin", len(CONTENT)) == CONTENT
    assert server.num_requests == 2


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
    assert server.num_requests == 3  # none stalled
