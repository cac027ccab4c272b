"""`cache="lmdb:PATH"`: the same batches, and no process decodes what another one did, wherever it runs."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.data as tud
from PIL import Image

import fastload
from fastload.cache import decoded_files, lmdb_store
from fastload.cache.decoded_files import DecodedFiles, count_files, open_files
from fastload.cache.file_cache import forget_stores
from fastload.cache.lmdb_store import open_store
from fastload.errors import CacheMismatchError
from fastload.readers import identity, pillow
from fastload.readers.identity import Identity, identify_path
from fastload.readers.reasons import NOT_A_FILE, TOO_LARGE, TOO_NEW
from fastload.system.logs import say_once
from tests.readers.test_loader import (
    SIZE,
    Bgr,
    Photos,
    epochs,
    folder,
    plain,
    settled,
)
from tests.readers.test_loader import misses as misses_here

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["folder", "settled"]  # fixtures
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[str]:
    """Where files are remembered."""
    yield f"lmdb:{tmp_path}/cache"
    forget_stores()


def store_at(cache: str) -> DecodedFiles:
    """The store, as another process opens it."""
    return DecodedFiles(open_files(cache.removeprefix("lmdb:")))


def misses(dataset: Any, cache: str) -> int:
    """How many files an epoch of a new process decodes."""
    forget_stores()
    return misses_here(dataset, cache)


# --- the loader -------------------------------------------------------------------------------------------


JOB = """
import random, sys
from pathlib import Path
import torch
import fastload
from tests.readers.test_loader import Photos, plain
torch.manual_seed(7)
random.seed(7)
options = {"num_workers": 2, "multiprocessing_context": "fork"}
loader = fastload.DataLoader(Photos(Path(sys.argv[1])), 2, shuffle=True, cache=sys.argv[2], **options)
for epoch in range(2):
    for batch in loader:
        print(plain(batch), flush=True)
"""


def job(folder: Path, cache: str) -> subprocess.Popen[str]:
    """A training job, whose batches are lines."""
    words = [sys.executable, "-c", JOB, str(folder), cache]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, cwd=ROOT, start_new_session=True, **pipes)


@pytest.mark.slow
@pytest.mark.parametrize("num_batches", [4, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_job_that_is_killed_leaves_its_files_to_the_next(
    num_batches: int, folder: Path, cache: str
) -> None:
    """Killed with its workers at any point; batches of the next one are those without a cache."""
    with job(folder, cache) as killed:
        assert killed.stdout is not None
        for _ in range(num_batches):
            killed.stdout.readline()
        os.killpg(killed.pid, signal.SIGKILL)
    options: Any = {"num_workers": 2, "multiprocessing_context": "fork"}
    with job(folder, cache) as one, job(folder, cache) as other:
        torch.manual_seed(7)
        random.seed(7)
        loader = tud.DataLoader(Photos(folder), 2, shuffle=True, **options)
        expected = "".join(f"{plain(batch)}\n" for _ in range(2) for batch in loader)
        for each in one, other:  # at once
            out, err = each.communicate(timeout=120)
            assert (each.returncode, out) == (0, expected), err
    assert misses(Photos(folder), cache) == 0
    assert all(is_intact for _, _, is_intact in store_at(cache).store.checked())


def test_training_goes_on_when_the_disk_is_full(
    folder: Path, cache: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of an epoch; one line says so, and the counts say why."""
    say_once.cache_clear()
    expected = epochs(tud.DataLoader(Photos(folder), 4))
    real, left = os.fstatvfs, [2]

    def limited(fd: int) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return real(fd)

    monkeypatch.setattr(os, "fstatvfs", limited)
    monkeypatch.setattr(lmdb_store, "_BATCH_RECORDS", 4)
    with fastload.DataLoader(Photos(folder), 4, cache=cache) as loader:
        assert epochs(loader) == expected
        stats = loader.stats()
    reasons = stats.miss_reasons
    assert reasons is not None
    assert 0 < reasons["new"] < SIZE
    assert reasons[lmdb_store.LmdbStore.full_reason] > 0
    assert sum("nothing more is stored" in record.getMessage() for record in caplog.records) == 1


def test_other_versions_of_a_decoder_decode_again(
    folder: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And both stay."""
    assert misses(Photos(folder), cache) == SIZE
    with monkeypatch.context() as patch:
        patch.setattr("PIL.__version__", "99.0")
        pillow._versions.cache_clear()
        assert [misses(Photos(folder), cache) for _ in range(2)] == [SIZE, 0]
    pillow._versions.cache_clear()
    assert misses(Photos(folder), cache) == 0


TRAIN = """
import os, sys
os.chdir("/")
sys.path.insert(0, {root!r})
from pathlib import Path
import torch.utils.data
from tests.readers.test_loader import Photos
loader = torch.utils.data.DataLoader(Photos(Path({folder!r})), 4)
print(len(list(loader)), loader.stats().cache_misses)
"""


@pytest.mark.slow
def test_a_script_needs_no_edit(folder: Path, cache: str) -> None:
    """`fastload run --cache lmdb:PATH`, with a path that is relative to where the command was given."""
    (folder / "train.py").write_text(TRAIN.format(root=str(ROOT), folder=str(folder)))
    words = [sys.executable, "-m", "fastload", "run", "--cache", "lmdb:cache", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"3 {SIZE}\n"), done.stderr
    assert misses(Photos(folder), cache) == 0


# --- how a file is known ----------------------------------------------------------------------------------


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The files that are read to be known, in this process."""
    read, real = [], decoded_files.hash_of

    def hash_of(fd: int) -> bytes:
        read.append(fd)
        return real(fd)

    monkeypatch.setattr(decoded_files, "hash_of", hash_of)
    return read


def test_a_file_is_read_once_to_be_known(folder: Path, cache: str, hashed: list[int]) -> None:
    """Later processes know it by its path, size and times."""
    assert [misses(Photos(folder), cache) for _ in range(3)] == [SIZE, 0, 0]
    assert len(hashed) == SIZE


def test_files_that_change_are_decoded_again(folder: Path, cache: str) -> None:
    """Also if size and mtime are as before, in place, by a replacement, and by a link to another file."""
    dataset = Bgr(folder)
    rng = np.random.default_rng(1)

    def noise() -> bytes:
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), np.uint8)).save(folder / "new.bmp")
        return (folder / "new.bmp").read_bytes()

    path = dataset.paths[0]
    path.write_bytes(noise())
    before = path.stat()
    assert misses(dataset, cache) == SIZE
    for how in ("in place", "replaced", "linked", "moved here"):
        target = folder / f"{how}.tmp"
        target.write_bytes(noise())
        while target.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of a file system ticks slowly
            target.write_bytes(target.read_bytes())
        if how == "in place":
            path.write_bytes(target.read_bytes())
        elif how == "linked":
            path.unlink()
            path.symlink_to(target)
        else:
            target.replace(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        assert misses(dataset, cache) == 1, how
        with fastload.DataLoader(dataset, 4, cache=cache) as loader:
            assert epochs(loader) == epochs(tud.DataLoader(dataset, 4))
        before = path.stat()


def test_a_copy_of_files_and_cache_is_found_by_its_content(
    folder: Path, cache: str, hashed: list[int], tmp_path: Path
) -> None:
    """Each file is hashed once more, and none is decoded; nothing of this machine is on disk."""
    assert misses(Photos(folder), cache) == SIZE
    copied = tmp_path / "copied"
    copied.mkdir()
    for path in folder.glob("*.jpg"):
        shutil.copy(path, copied)
    shutil.move(cache.removeprefix("lmdb:"), tmp_path / "moved")
    del hashed[:]
    assert [misses(Photos(copied), f"lmdb:{tmp_path}/moved") for _ in range(3)] == [0, 0, 0]
    assert len(hashed) == SIZE


def test_a_folder_that_moves_with_its_cache_is_known_at_once(
    folder: Path, hashed: list[int], tmp_path: Path
) -> None:
    """Paths below the folder of the cache are relative to it."""
    whole = tmp_path / "whole"
    whole.mkdir()
    for path in folder.glob("*.jpg"):
        shutil.copy(path, whole)
    assert misses(Photos(whole), f"lmdb:{whole}/cache") == SIZE
    whole.rename(tmp_path / "renamed")
    del hashed[:]
    assert misses(Photos(tmp_path / "renamed"), f"lmdb:{tmp_path}/renamed/cache") == 0
    assert hashed == []


def test_times_of_a_disk_image_prove_nothing(
    folder: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files with such times are hashed once in each process, and what is found then is used."""
    hashed: list[int] = []
    real = identity.hash_of
    monkeypatch.setattr(identity, "hash_of", lambda fd: hashed.append(fd) or real(fd))
    monkeypatch.setattr(identity, "_has_own_times", lambda *_: False)
    monkeypatch.setattr(identity, "_LASTING_INODES", frozenset())
    monkeypatch.setattr(identity, "_contents", {})
    identity._file_systems.clear()
    assert [misses(Photos(folder), cache) for _ in range(2)] == [SIZE, 0]
    assert len(hashed) == SIZE
    identity._contents.clear()
    assert misses(Photos(folder), cache) == 0
    assert len(hashed) == 2 * SIZE
    identity._file_systems.clear()


def test_what_changes_while_it_is_hashed_is_not_known(
    folder: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is stored of it."""
    path = folder / "00.jpg"
    store = store_at(cache)

    def hash_of(_: int) -> bytes:
        path.write_bytes(b"other")
        return bytes(32)

    monkeypatch.setattr(decoded_files, "hash_of", hash_of)
    known = identify_path(path)
    assert isinstance(known, Identity)
    assert store.known_as(known, path) == TOO_NEW
    assert store.known_as(known, path) == TOO_NEW  # it is another one since
    assert store.known_as(known, folder / "none") == NOT_A_FILE
    assert count_files(store.store)[1] == 0


def test_a_large_file_is_not_read_to_be_known(
    folder: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts say so."""
    monkeypatch.setattr(decoded_files, "MAX_FILE_BYTES", 100)
    with fastload.DataLoader(Photos(folder), 4, cache=cache) as loader:
        list(loader)
        assert loader.stats().miss_reasons == {TOO_LARGE: SIZE}


# --- the other kind of cache ------------------------------------------------------------------------------


def test_samples_and_decoded_files_do_not_mix(folder: Path, cache: str, tmp_path: Path) -> None:
    """Each cache at the path of the other kind is an error that names the right door, and nothing is lost."""
    assert misses(Photos(folder), cache) == SIZE
    with pytest.raises(
        CacheMismatchError, match=r"decoded files, not samples: .*DataLoader\(dataset, cache='lmdb:"
    ):
        fastload.CachedDataset(Photos(folder), cache=cache)
    assert misses(Photos(folder), cache) == 0
    samples = f"lmdb:{tmp_path}/samples"
    open_store(samples.removeprefix("lmdb:"), {"kind": "samples"}).close()
    with pytest.raises(CacheMismatchError, match=r"cache of samples, read it with fastload\.CachedDataset"):
        next(iter(fastload.DataLoader(Photos(folder), cache=samples)))
