"""ImageFolder over servers: web pages, S3 and a user's own client; requests that stall."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import fsspec
import fsspec.asyn
import pytest
import torch
from obstore.fsspec import FsspecStore

import fastload
from fastload.files import file_systems, retry
from fastload.files.remote import RemoteFolder
from tests.files.conftest import png, write_images
from tests.kit import servers
from tests.kit.stalling import Stalling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.kit.stalling import Fault

pytestmark = pytest.mark.slow  # servers are started, and each request passes through one in Python

SIZE = 20  # images in two classes; image i is full of i
KEYS = {"key": "test", "secret": "test"}
S3_CLIENT = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}


def values(loader: Any) -> list[int]:
    """The images, as the value that fills each of them."""
    return [int(value) for images, _ in loader for value in images[:, 0, 0, 0]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the web server; a file lies beside the classes."""
    root = tmp_path_factory.mktemp("served")
    (write_images(root / "train", SIZE) / "notes.txt").write_text("beside the classes")
    return root


@pytest.fixture(scope="module")
def web(root: Path) -> Iterator[str]:
    """A web server."""
    with servers.web(root) as server:
        yield server


@pytest.fixture(scope="module")
def endpoint(s3: str) -> str:
    """An S3 server; the environment of the session has its credentials."""
    fs = fsspec.filesystem("s3", endpoint_url=s3, skip_instance_cache=True)
    fs.mkdir("photos", create_parents=True)
    fs.pipe({f"photos/train/class{i // 10}/{i:02}.png": png(i) for i in range(SIZE)})
    len(folder_of("obstore", s3))  # its runtime keeps descriptors open until the interpreter exits
    return s3


def folder_of(store: str, url: str, name: str = "train") -> fastload.ImageFolder:
    """A folder at a server: of web pages, or by one of two clients of S3."""
    if store == "web":
        return fastload.ImageFolder(f"{url}/{name}")
    # Not from the environment: a fork server that another test has started has the environment of that time.
    options: dict[str, Any] = {"storage_options": {"endpoint_url": url, **KEYS}}
    if store == "obstore":
        config = {"endpoint": url, **S3_CLIENT}
        options = {"filesystem": FsspecStore("s3", config=config, client_options={"allow_http": True})}
    return fastload.ImageFolder(f"s3://photos/{name}", **options)


# --- what every server gives -----------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["web", "s3", "obstore"])
def test_a_folder_at_a_server(store: str, web: str, root: Path, endpoint: str) -> None:
    """It has classes, images and versions, except at a web server; what is not there is named by its URL."""
    url = web if store == "web" else endpoint
    found = folder_of(store, url)
    parts = found.fingerprint()

    assert found.classes == ["class0", "class1"]
    images = [(f"class{i // 10}/{i:02}.png", i // 10) for i in range(SIZE)]
    assert [(path.rpartition("train/")[2], label) for path, label in found.samples] == images
    assert found[3][0][0, 0, 0] == 3
    assert parts == (None if store == "web" else folder_of("s3", url).fingerprint())
    assert parts is None or parts["files"].startswith("20 files, digest ")
    with pytest.raises(FileNotFoundError, match=r"there is no folder at (http|s3)://.*/nowhere"):
        folder_of(store, url, "nowhere")
    if store == "obstore":
        return
    fs = fsspec.filesystem("s3", endpoint_url=endpoint, skip_instance_cache=True)
    (root / "gone/a").mkdir(parents=True, exist_ok=True)
    for i in (1, 2):
        (root / f"gone/a/{i}.png").write_bytes(png(i))
        fs.pipe(f"photos/gone/a/{i}.png", png(i))
    gone = folder_of(store, url, "gone")
    (root / "gone/a/1.png").unlink()
    fs.rm("photos/gone/a/1.png")
    with pytest.raises(fastload.errors.ImageReadError, match=r"/gone/a/1.png.*it was there when the"):
        gone[0]
    assert gone[1][0][0, 0, 0] == 2


@pytest.mark.parametrize(
    ("store", "loader_of", "method"),
    [
        *((store, fastload.DataLoader, "fork") for store in ("web", "s3", "obstore")),
        *((store, fastload.DataLoader, "forkserver") for store in ("s3", "obstore")),
        ("s3", torch.utils.data.DataLoader, "fork"),
    ],
)
def test_workers_read_it(store: str, loader_of: Any, method: str, web: str, endpoint: str) -> None:
    """The parent has used its connections before; a client whose threads no fork has refuses one."""
    found = folder_of(store, web if store == "web" else endpoint)
    assert found[3][0][0, 0, 0] == 3
    loader = loader_of(found, 4, num_workers=1, multiprocessing_context=method)
    if (store, method) == ("obstore", "fork"):
        with pytest.raises(RuntimeError, match=r"whose threads do not survive a fork.*forkserver"):
            next(iter(loader))
    else:
        assert values(loader) == list(range(SIZE))


def test_a_cache_is_shared_by_versions_or_by_a_key(web: str, endpoint: str) -> None:
    """Two datasets of this process, as two ranks would open them."""
    one, other = (fastload.CachedDataset(folder_of("s3", endpoint)) for _ in range(2))
    served = folder_of("web", web)
    keyed = fastload.CachedDataset(served, cache_key=f"photos of {web}")
    assert values(fastload.DataLoader(one, 4)) == list(range(SIZE))
    assert other.cache_info().num_cached == SIZE
    assert "its samples have no versions" in fastload.CachedDataset(served).cache.explain()
    assert "every process that opens it shares it" in keyed.cache.explain()


def test_a_file_takes_one_request(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, s3fs asks for the size of an object first."""
    s3 = fsspec.get_filesystem_class("s3")
    monkeypatch.setattr(s3, "_info", lambda *_: pytest.fail("a second request"))
    folder = folder_of("s3", endpoint)
    assert folder[3][0][0, 0, 0] == 3


def test_without_credentials_the_error_says_how_to_read_a_public_bucket(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    """There is one attempt, and what the error says works."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options: dict[str, Any] = {"endpoint_url": endpoint}
    with pytest.raises(fastload.errors.RemoteFolderError, match=r"storage_options={'anon': True}"):
        fastload.ImageFolder("s3://photos/train", storage_options=options)
    assert pauses == []
    assert len(fastload.ImageFolder("s3://photos/train", storage_options={**options, "anon": True})) == SIZE


# --- requests that stall ---------------------------------------------------------------------------------


CONTENT = bytes(range(256)) * 16


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> Iterator[Stalling]:
    """A server whose clients wait for 1 s."""
    monkeypatch.setenv(file_systems.READ_VARIABLE, "1")
    (tmp_path / "a.bin").write_bytes(CONTENT)
    with Stalling(tmp_path) as found:
        yield found


@pytest.fixture(params=["http", "s3"])
def faulty(
    request: pytest.FixtureRequest, endpoint: str, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> Iterator[tuple[Stalling, Callable[[], RemoteFolder]]]:
    """A server, and what opens its files by HTTP or by S3's protocol."""
    if request.param == "http":
        server = request.getfixturevalue("server")
        yield server, lambda: RemoteFolder(server.url)
    else:
        # The server behind it is slow where the machine is busy, and must not be taken for one that stalls.
        monkeypatch.setenv(file_systems.READ_VARIABLE, "2")
        fs = fsspec.filesystem("s3", endpoint_url=endpoint, skip_instance_cache=True)
        fs.pipe("photos/stalls/a.bin", CONTENT)
        with Stalling(endpoint) as server:
            yield server, lambda: RemoteFolder("s3://photos/stalls", {"endpoint_url": server.url, **KEYS})


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


def test_a_store_that_always_stalls_is_a_warning_and_an_error(
    server: Stalling, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the URL, and the variable that limits the wait, which then is to its end."""
    monkeypatch.setenv(file_systems.READ_VARIABLE, "0.2")
    monkeypatch.setattr(retry, "_SLOW_S", 0.0)
    monkeypatch.setitem(retry._warned, "at_s", float("-inf"))
    server.faults = ["never answers"] * 40
    caplog.set_level("INFO", "fastload")
    with pytest.raises(fastload.errors.ImageReadError, match=r"/a\.bin.*tried \d times in"):
        RemoteFolder(server.url).read("a.bin", len(CONTENT))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"{server.url}/a.bin: no complete answer")
    assert file_systems.READ_VARIABLE in warning
    assert "Timeout" in caplog.messages[1]


def test_a_limit_that_is_no_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the variable."""
    for variable in (file_systems.READ_VARIABLE, file_systems.CONNECT_VARIABLE):
        for value in ("soon", "-1", "0", "inf", "nan"):
            monkeypatch.setenv(variable, value)
            with pytest.raises(ValueError, match=f"{variable}='{value}' should be a number of seconds above"):
                RemoteFolder("http://127.0.0.1:1")
        monkeypatch.delenv(variable)


def test_a_forked_reader_that_ends_leaves_the_connections_of_its_parent(server: Stalling) -> None:
    """The processes share an epoll instance, out of which the child must not take the parent's sockets."""
    folder = RemoteFolder(server.url)
    assert folder.read("a.bin", len(CONTENT)) == CONTENT
    pid = os.fork()
    if pid == 0:
        folder._connection = None  # what a worker's exit does: the last reference goes
        os._exit(0 if folder.read("a.bin", len(CONTENT)) == CONTENT else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert folder.read("a.bin", len(CONTENT)) == CONTENT
    assert len(server.requests) == 3  # none stalled
