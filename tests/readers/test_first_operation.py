"""What the first operation on an image needs is stored: the result of a resize that repeats, or the image."""

from __future__ import annotations

import io
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from fastload.errors import DecodeMismatchError
from fastload.readers import patches, pillow
from fastload.readers.decode_cache import DecodeCache, inactive
from fastload.readers.lessons import NUM_LEARNED
from fastload.system.cache_counts import cache_counts
from tests.kit.decoding import DictStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Images that are dropped before they are loaded leave their file to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("settled"),
]


def photo(width: int = 40, height: int = 30, mode: str = "RGB") -> bytes:
    """A PNG with pixels that differ."""
    shape = (height, width) if mode == "L" else (height, width, len(mode))
    content = np.random.default_rng(width).integers(0, 256, shape, np.uint8)
    Image.fromarray(content).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def jpegs(folder: Path, number: int, mode: str = "RGB", kind: str = "jpg") -> list[Path]:
    """Photographs with pixels that differ."""
    paths = []
    for width in range(41, 41 + number):
        shape = (30, width, 3) if mode == "RGB" else (30, width)
        content = np.random.default_rng(width).integers(0, 256, shape, np.uint8)
        paths.append(folder / f"{width}.{kind}")
        Image.fromarray(content).save(paths[-1])
    return paths


def torchvisions(path: Any) -> Image.Image:
    """As ImageFolder opens files."""
    with path.open("rb") as file:
        return Image.open(file).convert("RGB")


def shorter(image: Image.Image, length: int = 10) -> Image.Image:
    """As its Resize does."""
    return image.resize((image.width * length // image.height, length), Image.Resampling.BILINEAR)


def outcomes(paths: list[Path], function: Callable[[Any], Any]) -> list[bytes]:
    """The pixels that a function makes of the images."""
    return [function(torchvisions(path)).tobytes() for path in paths]


def opened(content: bytes) -> Image.Image:
    """Decoded already, if a cache is active."""
    return Image.open(io.BytesIO(content))


def thumbnail(image: Image.Image) -> Image.Image:
    image = image.copy()
    image.thumbnail((9, 9))
    return image


RESIZES: dict[str, Callable[[Any], Any]] = {
    "resize": lambda image: image.resize((12, 9), Image.Resampling.BILINEAR),
    "resize by default": lambda image: image.resize((12, 9)),
    "resize, nearest": lambda image: image.resize((12, 9), 0),
    "resize with a gap": lambda image: image.resize((5, 4), Image.Resampling.BICUBIC, reducing_gap=2.0),
    "reduce": lambda image: image.reduce(3),
    "reduce by two factors": lambda image: image.reduce((3, 2)),
    "reduce almost as much": lambda image: image.reduce((4, 2)),
    "thumbnail": thumbnail,
}


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize("name", RESIZES)
def test_a_remembered_resize_is_as_pillows(name: str, mode: str, active: DictStore) -> None:
    """In its pixels, and in crops and copies of it."""
    content = photo(mode=mode)
    with inactive():
        expected = RESIZES[name](opened(content))
    for _ in range(NUM_LEARNED + 4):
        resized = RESIZES[name](opened(content).convert(mode))
        assert type(resized) is Image.Image
        assert (resized.mode, resized.size, resized.info) == (mode, expected.size, expected.info)
        assert resized.crop((1, 1, 4, 3)).tobytes() == expected.crop((1, 1, 4, 3)).tobytes()
        assert np.asarray(resized.copy()).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "size_of",
    [
        lambda image: (8, 8),
        lambda image: (8, 8 * image.height // image.width),
        lambda image: (image.width * 10 // image.height, 10),
    ],
)
def test_a_resize_that_repeats_is_stored(size_of: Any, active: DictStore) -> None:
    """One size, one shorter or one longer side, for files of all sizes; nothing before that is known."""
    contents = [photo(width, 60) for width in range(61, 61 + NUM_LEARNED + 10)]
    for number, content in enumerate(contents):
        image = opened(content)
        image.resize(size_of(image)).load()
        assert len(active.values) == max(0, number + 1 - NUM_LEARNED)


@pytest.mark.parametrize("is_equal", [True, False])
def test_the_end_of_an_epoch_decides(is_equal: bool) -> None:
    """A small dataset need not wait for 64 images: by what most of its resizes did."""
    contents = [photo(width) for width in range(40, 44)]
    patches.meet()
    with DecodeCache(store := DictStore(), verify_share=0.0).active() as cache:

        def read() -> list[int]:
            for number, content in enumerate(contents):
                opened(content).resize((8, 8) if is_equal else (8 + number, 20 + number)).load()
            return sorted(len(stored.array) for stored in store.values.values())

        assert read() == []
        cache.lessons.conclude()
        assert read() == ([8 * 8 * 3] * 4 if is_equal else [30 * width * 3 for width in range(40, 44)])


def test_images_and_masks_are_learnt_apart(active: DictStore) -> None:
    """By their mode and the filter: masks of another size each do not keep images from being learnt."""
    for number in range(NUM_LEARNED + 3):
        opened(photo(40 + number)).resize((8, 8), Image.Resampling.BILINEAR).load()
        opened(photo(40 + number, mode="L")).resize((8 + number, 20 + number), 0).load()
    sizes = [len(stored.array) for stored in active.values.values()]
    assert sizes.count(8 * 8 * 3) == 3
    assert len(sizes) == 3 + 4  # the masks' originals, from the 64th on


def test_what_is_learnt_can_change(active: DictStore) -> None:
    """After results, 64 resizes that do not repeat let originals be stored, and the other way round."""
    sizes = [(8, 8)] * (NUM_LEARNED + 1)
    sizes += [(9 + number, 99 + number) for number in range(NUM_LEARNED)]
    sizes += [(7, 7)] * (NUM_LEARNED + 1)
    for number, size in enumerate(sizes):
        opened(photo(40 + number)).resize(size).load()
    stored = list(active.values.values())
    is_original = [type(each.note[0]) is str for each in stored]
    assert is_original == [False] * NUM_LEARNED + [True] * (NUM_LEARNED + 1) + [False]


def test_random_sizes_leave_nothing_behind(active: DictStore) -> None:
    """Of one file, or random boxes of it: the original is stored, after 64 of them."""
    content = photo()
    for number in range(500):
        image = opened(content)
        assert len(active.values) == (number >= NUM_LEARNED)
        image.resize((3 + number % 31, 3 + number % 37), Image.Resampling.BILINEAR).load()
        image.resize((8, 8), Image.Resampling.BICUBIC, (number % 7, 1, 30, 30)).load()
        image.crop((number % 7, 1, 30, 30)).resize((8, 8)).load()
    assert [len(stored.array) for stored in active.values.values()] == [40 * 30 * 3]


# --- instead of the image --------------------------------------------------------------------------------


NUM_FILES = NUM_LEARNED + 6


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "bmp"])
def test_results_are_stored_instead_of_photographs(kind: str, active: DictStore, tmp_path: Path) -> None:
    """After 64 equal resizes, one value a file is stored, and nothing is decoded again."""
    paths = jpegs(tmp_path, NUM_FILES, kind=kind)
    with inactive():
        expected = outcomes(paths, shorter)
        sizes = [shorter(torchvisions(path)).size for path in paths]
    misses = cache_counts.misses
    for num_decoded, num_stored in ((NUM_FILES, 6), (NUM_LEARNED, NUM_FILES), (0, NUM_FILES)):
        assert outcomes(paths, shorter) == expected
        assert cache_counts.misses - misses == num_decoded
        misses = cache_counts.misses
        assert len(active.values) == num_stored
    stored = sorted(len(stored.array) for stored in active.values.values())
    assert stored == sorted(3 * width * height for width, height in sizes)


def test_a_transform_that_changes_gets_the_photograph(active: DictStore, tmp_path: Path) -> None:
    """As Pillow's, decoded once more, then stored; of a resize of another kind, nothing is known yet."""
    paths = jpegs(tmp_path, NUM_FILES)
    outcomes(paths, shorter)
    functions: list[tuple[Callable[[Any], Any], bool]] = [
        (lambda image: image.crop((3, 4, 20, 21)), True),
        (lambda image: shorter(image, 11), True),
        (lambda image: image.resize((9, 9), Image.Resampling.NEAREST), False),
        (lambda image: image.convert("L"), True),
        (lambda image: image.reduce(2), False),
        (lambda image: image, True),
    ]
    for path, (function, is_stored) in zip(paths[NUM_LEARNED:], functions, strict=False):
        with inactive():
            expected = outcomes([path], function)
        for number in range(3):
            misses = cache_counts.misses
            assert outcomes([path], function) == expected
            assert cache_counts.misses - misses == (number == 0 or not is_stored)


def test_several_operations_on_one_image(active: DictStore, tmp_path: Path) -> None:
    """The first one decides; once that stores a result, what the others need is stored beside it."""

    def operate(path: Path) -> bytes:
        image = torchvisions(path)
        return shorter(image).tobytes() + shorter(image, 7).tobytes() + image.tobytes()

    paths = jpegs(tmp_path, NUM_FILES)
    with inactive():
        expected = [operate(path) for path in paths]
    num_stored = []
    for _ in range(3):
        misses = cache_counts.misses
        assert [operate(path) for path in paths] == expected
        num_stored.append(len(active.values))
    assert num_stored == [2 * 6, 2 * NUM_FILES, 2 * NUM_FILES]
    assert cache_counts.misses == misses


def test_two_sizes_of_the_same_files(active: DictStore, tmp_path: Path) -> None:
    """Training and validation by turns: both results are stored, and no photograph beside them."""
    paths = jpegs(tmp_path, NUM_FILES)
    functions = [shorter, lambda image: shorter(image, 7)]
    with inactive():
        expected = [outcomes(paths, function) for function in functions]
    for _ in range(3):
        assert [outcomes(paths[NUM_LEARNED // 2 :], each) for each in functions] == [
            pixels[NUM_LEARNED // 2 :] for pixels in expected
        ]
    num_stored = len(active.values)
    assert [outcomes(paths, each) for each in functions] == expected
    misses = cache_counts.misses
    assert [outcomes(paths, each) for each in functions] == expected
    assert cache_counts.misses == misses
    assert len(active.values) >= num_stored


@pytest.mark.parametrize("change", ["deleted", "replaced", "renamed", "linked", "chmod"])
def test_a_file_that_is_gone_is_decoded_all_the_same(change: str, active: DictStore, tmp_path: Path) -> None:
    """As Pillow, which had decoded it before."""
    paths = jpegs(tmp_path, NUM_FILES)
    outcomes(paths, shorter)
    path = paths[-1]
    with inactive():
        expected = torchvisions(path).tobytes()
    image = torchvisions(path)
    if change == "deleted":
        path.unlink()
    elif change == "replaced":
        paths[0].replace(path)
    elif change == "renamed":
        path.rename(tmp_path / "another")
    elif change == "linked":
        (tmp_path / "another").hardlink_to(path)
    else:
        path.chmod(0o600)
    num_stored = len(active.values)
    assert image.tobytes() == expected
    assert len(active.values) == num_stored  # its times do not tell whether it was written to, too


def test_a_file_that_was_written_to_gives_no_other_image(active: DictStore, tmp_path: Path) -> None:
    """Its photograph is gone, so this is an error; the stored result is still right."""
    paths = jpegs(tmp_path, NUM_FILES)
    expected = outcomes(paths, shorter)
    image = torchvisions(paths[-1])
    paths[-1].write_bytes(paths[0].read_bytes())
    assert shorter(image).tobytes() == expected[-1]
    with pytest.raises(OSError, match="written to"):
        image.tobytes()


def test_images_that_are_kept_hold_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is not decoded yet one, and others are decoded at once; they are as Pillow's."""
    monkeypatch.setattr(pillow, "_MAX_DESCRIPTORS", 16)
    paths = jpegs(tmp_path, NUM_FILES + 60)

    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    patches.meet()
    with DecodeCache(DictStore(), verify_share=0.0).active():
        outcomes(paths, shorter)
        before = num_open()
        images = [torchvisions(path) for path in paths[NUM_LEARNED:]]
        assert num_open() == before + 16
        for path, image in zip(paths[NUM_LEARNED:], images, strict=True):
            with inactive():
                expected = torchvisions(path).tobytes()
            copy = image.copy()
            image.paste(0, (0, 0, 5, 5))
            assert copy.tobytes() == expected != image.tobytes()
        del images, image, copy
        assert num_open() == before


def test_no_descriptor_is_left(active: DictStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the file is decoded at once."""
    paths = jpegs(tmp_path, NUM_FILES)
    expected = outcomes(paths, shorter)

    def fail(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "dup", fail)
    assert outcomes(paths, shorter) == expected


def test_what_is_changed_before_its_first_use_is_stored_as_it_was(active: DictStore, tmp_path: Path) -> None:
    """Pixels that were decoded and not stored yet: pasted to, written to, closed, used by a copy first."""
    changes: list[Callable[[Any], Any]] = [
        lambda image: image.paste(0, (0, 0, 9, 9)),
        lambda image: image.load().__setitem__((1, 1), (1, 2, 3)),
        lambda image: image.copy().paste(0, (0, 0, 9, 9)),
        lambda image: [image.copy(), image.paste(0, (0, 0, 9, 9)), image.close()],
        lambda image: image.putpixel((0, 0), (1, 2, 3)),
        lambda image: image.thumbnail((9, 9)),
        lambda image: [shorter(image), image.paste(0, (0, 0, 9, 9))],
        lambda image: setattr(image, "im", Image.new("RGB", image.size).im),
    ]
    for path, change in zip(jpegs(tmp_path, len(changes)), changes, strict=True):
        with inactive():
            expected = np.asarray(Image.open(path)).tobytes()
        for _ in range(3):
            change(Image.open(path))
            assert np.asarray(Image.open(path)).tobytes() == expected


def test_verification_decodes_photographs_that_are_not_stored(tmp_path: Path) -> None:
    """With a share of 1 a wrong result is found, and a right one stays."""
    paths, store = jpegs(tmp_path, NUM_FILES), DictStore()
    patches.meet()
    with DecodeCache(store, verify_share=1.0).active():
        expected = outcomes(paths, shorter)
        assert outcomes(paths[NUM_LEARNED:], shorter) == expected[NUM_LEARNED:]
        for key, stored in store.values.items():
            store.values[key] = stored._replace(array=stored.array + np.uint8(1))
        with pytest.raises(DecodeMismatchError):
            outcomes(paths[-1:], shorter)


@pytest.mark.parametrize("has_its_old_time", [False, True])
def test_a_photograph_that_was_written_to_is_not_verified(has_its_old_time: bool, tmp_path: Path) -> None:
    """The stored result is that of the file as it was opened; there is nothing left to compare it with."""
    paths = jpegs(tmp_path, NUM_FILES)
    patches.meet()
    with DecodeCache(DictStore(), verify_share=1.0).active():
        expected = outcomes(paths, shorter)
        image, times = torchvisions(paths[-1]), paths[-1].stat()
        content = paths[0].read_bytes() + bytes(4096)
        while paths[-1].stat().st_ctime_ns == times.st_ctime_ns:
            paths[-1].write_bytes(content[: times.st_size] if has_its_old_time else content)
            if has_its_old_time:
                os.utime(paths[-1], ns=(times.st_atime_ns, times.st_mtime_ns))
        assert shorter(image).tobytes() == expected[-1]


def test_another_process_decodes_what_it_inherits(active: DictStore, tmp_path: Path) -> None:
    """A fork and its parent decode the same held file at the same time."""
    paths = jpegs(tmp_path, NUM_FILES)
    outcomes(paths, shorter)
    with inactive():
        expected = outcomes(paths[-9:], lambda image: image)
    images = [torchvisions(path) for path in paths[-9:]]
    child = os.fork()
    found = [image.tobytes() for image in images]
    if not child:
        os._exit(found != expected)
    assert os.waitpid(child, 0)[1] == 0
    assert found == expected


def test_four_threads_decode_one_image(active: DictStore, tmp_path: Path) -> None:
    """Each of them gets its pixels."""
    paths = jpegs(tmp_path, NUM_FILES)
    outcomes(paths, shorter)
    with inactive():
        expected = torchvisions(paths[-1]).tobytes()
    for _ in range(20):
        image, barrier, found = torchvisions(paths[-1]), threading.Barrier(4), []

        def use(image: Any = image, barrier: Any = barrier, found: Any = found) -> None:
            barrier.wait()
            found.append(image.tobytes())

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [expected] * 4
        active.values = {
            key: stored for key, stored in active.values.items() if type(stored.note[0]) is bytes
        }
