"""ImageFolder of a URL: the samples of the same folder on disk, read at the same time; saved lists."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
from posixpath import normpath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import fsspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset

import fastload
from fastload.files.listing import SAVED_NAME, from_bytes, to_bytes
from fastload.files.remote import RemoteFolder
from tests.files.conftest import png, write_images
from tests.kit.datasets import Made
from tests.kit.remote import meet, raising, until_set, upload
from tests.kit.stalling import Stalling

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.kit.remote import FaultyFileSystem


URL = "faulty://bucket/train"
SIZE = 24


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A folder of images; image i is full of i."""
    return write_images(tmp_path / "train", SIZE)


@pytest.fixture
def url(local: Path, faulty: type[FaultyFileSystem]) -> str:
    """The same images at a URL."""
    upload(local, URL)
    return URL


def values(batches: Any) -> list[list[int]]:
    """The images of each batch, as the value that fills each of them."""
    return [images[:, 0, 0, 0].tolist() for images, _ in batches]


def in_batches_of(number: int) -> list[list[int]]:
    """What a loader over the folder gives."""
    return [list(range(start, min(start + number, SIZE))) for start in range(0, SIZE, number)]


names = st.text("aB1. _-é", min_size=1, max_size=4).filter(lambda name: name.strip("."))
trees = st.sets(
    st.lists(names, min_size=2, max_size=4).map(lambda parts: "/".join([*parts[:-1], parts[-1] + ".png"])),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(tree=trees)
def test_any_tree_has_torchvisions_order(tree: set[str], tmp_path_factory: Any, faulty: Any) -> None:
    """Folders inside folders, names with spaces and accents, files beside folders of the same beginning."""
    faulty.reset()
    root = tmp_path_factory.mktemp("tree")
    for name in tree:
        path = root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            continue  # a file lies where the folder should be
        path.write_bytes(b"")
    upload(root, URL)

    ours, theirs = fastload.ImageFolder(URL), fastload.ImageFolder(root)
    found, expected = (
        (folder.classes, folder.targets, [path.removeprefix(str(start)) for path, _ in folder.samples])
        for folder, start in ((ours, URL), (theirs, root))
    )
    assert found == expected


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"seeding": "sample"}])
def test_a_loader_gives_the_batches_of_the_local_folder(options: Any, local: Path, url: str) -> None:
    """Shuffled; its own bulk read is no reason to refuse random numbers by sample."""
    for wrapped in (lambda folder: folder, lambda folder: Subset(folder, range(SIZE))):
        found = []
        for root in (url, local):
            order = torch.Generator().manual_seed(3)
            dataset = wrapped(fastload.ImageFolder(root))
            found.append(values(fastload.DataLoader(dataset, 5, shuffle=True, generator=order, **options)))
        assert found[0] == found[1]


def test_the_files_of_a_workers_next_batch_are_read_before_it_begins(url: str, faulty: Any) -> None:
    """No read of the third batch ends before those of the fourth have begun.

    The second batch waits until the loader has sent both: it sends no second task to a worker before it knows
    the size of the first batch.
    """
    were_sent, together = multiprocessing.get_context("fork").Event(), meet(8, alone=0)

    def gate(path: str) -> None:
        batch = int(path[-6:-4]) // 4
        if batch == 1:
            until_set(were_sent)
        elif batch in (2, 3):
            together()

    faulty.gate = staticmethod(gate)
    folder = fastload.ImageFolder(url, listing="ignore")
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 4, "multiprocessing_context": "fork"}
    iterator = iter(fastload.DataLoader(folder, 4, **options))
    first = next(iterator)
    were_sent.set()
    assert values([first, *iterator]) == in_batches_of(4)


class Forwarding(Made):
    """A dataset of a user's that holds an ImageFolder and forwards `read_ahead`."""

    def __init__(self, folder: fastload.ImageFolder) -> None:
        super().__init__(folder.__getitem__, len(folder))
        self.folder = folder

    def read_ahead(self, indices: Any) -> None:
        self.folder.read_ahead(indices)


def test_each_file_is_read_once_in_an_epoch(url: str, faulty: type[FaultyFileSystem]) -> None:
    """What was announced is what is taken."""
    dataset = Forwarding(fastload.ImageFolder(url, listing="ignore"))
    for options in ({}, {"num_workers": 2, "worker_type": "thread"}):
        faulty.reads.clear()
        assert values(fastload.DataLoader(dataset, 4, **options)) == in_batches_of(4)
        assert [*faulty.reads.values()] == [1] * SIZE


DATASETS: dict[str, Callable[[Any], Any]] = {
    "the folder": lambda folder: folder,
    "subset": lambda folder: Subset(folder, range(SIZE)),
    "concat": lambda folder: ConcatDataset([Subset(folder, range(7)), Subset(folder, range(7, SIZE))]),
    "forwarding": Forwarding,
    "cached": fastload.CachedDataset,
    "prepared": lambda folder: fastload.CachedDataset(folder, pre_transform=prepared, cache_key="prepared"),
    "none": lambda folder: fastload.CachedDataset(folder, cache=None),
}


@pytest.mark.parametrize(
    ("kind", "loader_of"),
    [*((kind, fastload.DataLoader) for kind in DATASETS), ("the folder", torch.utils.data.DataLoader)],
)
def test_the_files_of_a_batch_are_read_at_the_same_time(
    kind: str, loader_of: Any, url: str, faulty: type[FaultyFileSystem]
) -> None:
    """No read but the first, which makes the client, ends before six have begun."""
    folder = fastload.ImageFolder(url)
    dataset = DATASETS[kind](folder)
    faulty.gate = staticmethod(meet(6))
    assert values(loader_of(dataset, 12)) == in_batches_of(12)
    faulty.reads.clear()
    if kind in ("cached", "prepared"):
        assert values(loader_of(dataset, 5))[0] == list(range(5))
        assert not faulty.reads
        assert not folder._reader()._files  # files that nobody takes would be there, read or not


def prepared(sample: Any) -> Any:
    """A deterministic step before the cache."""
    return sample


TRIED_FIRST = ("-files.jsonl.gz", "/00.png", "/12.png", "/23.png")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("cache", ["ram", "lmdb"])
def test_filling_a_cache_reads_the_files_of_many_tasks_at_the_same_time(
    cache: str, num_workers: int, url: str, tmp_path: Path, faulty: type[FaultyFileSystem]
) -> None:
    """No read ends before all have begun, apart from those that are tried first; a task has 3 samples."""
    together = meet(SIZE - 3, alone=0)
    if not num_workers:
        faulty.gate = staticmethod(lambda path: path.endswith(TRIED_FIRST) or together())
    folder = fastload.ImageFolder(url)
    place: Any = "ram"
    if cache == "lmdb":
        place = fastload.CachedDataset.build(folder, tmp_path / "cache", num_workers=num_workers)
    dataset = fastload.CachedDataset(folder, cache=place)
    if (cache, num_workers) == ("lmdb", 0):
        assert faulty.reads.total() == SIZE + 2 + 1  # two are tried twice; the list of files is looked for
    assert dataset.fill(num_workers=num_workers, progress=False).num_cached == SIZE
    assert values(fastload.DataLoader(dataset, SIZE)) == [list(range(SIZE))]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_file_that_is_gone_is_an_error_at_its_batch(url: str, faulty: Any, num_workers: int) -> None:
    """The error names the URL and the sample; the next batch comes."""
    folder = fastload.ImageFolder(url)
    faulty.faults["class0/05.png"] = [raising(FileNotFoundError("gone"))]
    iterator = iter(fastload.DataLoader(folder, 4, num_workers=num_workers))
    assert values([next(iterator)]) == [[0, 1, 2, 3]]
    # As torch's, a worker's error whose class takes two arguments is raised as a RuntimeError.
    kinds = (fastload.errors.ImageReadError, RuntimeError)
    with pytest.raises(kinds, match=r"faulty://bucket/train/class0/05\.png.*gone") as info:
        next(iterator)
    assert "dataset index 5" in "".join([str(info.value), *info.value.__notes__])
    assert values([next(iterator)]) == [[8, 9, 10, 11]]


class Half(fastload.ImageFolder):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image // 2, label


def test_a_subclass_keeps_its_own_samples_in_torchs_loader(url: str) -> None:
    """Batches are made through its `__getitem__`."""
    loader: Any = torch.utils.data.DataLoader(Half(url), SIZE)
    assert values(loader) == [[number // 2 for number in range(SIZE)]]


def test_read_ahead_ignores_indices_without_a_sample(url: str) -> None:
    """Reading such a sample raises the error, at its place; a pickle begins anew."""
    folder = fastload.ImageFolder(url)
    folder.read_ahead([SIZE, "x", None, *range(SIZE)])  # type: ignore[list-item]
    copy = pickle.loads(pickle.dumps(folder))
    assert not copy._ahead
    assert copy[3][1] == folder[0][1] == 0
    with pytest.raises(IndexError, match="sample 24 is out of range"):
        folder[SIZE]


def test_a_forked_process_reads_by_itself(url: str, faulty: type[FaultyFileSystem]) -> None:
    """The threads of its parent are not there, of which one reads the same file during the fork."""
    folder, parent = fastload.ImageFolder(url), os.getpid()
    begun, may_end = threading.Event(), threading.Event()
    faulty.gate = lambda _: os.getpid() == parent and (begun.set(), until_set(may_end))
    folder.read_ahead([9])
    until_set(begun)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a child that waits for a thread of its parent would never end
        os._exit(int(folder[9][0][0, 0, 0]))
    may_end.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_the_fingerprint_changes_with_any_file(url: str) -> None:
    """Content, name, and number of files."""
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


def test_a_saved_list_is_used(url: str, faulty: Any, pauses: list[float], caplog: Any) -> None:
    """A file that was added later is not seen, the fingerprint is the same, and the log says so."""
    fs = fsspec.filesystem("faulty")
    fs.pipe_file(f"{url}/class0/99.xyz", png(99))
    saved = fastload.ImageFolder(url, listing="save")
    fs.pipe_file(f"{url}/class0/99.png", png(99))
    fs.pipe_file(f"{url}/class0/00.png", png(0) + b"more")
    caplog.set_level(logging.INFO)

    used = fastload.ImageFolder(url)

    assert fs.exists(f"{url}/{SAVED_NAME}")
    assert len(used) == len(saved) == SIZE
    assert used.fingerprint() == saved.fingerprint()
    assert "from the list saved there on" in caplog.text
    with pytest.raises(fastload.errors.ImageReadError, match="when the folder was listed"):
        used[0]  # its length is another
    assert len(fastload.ImageFolder(url, extensions=[".xyz"], allow_empty=True)) == 1
    for listing in ("ignore", "save", "use"):
        assert len(fastload.ImageFolder(url, listing=listing)) == SIZE + 1


def test_options_that_mean_nothing(local: Path, url: str) -> None:
    """The error says what is expected; a folder that does not exist is one, and not an empty dataset."""
    for root, options, kind, said in (
        (local, {"listing": "save"}, ValueError, "are for URLs, but root is the path"),
        (local, {"storage_options": {}}, ValueError, "are for URLs, but root is the path"),
        (url, {"filesystem": 1, "storage_options": {}}, ValueError, "either storage_options= or filesystem="),
        (url, {"filesystem": "s3"}, TypeError, "should be an fsspec file system, but got 's3'"),
        (url, {"listing": "auto"}, ValueError, '"use", "save" or "ignore", but got \'auto\''),
    ):
        with pytest.raises(kind, match=said):
            fastload.ImageFolder(root, **options)
    with pytest.raises(FileNotFoundError, match="there is no folder at faulty://nowhere"):
        fastload.ImageFolder("faulty://nowhere")


def test_a_file_url_is_a_path(local: Path) -> None:
    """It is read without fsspec, and a folder on disk has no bulk reads at all."""
    folder = fastload.ImageFolder(f"file://{local}")
    folder.read_ahead([0])
    assert folder[4][0][0, 0, 0] == 4
    assert (folder._remote, folder.__getitems__, folder._reads_ahead) == (None, None, False)
    assert folder._ahead == {}


# --- links that lead elsewhere ---------------------------------------------------------------------------


def write_pages(folder: Path, pages: dict[str, list[str]]) -> None:
    """Puts pages of links at these paths of the web server of a folder."""
    for path, links in pages.items():
        (folder / path).mkdir(parents=True, exist_ok=True)
        (folder / path / "index.html").write_text("".join(f'<a href="{link}">x</a>\n' for link in links))


LEADING_OUT = [
    *("../", "../../private/", "../../private/secret.png", "..", "x/../../../private/"),
    *("/private/", "/private/secret.png", "//127.0.0.2/private/", "//127.0.0.2/pub/a/1.png"),
    *("http://127.0.0.2/pub/a/1.png", "{url}/private/secret.png", "{url}/pub/a/../../private/"),
    *("{url}/pub/a/%2e%2e/%2E%2E/private/", "{https}/pub/a/1.png"),
    *("%2e%2e/%2e%2e/private/", "%2e%2e/%2E./private/secret.png", ".%2e/", "..%2f..%2fprivate/"),
    *("..\\..\\private/", "%2e%2e%5c%2e%2e%5cprivate/secret.png", ".\t./.\t./private/secret.png"),
    *("./", "%2e/", "", "/pub/a/", "gone/"),
]


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    """Neither while the folder is listed, nor as a sample; the list of files can be saved and read."""
    with Stalling(tmp_path) as server:
        places = {"{url}": server.url, "{https}": server.url.replace("http:", "https:")}
        for link in LEADING_OUT:
            for name, place in places.items():
                link = link.replace(name, place)
            write_pages(tmp_path, {"pub": ["a/", link], "pub/a": ["0.png", link], "private": ["secret.png"]})
            server.requests.clear()
            classes, files = RemoteFolder(f"{server.url}/pub").list_files()
            asked = [path for path, _ in server.requests]
            assert "/pub/a/" in asked, link
            assert [name for name in classes if name not in ("gone", "x")] == ["a"], link
            assert [file.name for file in files if file.name.endswith(".png")] == ["a/0.png"], link
            assert from_bytes(to_bytes(classes, files))[1:] == (classes, sorted(files)), link
            assert all(path.startswith("/pub") and ".." not in unquote(path) for path in asked), link


@pytest.mark.parametrize(
    ("place", "links"),
    [
        ("", {"": ["a/", "//127.0.0.2/1.png"], "a": ["0.png", "//127.0.0.2/b/"]}),
        ("/pub", {"pub": ["./", "./a/"], "pub/a": ["./", "./0.png"]}),
    ],
)
def test_only_links_below_a_page_are_followed(place: str, links: dict[str, Any], tmp_path: Path) -> None:
    """Not those to another host, which look like paths; `./name` is the name, as some servers write it."""
    write_pages(tmp_path, links)
    with Stalling(tmp_path) as server:
        classes, files = RemoteFolder(f"{server.url}{place}").list_files()
        asked = {normpath(path) for path, _ in server.requests}
    assert (classes, [file.name for file in files]) == (["a"], ["a/0.png"])
    assert asked == {normpath(f"/{page}") for page in links}
