"""ImageFolder at a URL: the samples of the same folder on disk, and the files of a batch in one call."""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
from typing import TYPE_CHECKING, Any

import fsspec
import fsspec.asyn
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import ConcatDataset, Subset

import fastload
from fastload.images import remote
from fastload.system.paths import is_url
from tests.kit import servers
from tests.kit.remote import FaultyFileSystem, register, upload
from tests.kit.stalling import Stalling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.kit.stalling import Fault

URL = "faulty://bucket/train"
SIZE = 24
KEYS = {"key": "test", "secret": "test"}


def png(value: int) -> bytes:
    """A small image of one color."""
    buffer = io.BytesIO()
    Image.new("RGB", (6, 5), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="session", autouse=True)
def _loop() -> None:
    """Fsspec starts one thread for all requests of a process, and keeps it."""
    fsspec.asyn.get_loop()


@pytest.fixture
def faulty() -> Iterator[type[FaultyFileSystem]]:
    """The file system behind `faulty://`, empty."""
    register()
    FaultyFileSystem.reset()
    yield FaultyFileSystem
    FaultyFileSystem.reset()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A folder of images in two classes; image i is full of i."""
    for i in range(SIZE):
        path = tmp_path / "train" / f"class{2 * i // SIZE}" / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(i))
    (tmp_path / "train" / "notes.txt").write_text("beside the classes")
    return tmp_path / "train"


@pytest.fixture
def url(local: Path, faulty: type[FaultyFileSystem]) -> str:
    """The same images at a URL."""
    upload(local, URL)
    return URL


def values(batches: Any) -> list[list[int]]:
    """The images of each batch, as the value that fills each of them."""
    return [images[:, 0, 0, 0].tolist() for images, _ in batches]


# --- the list --------------------------------------------------------------------------------------------


names = st.text("aB1. _-é[*", min_size=1, max_size=4).filter(lambda name: name.strip("."))
trees = st.sets(
    st.lists(names, min_size=2, max_size=4).map(lambda parts: "/".join([*parts[:-1], parts[-1] + ".png"])),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(tree=trees)
def test_any_tree_has_torchvisions_order(tree: set[str], tmp_path_factory: Any, faulty: Any) -> None:
    """Folders inside folders, names with spaces, accents and patterns; each file is read."""
    faulty.reset()
    root = tmp_path_factory.mktemp("tree")
    for name in tree:
        path = root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            continue  # a file lies where the folder should be
        path.write_bytes(png(len(name)))
    upload(root, URL)

    ours, theirs = fastload.ImageFolder(URL), fastload.ImageFolder(root)
    found, expected = (
        (folder.classes, folder.targets, [path.removeprefix(str(start)) for path, _ in folder.samples])
        for folder, start in ((ours, URL), (theirs, root))
    )
    assert found == expected
    assert values(fastload.DataLoader(ours, 99)) == values(fastload.DataLoader(theirs, 99))


def test_a_store_without_the_folder_or_with_errors_is_an_error(
    url: str, faulty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the URL, and says what to check."""
    with pytest.raises(FileNotFoundError, match=r"class folder in faulty://nowhere"):
        fastload.ImageFolder("faulty://nowhere")
    for error, said in (
        (
            PermissionError("forbidden"),
            r"PermissionError: forbidden\. Check the credentials, or pass storage_",
        ),
        (ConnectionError("reset"), "ConnectionError: reset$"),
    ):
        monkeypatch.setattr(faulty, "find", lambda *_, error=error, **__: (_ for _ in ()).throw(error))
        with pytest.raises(fastload.errors.RemoteFolderError, match=f"cannot list {url}/: {said}"):
            fastload.ImageFolder(url)


def test_what_is_no_object_store_is_refused(monkeypatch: pytest.MonkeyPatch, local: Path) -> None:
    """The error says what is expected, or which package is missing."""
    for root in ("zip://::a.zip", "tar::s3://b/a.tar", "http://host/train", "https://host/train"):
        with pytest.raises(ValueError, match="a folder of an object store, such as s3://bucket/train"):
            fastload.ImageFolder(root)
    with pytest.raises(ValueError, match="cannot open s9://b/c/: Protocol not known: s9"):
        fastload.ImageFolder("s9://b/c")
    with pytest.raises(ValueError, match="storage_options= is for URLs, but root is the path"):
        fastload.ImageFolder(local, storage_options={})
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match=r"pip install \"fastload-torch\[remote\]\""):
        fastload.ImageFolder(URL)


def test_urls_are_told_from_paths(local: Path) -> None:
    """A colon alone makes no URL; a file URL is a path, which is read without fsspec."""
    urls = ["s3://bucket/train", "memory://x", "zip://train::s3://bucket/train.zip", "simplecache::s3://b"]
    paths = ["file:///data/train", "/data/train", "train", "a:b", "./s3:/x"]
    assert [is_url(text) for text in urls + paths] == [True] * len(urls) + [False] * len(paths)
    folder = fastload.ImageFolder(f"file://{local}")
    assert folder[4][0][0, 0, 0] == 4
    assert (folder.__getitems__, folder._expect) == (None, None)


def test_the_fingerprint_changes_with_any_file(url: str) -> None:
    """Content, name, and number of files, which are all that it has."""
    fs, first = fsspec.filesystem("faulty"), f"{url}/class0/00.png"
    found = {str(fastload.ImageFolder(url).fingerprint())}
    for change in (
        lambda: fs.pipe_file(first, png(200)),
        lambda: fs.mv(first, f"{url}/class0/000.png"),
        lambda: fs.rm(f"{url}/class0/000.png"),
    ):
        change()
        found.add(str(fastload.ImageFolder(url).fingerprint()))
    assert len(found - {"None"}) == 4
    with pytest.raises(ValueError, match=r"select some with torch\.utils\.data\.Subset"):
        fastload.ImageFolder(url).samples = [("elsewhere.png", 0)]


# --- the files of a batch --------------------------------------------------------------------------------


DATASETS: dict[str, Callable[[Any], Any]] = {
    "the folder": lambda folder: folder,
    "subset": lambda folder: Subset(folder, range(SIZE)),
    "concat": lambda folder: ConcatDataset([Subset(folder, range(7)), Subset(folder, range(7, SIZE))]),
    "cached": fastload.CachedDataset,
    "prepared": lambda folder: fastload.CachedDataset(folder, pre_transform=prepared, cache_key="prepared"),
    "none": lambda folder: fastload.CachedDataset(folder, cache=None),
}


def prepared(sample: Any) -> Any:
    """A deterministic step before the cache."""
    return sample


@pytest.mark.parametrize(
    ("kind", "loader_of"),
    [*((kind, fastload.DataLoader) for kind in DATASETS), ("the folder", torch.utils.data.DataLoader)],
)
def test_the_files_of_a_batch_are_fetched_in_one_call(
    kind: str, loader_of: Any, url: str, faulty: type[FaultyFileSystem]
) -> None:
    """Each once, also of samples that repeat; of a CachedDataset, those that are not cached."""
    dataset = DATASETS[kind](fastload.ImageFolder(url))
    order = [20, 3, 3, -5, 8, 7, 1, 7]
    if kind == "concat":
        order[3] += SIZE  # torch's Subset inside of it has no negative ones
    expected = [[20, 3, 3, 19], [8, 7, 1, 7]]
    for calls in (
        [["03.png", "19.png", "20.png"], ["01.png", "07.png", "08.png"]],
        *[[]] * (kind in ("cached", "prepared")),
    ):
        faulty.calls.clear()
        assert values(loader_of(dataset, 4, sampler=order)) == expected
        assert [sorted(call) for call in faulty.calls] == calls


@pytest.mark.parametrize(
    "options",
    [
        {"seeding": "sample"},
        {"num_workers": 1},
        {"num_workers": 2, "worker_type": "thread"},
        {"batch_size": None},
    ],
)
def test_a_loader_gives_the_batches_of_the_local_folder(options: Any, local: Path, url: str) -> None:
    """Shuffled; its own bulk read is no reason to refuse random numbers by sample."""
    options = {"batch_size": 5, "shuffle": True, **options}
    found = []
    for root in (url, local):
        loader = fastload.DataLoader(
            fastload.ImageFolder(root), generator=torch.Generator().manual_seed(3), **options
        )
        found.append([(images.tolist(), labels) for images, labels in loader])
    assert str(found[0]) == str(found[1])


def test_at_most_the_limit_is_fetched_at_once(url: str, faulty: Any, monkeypatch: Any) -> None:
    """A larger batch takes several calls, one after another; a file above the limit comes alone."""
    monkeypatch.setattr(remote, "_MAX_BYTES", 3 * len(png(0)) + 60)
    fsspec.filesystem("faulty").pipe_file(f"{url}/class0/05.png", png(5) + bytes(1000))
    loader = fastload.DataLoader(fastload.ImageFolder(url), 10, sampler=[*range(9), 0])
    assert values(loader) == [[*range(9), 0]]
    assert [len(call) for call in faulty.calls] == [3, 2, 1, 3, 1]


@pytest.mark.parametrize("cache", ["ram", "lmdb"])
def test_filling_a_cache_fetches_the_files_of_many_tasks_in_one_call(
    cache: str, url: str, tmp_path: Path, faulty: type[FaultyFileSystem]
) -> None:
    """A task has 3 samples; those that are tried first are fetched alone."""
    folder = fastload.ImageFolder(url)
    if cache == "lmdb":
        fastload.CachedDataset.build(folder, tmp_path / "cache", num_workers=0).close()
    else:
        fastload.CachedDataset(folder).fill(0, progress=False)
    assert max(map(len, faulty.calls)) > SIZE // 2
    assert faulty.reads.total() == SIZE + 3  # three are tried twice


ERRORS: list[tuple[Exception, str]] = [
    (FileNotFoundError("gone"), "FileNotFoundError: gone"),
    (PermissionError("Forbidden"), "PermissionError: Forbidden. Check the credentials"),
    (ConnectionError("reset"), "ConnectionError: reset"),
]


@pytest.mark.parametrize(("error", "said"), ERRORS, ids=lambda value: type(value).__name__)
def test_a_file_that_cannot_be_read_is_an_error_of_its_sample(error: Exception, said: str, url: str) -> None:
    """It has the URL; the other samples of the batch are read, and so is the file at the next attempt."""
    folder = fastload.ImageFolder(url)
    FaultyFileSystem.faults["class0/05.png"] = [error]
    with pytest.raises(fastload.errors.ImageReadError, match=said) as info:
        list(fastload.DataLoader(folder, 8))
    assert info.value.path == f"{url}/class0/05.png"
    assert "dataset index 5" in "".join(info.value.__notes__)
    assert folder[5][0][0, 0, 0] == 5
    FaultyFileSystem.faults["class0/05.png"] = [error]
    loader = fastload.DataLoader(folder, 8, on_error="replace", max_errors=1)
    batch = values(loader)[0]
    assert batch[:5] + batch[6:] == [0, 1, 2, 3, 4, 6, 7]
    assert [(failed.index, failed.path) for failed in loader.failed_samples] == [(5, info.value.path)]


def test_a_client_whose_call_fails_is_an_error_of_the_sample(url: str, monkeypatch: Any) -> None:
    """As one without credentials, which raises before it asks for any file."""
    folder = fastload.ImageFolder(url)
    monkeypatch.setattr(FaultyFileSystem, "cat", lambda *_, **__: {}["no session"])
    with pytest.raises(fastload.errors.ImageReadError, match=r"class0/00\.png.*KeyError: 'no session'"):
        list(fastload.DataLoader(folder, 8))


class Half(fastload.ImageFolder):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image // 2, label


def test_a_subclass_keeps_its_own_samples_in_torchs_loader(url: str) -> None:
    """Batches are made through its `__getitem__`, and other indices are its errors."""
    loader: Any = torch.utils.data.DataLoader(Half(url), SIZE)
    assert values(loader) == [[number // 2 for number in range(SIZE)]]
    for index, kind in ((SIZE, IndexError), ("x", TypeError), (None, TypeError)):
        with pytest.raises(kind):
            next(iter(fastload.DataLoader(Half(url), 2, sampler=[0, index])))


# --- a server --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server that speaks S3; it needs seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in servers.CREDENTIALS.items():
            patch.setenv(name, value)
        with servers.s3() as endpoint:
            fs = fsspec.filesystem("s3", endpoint_url=endpoint, skip_instance_cache=True)
            fs.mkdir("photos", create_parents=True)
            fs.pipe({f"photos/train/class{2 * i // SIZE}/{i:02}.png": png(i) for i in range(SIZE)})
            yield endpoint


def folder_at(endpoint: str, **options: Any) -> fastload.ImageFolder:
    """The folder at a server; no retries of the client's, which would take seconds."""
    once = {"config_kwargs": {"retries": {"max_attempts": 0}}}
    return fastload.ImageFolder(
        "s3://photos/train", storage_options={"endpoint_url": endpoint, **KEYS, **once, **options}
    )


@pytest.mark.slow
def test_workers_read_after_their_parent_did(endpoint: str) -> None:
    """By fork and by the fork server, in both loaders; the parent reads on, and its copy reads."""
    folder = folder_at(endpoint)
    assert folder[3][0][0, 0, 0] == 3
    for loader_of, method in (
        (fastload.DataLoader, "fork"),
        (torch.utils.data.DataLoader, "fork"),
        (fastload.DataLoader, "forkserver"),
    ):
        loader = loader_of(folder, 8, num_workers=1, multiprocessing_context=method)
        assert values(loader) == [[*range(first, first + 8)] for first in (0, 8, 16)]
        assert folder[4][0][0, 0, 0] == 4
    assert pickle.loads(pickle.dumps(folder))[5][0][0, 0, 0] == 5
    assert folder.fingerprint() == folder_at(endpoint).fingerprint() is not None


@pytest.mark.slow
def test_a_forked_reader_that_ends_leaves_the_connections_of_its_parent(endpoint: str) -> None:
    """The processes share an epoll instance, out of which the child must not take the parent's sockets."""
    folder = folder_at(endpoint)
    assert folder[3][0][0, 0, 0] == 3
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # a child that waits for a thread of its parent would never end
        value = int(folder[9][0][0, 0, 0])
        del folder  # what a worker's exit does
        os._exit(value)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert folder[4][0][0, 0, 0] == 4


@pytest.mark.slow
def test_a_file_takes_one_request(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, s3fs asks for the size of an object first."""
    monkeypatch.setattr(
        fsspec.get_filesystem_class("s3"), "_info", lambda *_: pytest.fail("a second request")
    )
    assert folder_at(endpoint)[3][0][0, 0, 0] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"), [("is denied", "PermissionError"), ("drops the connection", "ConnectionClosedError")]
)
def test_a_server_with_faults_is_an_error_with_the_url(
    fault: Fault, said: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the client's own attempts; the other samples of the batch are there."""
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 1)  # with more it pauses for seconds
    with Stalling(endpoint) as server:
        folder = folder_at(server.url)
        server.faulty, server.faults = "/05.png", [fault] * 20
        loader = fastload.DataLoader(folder, 8, on_error="replace", max_errors=1)
        batch = values(loader)[0]
        (failed,) = loader.failed_samples
        server.faulty = "no path"
    assert batch[:5] + batch[6:] == [0, 1, 2, 3, 4, 6, 7]
    assert (failed.index, failed.path) == (5, "s3://photos/train/class0/05.png")
    assert said in failed.reason
