"""ImageFolder over a plain web server, whose listings are pages of links without lengths and versions."""

from __future__ import annotations

import http.server
import threading
from posixpath import normpath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest
from PIL import Image

import fastload
from fastload.files.listing import from_bytes, to_bytes
from fastload.files.remote import RemoteFolder
from tests.kit import servers

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 12


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Images in two classes, one of which has a folder inside; image i is full of i."""
    root = tmp_path_factory.mktemp("served")
    for number in range(SIZE):
        folder = root / "train" / ("a" if number < 6 else "b/more")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 5), (number,) * 3).save(folder / f"{number:02}.png")
    (root / "train" / "notes.txt").write_text("beside the classes")
    with servers.web(root) as server:
        len(fastload.ImageFolder(f"{server}/train"))  # the thread of fsspec stays
        yield f"{server}/train"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_it_has_the_classes_and_the_images(url: str, num_workers: int) -> None:
    """Found by following the links of each page."""
    folder = fastload.ImageFolder(url)

    batches = list(fastload.DataLoader(folder, 5, num_workers=num_workers))

    assert folder.classes == ["a", "b"]
    assert [path.removeprefix(url) for path, _ in folder.samples][-1] == "/b/more/11.png"
    assert [int(value) for images, _ in batches for value in images[:, 0, 0, 0]] == list(range(SIZE))


def test_it_has_no_fingerprint(url: str) -> None:
    """A web server's page states neither lengths nor versions, so a cache is private without a key."""
    folder = fastload.ImageFolder(url)
    shared = fastload.CachedDataset(folder, key=f"photos of {url}")

    assert folder.fingerprint() is None
    assert "neither a fingerprint() nor a key" in fastload.CachedDataset(folder).cache.explain()
    assert "every process that opens it shares it" in shared.cache.explain()


def test_a_page_that_is_not_there_is_an_error(url: str) -> None:
    """It names the URL."""
    with pytest.raises(FileNotFoundError, match=r"there is no folder at http://.*/nowhere"):
        fastload.ImageFolder(url.replace("/train", "/nowhere"))


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
def pages(url: str) -> Iterator[Pages]:  # after `url`, which starts the thread of fsspec
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
