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
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.kit.stalling import Fault

pytestmark = pytest.mark.slow  # a server is started

CONTENT = bytes(range(256)) * 16
KEYS = {"key": "test", "secret": "test"}


@pytest.fixture(scope="module", autouse=True)
def _loop() -> None:
    """Fsspec starts one thread for all requests of a process, and keeps it."""
    fsspec.asyn.get_loop()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> Iterator[Stalling]:
    """A server whose clients wait for 1 s."""
    monkeypatch.setenv(attempts.READ_VARIABLE, "1")
    (tmp_path / "a.bin").write_bytes(CONTENT)
    with Stalling(tmp_path) as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def bucket(_loop: None, s3: str) -> str:
    """The URL of an S3 server with the file; s3fs resolves names in a thread, and keeps it."""
    fs = fsspec.filesystem("s3", endpoint_url=s3, **KEYS, skip_instance_cache=True)
    fs.mkdir("stalls")
    fs.pipe("stalls/a.bin", CONTENT)
    return s3


@pytest.fixture(params=["http", "s3"])
def faulty(request: pytest.FixtureRequest) -> Iterator[tuple[Stalling, Callable[[], RemoteFolder]]]:
    """A server, and what opens its files by HTTP or by S3's protocol."""
    if request.param == "http":
        server = request.getfixturevalue("server")
        yield server, lambda: RemoteFolder(server.url)
    else:
        # The server behind it is slow where the machine is busy, and must not be taken for one that stalls.
        request.getfixturevalue("monkeypatch").setenv(attempts.READ_VARIABLE, "2")
        request.getfixturevalue("pauses")
        with Stalling(request.getfixturevalue("bucket")) as server:
            options = {"endpoint_url": server.url, **KEYS}
            yield server, lambda: RemoteFolder("s3://stalls", options)


@pytest.mark.parametrize("fault", ["never answers", "half of the body", "drops the connection", "is busy"])
def test_a_request_that_fails_is_tried_again(
    fault: Fault, faulty: tuple[Stalling, Callable[[], RemoteFolder]]
) -> None:
    """The content is complete, and came with the second request."""
    server, open_folder = faulty
    server.faults, server.faulty = [fault], "a.bin"

    assert open_folder().read("a.bin", len(CONTENT)) == CONTENT
    assert not server.faults
    assert len([path for path, _ in server.requests if path.endswith("a.bin")]) == 2


def test_a_store_that_always_stalls_is_an_error(server: Stalling, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the file and how often it was tried."""
    monkeypatch.setenv(attempts.READ_VARIABLE, "0.2")
    server.faults = ["never answers"] * 40

    with pytest.raises(fastload.errors.ImageReadError, match=r"/a\.bin.*tried \d times in"):
        RemoteFolder(server.url).read("a.bin", len(CONTENT))


def test_a_slow_request_is_a_warning(
    server: Stalling, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It names the URL, and the variable that limits the wait, which then is to its end."""
    monkeypatch.setattr(attempts, "_SLOW_S", 0.0)
    monkeypatch.setitem(attempts._warned, "at_s", float("-inf"))
    server.faults = ["never answers"]
    caplog.set_level("INFO", "fastload")
    RemoteFolder(server.url).read("a.bin", len(CONTENT))

    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"{server.url}/a.bin: no complete answer")
    assert attempts.READ_VARIABLE in warning
    assert "Timeout" in caplog.messages[1]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *((attempts.READ_VARIABLE, value) for value in ("soon", "-1", "0", "inf", "nan")),
        (attempts.CONNECT_VARIABLE, "soon"),
    ],
)
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
