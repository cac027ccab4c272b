"""ImageFolder over a plain web server, whose listings are pages of links without lengths and versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from PIL import Image

import fastload
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

    assert folder.fingerprint() is None
    assert "neither a fingerprint() nor a key" in fastload.CachedDataset(folder).cache.explain()


def test_a_page_that_is_not_there_is_an_error(url: str) -> None:
    """It names the URL."""
    with pytest.raises(FileNotFoundError, match=r"there is no folder at http://.*/nowhere"):
        fastload.ImageFolder(url.replace("/train", "/nowhere"))
