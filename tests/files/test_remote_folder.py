"""ImageFolder of a URL: the samples of the same folder on disk, read at the same time; of a web server."""

from __future__ import annotations

import http.server
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
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import ConcatDataset, Subset

import fastload
from fastload.files.listing import SAVED_NAME, from_bytes, to_bytes
from fastload.files.remote import RemoteFolder
from tests.files.conftest import png
from tests.kit import servers
from tests.kit.remote import meet, raising, until_set, upload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.kit.remote import FaultyFileSystem


URL = "faulty://bucket/train"
CLASSES, EACH = 2, 12
SIZE = CLASSES * EACH


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A folder of images; image i is full of i."""
    for label in range(CLASSES):
        folder = tmp_path / "train" / f"class{label}"
        folder.mkdir(parents=True)
        for number in range(EACH):
            (folder / f"{number:02}.png").write_bytes(png(label * EACH + number))
    return tmp_path / "train"


@pytest.fixture
def url(local: Path, faulty: type[FaultyFileSystem]) -> str:
    """The same images at a URL."""
    upload(local, URL)
    return URL


def values(batches: Any) -> list[list[int]]:
    """The images of each batch, as the value that fills each of them."""
    return [images[:, 0, 0, 0].tolist() for images, _ in batches]


names = st.text("aB1. _-é", min_size=1, max_size=4).filter(lambda name: name.strip("."))
trees = st.sets(
    st.lists(names, min_size=2, max_size=4).map(lambda parts: "/".join([*parts[:-1], parts[-1] + ".png"])),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(tree=trees)
def test_any_tree_has_torchvisions_order(
    tree: set[str], tmp_path_factory: pytest.TempPathFactory, faulty: type[FaultyFileSystem]
) -> None:
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

    assert ours.classes == theirs.classes
    assert [path.removeprefix(URL) for path, _ in ours.samples] == [
        path.removeprefix(str(root)) for path, _ in theirs.samples
    ]
    assert ours.targets == theirs.targets


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader_of", "num_workers"),
    [(fastload.DataLoader, 0), (fastload.DataLoader, 2), (torch.utils.data.DataLoader, 1)],
)
def test_a_loader_gives_the_batches_of_the_local_folder(
    local: Path, url: str, loader_of: Any, num_workers: int
) -> None:
    """Shuffled, with either loader."""

    def batches(root: Any) -> list[list[int]]:
        torch.manual_seed(3)
        return values(loader_of(fastload.ImageFolder(root), 5, shuffle=True, num_workers=num_workers))

    assert batches(url) == batches(local)


@pytest.mark.parametrize("loader_of", [fastload.DataLoader, torch.utils.data.DataLoader])
def test_the_files_of_a_batch_are_read_at_the_same_time(
    url: str, faulty: type[FaultyFileSystem], loader_of: Any
) -> None:
    """No read but the first, which makes the client, ends before seven have begun."""
    folder = fastload.ImageFolder(url)
    faulty.gate = staticmethod(meet(7))

    found = values(loader_of(folder, 8))

    assert found == [list(range(start, start + 8)) for start in range(0, SIZE, 8)]


def test_the_files_of_a_workers_next_batch_are_read_before_it_begins(
    url: str, faulty: type[FaultyFileSystem]
) -> None:
    """No read of the third batch ends before those of the fourth have begun.

    The second batch waits until the loader has sent both: it sends no second task to a worker before it knows
    the size of the first batch.
    """
    were_sent, together = multiprocessing.get_context("fork").Event(), meet(8, alone=0)
    batch_of = {f"class{number // EACH}/{number % EACH:02}.png": number // 4 for number in range(SIZE)}

    def gate(path: str) -> None:
        batch = batch_of[path.removeprefix("/bucket/train/")]
        if batch == 1:
            until_set(were_sent)
        elif batch in (2, 3):
            together()

    faulty.gate = staticmethod(gate)
    loader = fastload.DataLoader(
        fastload.ImageFolder(url, listing="ignore"),
        4,
        num_workers=1,
        prefetch_factor=4,
        multiprocessing_context="fork",
    )
    iterator = iter(loader)
    first = next(iterator)
    were_sent.set()

    assert values([first, *iterator]) == [list(range(start, start + 4)) for start in range(0, SIZE, 4)]


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_each_file_is_read_once_in_an_epoch(
    url: str, faulty: type[FaultyFileSystem], worker_type: Any
) -> None:
    """What was announced is what is taken."""
    options: Any = {} if worker_type == "thread" else {"multiprocessing_context": "fork"}
    dataset = Counting(fastload.ImageFolder(url), faulty)
    loader = fastload.DataLoader(dataset, 4, num_workers=2, worker_type=worker_type, **options)

    reads = torch.cat([counts for _, counts in loader])

    assert len(reads) == SIZE
    assert (reads == 1).all()


class Counting(torch.utils.data.Dataset[Any]):
    """A dataset of a user's that holds an ImageFolder and forwards `read_ahead`.

    Sample i is its image, and how often its file was read in this process.
    """

    def __init__(self, folder: fastload.ImageFolder, store: type[FaultyFileSystem]) -> None:
        self.folder = folder
        self.store = store

    def __len__(self) -> int:
        return len(self.folder)

    def read_ahead(self, indices: Any) -> None:
        self.folder.read_ahead(indices)

    def __getitem__(self, index: int) -> Any:
        image, _ = self.folder[index]
        name = self.folder.samples[index][0].removeprefix("faulty:/")
        return image, self.store.reads[name]


@pytest.mark.parametrize("wrap", ["subset", "concat", "cached", "prepared", "none", "encoded"])
def test_datasets_around_it_read_ahead(url: str, faulty: type[FaultyFileSystem], wrap: str) -> None:
    """Torch's Subset and ConcatDataset, and every kind of CachedDataset."""
    folder = fastload.ImageFolder(url)
    dataset: Any = {
        "subset": lambda: Subset(folder, list(range(SIZE))[::-1]),
        "concat": lambda: ConcatDataset([Subset(folder, range(7)), Subset(folder, range(7, SIZE))]),
        "cached": lambda: fastload.CachedDataset(folder),
        "prepared": lambda: fastload.CachedDataset(folder, prepare=twice, cache_key="twice"),
        "none": lambda: fastload.CachedDataset(folder, cache=None),
        "encoded": lambda: fastload.CachedDataset(folder, cache="ram-encoded"),
    }[wrap]()
    faulty.gate = staticmethod(meet(6))

    found = values(fastload.DataLoader(dataset, 12))

    expected = np.arange(SIZE).reshape(-1, 12)
    expected = SIZE - 1 - expected if wrap == "subset" else expected * (2 if wrap == "prepared" else 1)
    assert found == expected.tolist()


def twice(sample: Any) -> Any:
    """A deterministic step before the cache."""
    image, label = sample
    return image * 2, label


def test_cached_samples_are_not_announced(url: str, faulty: type[FaultyFileSystem]) -> None:
    """The second epoch reads no file."""
    folder = fastload.ImageFolder(url)
    loader = fastload.DataLoader(fastload.CachedDataset(folder), 5)
    first = values(loader)
    faulty.reads.clear()

    assert values(loader) == first
    assert not faulty.reads
    assert not folder._reader()._files  # files that nobody takes would be there, read or not


TRIED_FIRST = ("-files.jsonl.gz", "class0/00.png", "class1/00.png", "class1/11.png")


@pytest.mark.parametrize("cache", ["ram", "lmdb"])
def test_filling_a_cache_reads_the_files_of_many_tasks_at_the_same_time(
    cache: str, url: str, tmp_path: Path, faulty: type[FaultyFileSystem]
) -> None:
    """No read ends before all have begun, apart from those that are tried first; a task has 3 samples."""
    together = meet(SIZE - 3, alone=0)
    faulty.gate = staticmethod(lambda path: path.endswith(TRIED_FIRST) or together())
    place = "ram" if cache == "ram" else f"lmdb:{tmp_path / 'cache'}"
    dataset = fastload.CachedDataset(fastload.ImageFolder(url), cache=place, num_workers=0)
    if cache == "lmdb":
        assert (
            faulty.reads.total() == SIZE + 2 + 1
        )  # two are tried twice, and the list of files is looked for
    info = dataset.fill(num_workers=0, progress=False)

    assert info.num_cached == SIZE
    assert values(fastload.DataLoader(dataset, SIZE)) == [list(range(SIZE))]


@pytest.mark.parametrize("cache", ["ram", "lmdb"])
def test_workers_fill_a_cache_from_it(cache: str, url: str, tmp_path: Path) -> None:
    """The samples are those of the folder."""
    place = "ram" if cache == "ram" else f"lmdb:{tmp_path / 'cache'}"
    dataset = fastload.CachedDataset(fastload.ImageFolder(url), cache=place, num_workers=2)

    assert dataset.fill(2).num_cached == SIZE
    assert values(fastload.DataLoader(dataset, SIZE)) == [list(range(SIZE))]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_file_that_is_gone_is_an_error_at_its_batch(
    url: str, faulty: type[FaultyFileSystem], num_workers: int
) -> None:
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


def test_a_subclass_keeps_its_own_samples_in_torchs_loader(url: str, local: Path) -> None:
    """Batches are made through its `__getitem__`; a folder on disk has no bulk reads at all."""

    class Half(fastload.ImageFolder):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image // 2, label

    loader: Any = torch.utils.data.DataLoader(Half(url), SIZE)

    assert values(loader) == [[number // 2 for number in range(SIZE)]]
    on_disk = fastload.ImageFolder(local)
    on_disk.read_ahead([0])
    assert (on_disk.__getitems__, on_disk._reads_ahead, on_disk._ahead) == (None, False, {})


def test_read_ahead_ignores_indices_without_a_sample(url: str) -> None:
    """Reading such a sample raises the error, at its place; a pickle begins anew."""
    folder = fastload.ImageFolder(url)
    folder.read_ahead([SIZE, "x", None, *range(SIZE)])  # type: ignore[list-item]
    copy = pickle.loads(pickle.dumps(folder))

    assert not copy._ahead
    assert copy[3][1] == folder[0][1] == 0
    with pytest.raises(IndexError, match="sample 24 is out of range"):
        folder[SIZE]


@pytest.mark.parametrize("is_subset", [False, True])
def test_rng_sample_takes_it(local: Path, url: str, *, is_subset: bool) -> None:
    """Its own bulk read, which only torch's loader calls, is no reason to refuse it."""

    def batches(root: Any) -> list[list[int]]:
        folder: Any = fastload.ImageFolder(root)
        dataset = Subset(folder, range(SIZE)) if is_subset else folder
        generator = torch.Generator().manual_seed(1)
        return values(fastload.DataLoader(dataset, 5, shuffle=True, generator=generator, rng="sample"))

    assert batches(url) == batches(local)


def test_a_forked_process_reads_by_itself(url: str, faulty: type[FaultyFileSystem]) -> None:
    """The threads of its parent are not there, of which one reads the same file during the fork."""
    folder = fastload.ImageFolder(url)
    parent, begun, may_end = os.getpid(), threading.Event(), threading.Event()

    def gate(path: str) -> None:
        if os.getpid() == parent:
            begun.set()
            until_set(may_end)

    faulty.gate = staticmethod(gate)
    folder.read_ahead([9])
    until_set(begun)

    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a child that waits for a thread of its parent would never end
        os._exit(int(folder[9][0][0, 0, 0]))
    may_end.set()

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


# --- fingerprints and lists ------------------------------------------------------------------------------


def test_the_fingerprint_changes_with_any_file(url: str) -> None:
    """Content, name, and number of files."""
    fs = fsspec.filesystem("faulty")
    found = [fastload.ImageFolder(url).fingerprint()]
    fs.pipe_file(f"{url}/class0/00.png", png(200))
    found.append(fastload.ImageFolder(url).fingerprint())
    fs.mv(f"{url}/class0/00.png", f"{url}/class0/000.png")
    found.append(fastload.ImageFolder(url).fingerprint())
    fs.rm(f"{url}/class0/000.png")
    found.append(fastload.ImageFolder(url).fingerprint())

    assert all(parts is not None for parts in found)
    assert len({str(parts) for parts in found}) == 4


def test_a_saved_list_is_used(
    url: str, faulty: type[FaultyFileSystem], pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
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
    with pytest.raises(
        fastload.errors.ImageReadError, match="when the folder was listed"
    ):  # its length is another
        used[0]
    assert len(fastload.ImageFolder(url, extensions=[".xyz"], allow_empty=True)) == 1
    for listing in ("ignore", "save", "use"):
        assert len(fastload.ImageFolder(url, listing=listing)) == SIZE + 1


# --- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_url", "options", "kind", "said"),
    [
        (False, {"listing": "save"}, ValueError, "are for URLs, but root is the path"),
        (False, {"storage_options": {}}, ValueError, "are for URLs, but root is the path"),
        (
            True,
            {"filesystem": fsspec.filesystem("memory"), "storage_options": {}},
            ValueError,
            "either storage_options= or filesystem=",
        ),
        (True, {"filesystem": "s3"}, TypeError, "should be an fsspec file system, but got 's3'"),
        (True, {"listing": "auto"}, ValueError, '"use", "save" or "ignore", but got \'auto\''),
    ],
)
def test_options_that_mean_nothing(
    is_url: bool, options: dict[str, Any], kind: type[Exception], said: str, local: Path, url: str
) -> None:
    """The error says what is expected; a folder that does not exist is one, and not an empty dataset."""
    with pytest.raises(kind, match=said):
        fastload.ImageFolder(url if is_url else local, **options)
    with pytest.raises(FileNotFoundError, match="there is no folder at faulty://nowhere"):
        fastload.ImageFolder("faulty://nowhere")


def test_a_file_url_is_a_path(local: Path) -> None:
    """It is read without fsspec."""
    folder = fastload.ImageFolder(f"file://{local}")

    assert folder._remote is None
    assert folder[4][0][0, 0, 0] == 4


# --- a web server --------------------------------------------------------------------------------------


NUM_SERVED = 12


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Images in two classes, one of which has a folder inside; image i is full of i."""
    root = tmp_path_factory.mktemp("served")
    for number in range(NUM_SERVED):
        folder = root / "train" / ("a" if number < 6 else "b/more")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 5), (number,) * 3).save(folder / f"{number:02}.png")
    (root / "train" / "notes.txt").write_text("beside the classes")
    with servers.web(root) as server:
        len(fastload.ImageFolder(f"{server}/train"))  # the thread of fsspec stays
        yield f"{server}/train"


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_it_has_the_classes_and_the_images(web: str, num_workers: int) -> None:
    """Found by following the links of each page."""
    folder = fastload.ImageFolder(web)

    batches = list(fastload.DataLoader(folder, 5, num_workers=num_workers))

    assert folder.classes == ["a", "b"]
    assert [path.removeprefix(web) for path, _ in folder.samples][-1] == "/b/more/11.png"
    assert [int(value) for images, _ in batches for value in images[:, 0, 0, 0]] == list(range(NUM_SERVED))


def test_it_has_no_fingerprint(web: str) -> None:
    """A web server's page states neither lengths nor versions, so a cache is private without a key."""
    folder = fastload.ImageFolder(web)
    shared = fastload.CachedDataset(folder, cache_key=f"photos of {web}")

    assert folder.fingerprint() is None
    assert "its samples have no versions; pass cache_key" in fastload.CachedDataset(folder).cache.explain()
    assert "every process that opens it shares it" in shared.cache.explain()


def test_a_page_that_is_not_there_is_an_error(web: str) -> None:
    """It names the URL."""
    with pytest.raises(FileNotFoundError, match=r"there is no folder at http://.*/nowhere"):
        fastload.ImageFolder(web.replace("/train", "/nowhere"))


# --- links that lead elsewhere ---------------------------------------------------------------------------


class Pages(http.server.ThreadingHTTPServer):
    """A web server of pages of links; every other path is an image.

    Attributes:
        links: By the path of a page.
        asked: The paths that were asked for, as they came.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.links: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Page(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        server: Any = self.server
        server.asked.append(self.path)
        links = server.links.get(self.path.rstrip("/"))
        if links is None:
            self.send_error(404)
            return
        body = "".join(f'<a href="{link}">x</a>\n' for link in links).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def pages(web: str) -> Iterator[Pages]:  # after `web`, which starts the thread of fsspec
    """A server of a folder `pub` with the class `a`, beside the folder `private`."""
    with Pages() as server:
        server.links = {
            "/pub": ["a/"],
            "/pub/a": ["0.png"],
            "/private": ["secret.png", "inner/"],
            "/private/inner": ["secret.png"],
        }
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "link",
    [
        *("../", "../../private/", "../../private/secret.png", "..", "x/../../../private/"),
        *("/private/", "/private/secret.png", "//127.0.0.2/private/", "//127.0.0.2/pub/a/1.png"),
        *("http://127.0.0.2/pub/a/1.png", "{url}/private/secret.png", "{url}/pub/a/../../private/"),
        *(
            "{url}/pub/a/%2e%2e/%2E%2E/private/",
            "{url}/pub/a/../../private/secret.png",
            "{https}/pub/a/1.png",
        ),
        *("%2e%2e/%2e%2e/private/", "%2e%2e/%2E./private/secret.png", ".%2e/", "..%2f..%2fprivate/"),
        *("..\\..\\private/", "%2e%2e%5c%2e%2e%5cprivate/secret.png", ".\t./.\t./private/secret.png"),
        *("./", "%2e/", "", "/pub/a/", "gone/"),
    ],
)
def test_links_that_lead_out_of_the_folder_are_not_followed(link: str, pages: Pages) -> None:
    """Neither while the folder is listed, nor as a sample; the list of files can be saved and read."""
    link = link.replace("{url}", pages.url).replace("{https}", pages.url.replace("http:", "https:"))
    for page in ("/pub", "/pub/a"):
        pages.links[page].append(link)

    classes, files = RemoteFolder(f"{pages.url}/pub").list_files()

    assert [name for name in classes if name not in ("gone", "x")] == ["a"]
    assert [file.name for file in files if file.name.endswith(".png")] == ["a/0.png"]
    assert from_bytes(to_bytes(classes, files))[1:] == (classes, sorted(files))
    assert [path for path in pages.asked if not path.startswith("/pub")] == []
    assert [path for path in pages.asked if ".." in unquote(path)] == []


@pytest.mark.parametrize("link", ["//127.0.0.2/1.png", "//127.0.0.2/b/"])
def test_a_link_to_another_host_is_not_followed_from_the_root_of_a_server(link: str, pages: Pages) -> None:
    """It looks like a path on this host."""
    pages.links = {"": ["a/", link], "/a": ["0.png", link]}

    classes, files = RemoteFolder(pages.url).list_files()

    assert (classes, [file.name for file in files]) == (["a"], ["a/0.png"])
    assert set(map(normpath, pages.asked)) == {"/", "/a"}


def test_links_below_this_page_may_say_so(pages: Pages) -> None:
    """`./name` is the name, as some servers write it."""
    pages.links = {"/pub": ["./", "./a/"], "/pub/a": ["./", "./0.png", "./more/"], "/pub/a/more": ["./1.png"]}

    classes, files = RemoteFolder(f"{pages.url}/pub").list_files()

    assert (classes, sorted(file.name for file in files)) == (["a"], ["a/0.png", "a/more/1.png"])
