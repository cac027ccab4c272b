"""Files that change while many processes read them, are killed, and run out of memory: no value is wrong."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest
from PIL import Image

from fastload.cache.decoded_files import open_files
from fastload.cache.file_cache import FileCache
from fastload.cache.ram import store as ram_store
from fastload.cache.ram.store import SharedStore
from fastload.readers import identity
from fastload.readers.decode_cache import VERIFY_VARIABLE
from fastload.system.cache_counts import cache_counts
from tests.cache.test_ram_store import KB, MB
from tests.cache.test_ram_store_model import die_at

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUM_FILES, NUM_READERS, AT_ONCE = 12, 24, 3
BEGUN, DONE = 0, 1  # columns of the changes: those that were begun, and those that are done


def content_of(number: int, version: int) -> Any:
    """The pixels of a file, which say whose they are."""
    pixels = np.random.RandomState(1000 * number + version % 1000).randint(0, 256, (60, 60 + number, 3))
    pixels[0, 0] = number, version % 256, version // 256
    return pixels.astype(np.uint8)


def write(path: Path, number: int, version: int) -> None:
    """Write a file, not atomically."""
    pixels = content_of(number, version)
    if path.suffix == ".npz":
        with path.open("wb") as file:
            np.savez_compressed(file, image=pixels)
    else:
        Image.fromarray(pixels).save(path, format=path.suffix[1:])


def change(path: Path, number: int, version: int, how: str) -> None:
    """Give a file its next content."""
    if how == "in place":
        write(path, number, version)
        return
    before, other = path.stat(), path.with_name("new" + path.suffix)
    write(other, number, version)
    if how == "equal times":
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    if how == "deleted first":
        path.unlink()
    other.replace(path)


def touch_only(path: Path, rng: random.Random) -> None:
    """Change what the system says of a file, but not its content."""
    if rng.random() < 0.5:
        path.chmod(rng.choice([0o600, 0o644]))
    else:
        os.utime(path)


READ: dict[str, Callable[[str], Any]] = {
    ".png": lambda path: np.asarray(Image.open(path).convert("RGB")),
    ".bmp": lambda path: cv2.cvtColor(cv2.imread(path), cv2.COLOR_BGR2RGB),  # type: ignore[arg-type]
    ".npz": lambda path: np.load(path)["image"],
}


def read(cache: FileCache, path: Path, number: int, changes: Any) -> str:
    """Read a file as a dataset does; what is wrong, if anything is."""
    begun, done = (int(changes[number, column]) for column in (BEGUN, DONE))
    try:
        with cache.reading():
            pixels = READ[path.suffix](str(path))
    except Exception as error:  # noqa: BLE001  # a file that was being written
        pixels = error
    if begun != done or begun != changes[number, BEGUN]:
        return ""  # it changed meanwhile
    if isinstance(pixels, Exception) or not np.array_equal(pixels, content_of(number, begun)):
        return f"file {number} in version {begun}: {pixels!r:.300}"
    return ""


def reader(
    open_cache: Callable[[], FileCache], paths: list[Path], changes: Any, seed: int, pipe: int
) -> None:
    """A process that reads until it is killed at some step, or has read enough."""
    rng = random.Random(seed)
    die_at(rng.randrange(1, 600))
    cache = open_cache()
    for _ in range(rng.randrange(20, 200)):
        number = rng.randrange(NUM_FILES)
        if wrong := read(cache, paths[number], number, changes):
            os.write(pipe, wrong.encode() + b"\n")
        cache.poll()


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, 1, 5, 6, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (2, 3, 4, 7))]
)
def test_every_value_is_that_of_a_fresh_decode(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of their own and forks, killed at any moment; in memory for few files, or on disk."""
    monkeypatch.setenv("FASTLOAD_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(identity, "SETTLED_S", 0.05)
    monkeypatch.setattr(identity, "_file_systems", {})
    monkeypatch.setenv(VERIFY_VARIABLE, str(seed % 2))
    monkeypatch.setattr(ram_store, "_MIN_TABLE_BYTES", 128 * KB)
    monkeypatch.setattr(ram_store, "_FIRST_LEVEL", 4)
    monkeypatch.setattr(ram_store, "_IDLE_S", -1.0)
    for name in ("_LOOK_EVERY_S", "_GROW_WAIT_S"):
        monkeypatch.setattr(ram_store, name, 0.0)
    rng = random.Random(seed)
    limit = rng.choice([60 * KB, 300 * KB, MB])
    paths = [tmp_path / f"{number}{[*READ][number % 3]}" for number in range(NUM_FILES)]
    changes = np.frombuffer(mmap.mmap(-1, NUM_FILES * 16), np.int64).reshape(NUM_FILES, 2)
    for number, path in enumerate(paths):
        write(path, number, 0)

    def open_cache() -> FileCache:
        return FileCache(open_files(str(tmp_path / "store")) if seed >= 6 else SharedStore(limit))

    cache = open_cache()
    out, pipe = os.pipe()
    pids: list[int] = []
    for place in range(NUM_READERS + AT_ONCE):
        if len(pids) == AT_ONCE:
            pid = pids.pop(0)
            if rng.random() < 0.3:
                os.kill(pid, signal.SIGKILL)
            # Files change until it has ended.
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                number = rng.randrange(NUM_FILES)
                if rng.random() < 0.3:
                    touch_only(paths[number], rng)
                    continue
                changes[number, BEGUN] += 1
                how = rng.choice(["in place", "replaced", "equal times", "deleted first"])
                change(paths[number], number, int(changes[number, BEGUN]), how)
                changes[number, DONE] += 1
        if place < NUM_READERS:
            is_own = rng.random() < 0.5
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException):
                    opened = open_cache if is_own else lambda: cache
                    reader(opened, paths, changes, 1000 * seed + place, pipe)
                os.kill(os.getpid(), signal.SIGKILL)
            pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(pipe)
    with open(out, "rb") as wrong:
        assert wrong.read() == b""
    identity.SETTLED_S = 0.0  # what is there now does not change any more
    for _ in range(3):
        hits = cache_counts.hits
        for number, path in enumerate(paths):
            assert read(cache, path, number, changes) == ""
        cache.poll()
    assert (limit < MB and seed < 6) or cache_counts.hits > hits
    assert seed >= 6 or cache.store.nbytes <= max(limit, MB)
    cache.close()
