"""`cache="lmdb:PATH"`: the same batches, and no process decodes what another one did, wherever it runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.utils.data as tud
from PIL import Image

import fastload
from fastload.cache import decoded_files, lmdb_store
from fastload.cache.decoded_files import DecodedFiles, details_of, open_files
from fastload.cache.file_cache import forget_stores
from fastload.cache.lmdb_store import open_store
from fastload.errors import CacheError, CacheMismatchError
from fastload.readers import identity, patches, pillow
from fastload.readers.decode_cache import DecodeCache
from fastload.readers.identity import Identity, Unknown, identify_path
from fastload.readers.request import CACHE_VARIABLE
from fastload.system.logs import say_once
from tests.kit.jobs import Job
from tests.readers.test_loader import (
    KINDS,
    SIZE,
    WORKERS,
    Bgr,
    Photos,
    check_epochs,
    check_threads,
    epochs,
    folder,
    settled,
)

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
    with fastload.DataLoader(dataset, 4, cache=cache) as loader:
        list(loader)
        count = loader.stats().cache_misses
    assert count is not None
    return count


# --- the loader -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("kind", ["map", "batched", "stream", "subset", "opencv"])
def test_batches_are_those_of_torch_and_files_are_decoded_once(
    kind: str, options: dict[str, Any], folder: Path, cache: str
) -> None:
    """Three epochs, with every hit decoded again and compared; then another process decodes nothing."""
    check_epochs(kind, options, folder, cache)
    assert misses(KINDS[kind](folder), cache) == 0


def test_threads_share_the_files(folder: Path, cache: str) -> None:
    """Each file is decoded once or, if two threads ask at the same moment, twice."""
    check_threads(folder, cache)


JOB = """
import random, sys
from pathlib import Path
import torch
import fastload
from tests.readers.test_loader import Photos, plain
torch.manual_seed(7)
random.seed(7)
photos = Photos(Path(sys.argv[1]))
options = {"num_workers": 2, "multiprocessing_context": "fork", **{cache}}
loader = fastload.DataLoader(photos, 2, shuffle=True, **options)
for epoch in range(int(sys.argv[2])):
    for batch in loader:
        print(plain(batch), flush=True)
print(loader.stats().cache_misses, file=sys.stderr)
"""


def job(folder: Path, cache: str | None, num_epochs: int) -> subprocess.Popen[str]:
    """A training job, whose batches are lines."""
    code = JOB.replace("{cache}", repr({} if cache is None else {"cache": cache}))
    words = [sys.executable, "-c", code, str(folder), str(num_epochs)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, cwd=ROOT, start_new_session=True, **pipes)


@pytest.mark.slow
@pytest.mark.parametrize("num_batches", [1, 4])
def test_a_job_that_is_killed_leaves_its_files_to_the_next(
    num_batches: int, folder: Path, cache: str
) -> None:
    """Killed with its workers at any point; batches of the next one are those without a cache."""
    with job(folder, cache, 9) as killed:
        assert killed.stdout is not None
        for _ in range(num_batches):
            killed.stdout.readline()
        os.killpg(killed.pid, signal.SIGKILL)
    with job(folder, None, 2) as without, job(folder, cache, 2) as one, job(folder, cache, 2) as other:
        expected = without.communicate(timeout=120)[0]
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


def test_a_finished_cache_is_read_anywhere(folder: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network disk, say; what is missing in it is decoded, and not stored."""
    assert misses(Photos(folder), cache) == SIZE
    store_at(cache).store.finish()
    forget_stores()
    path = Path(cache.removeprefix("lmdb:"))
    monkeypatch.setattr(lmdb_store, "file_system_of", lambda _: "nfs4")
    path.chmod(0o444)
    before = path.read_bytes()
    assert [misses(Photos(folder), cache) for _ in range(3)] == [0, 0, 0]
    assert [misses(Bgr(folder), cache) for _ in range(2)] == [SIZE, SIZE]
    assert path.read_bytes() == before


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


def test_the_environment_names_a_place_on_disk(
    folder: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FASTLOAD_CACHE=lmdb:PATH, for loaders that name no cache."""
    monkeypatch.setenv(CACHE_VARIABLE, cache)
    loader = fastload.DataLoader(Photos(folder), 4)
    list(loader)
    loader.close()
    monkeypatch.delenv(CACHE_VARIABLE)
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
    for expected in (f"3 {SIZE}\n", "3 0\n"):
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr
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
    mounts: list[Any] = []
    monkeypatch.setattr(identity, "_contents", {})
    monkeypatch.setattr(identity, "_mounts", mounts)
    identity._file_systems.clear()
    assert [misses(Photos(folder), cache) for _ in range(2)] == [SIZE, 0]
    assert len(hashed) == SIZE
    identity._contents.clear()
    assert misses(Photos(folder), cache) == 0
    assert len(hashed) == 2 * SIZE
    identity._file_systems.clear()
    for each in mounts:
        each.file.close()


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
    assert store.known_as(known, path) == Unknown.TOO_NEW
    assert store.known_as(known, path) == Unknown.TOO_NEW  # it is another one since
    assert store.known_as(known, folder / "none") == Unknown.UNREADABLE
    assert details_of(store.store)["num_contents"] == 0


def test_a_large_file_is_not_read_to_be_known(
    folder: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts say so."""
    monkeypatch.setattr(decoded_files, "MAX_FILE_BYTES", 100)
    with fastload.DataLoader(Photos(folder), 4, cache=cache) as loader:
        list(loader)
        assert loader.stats().miss_reasons == {Unknown.TOO_LARGE.value: SIZE}


def test_no_device_and_no_inode_is_on_disk(folder: Path, cache: str) -> None:
    """What is stored does not depend on them: a copy of the files gives the same keys of pixels."""
    assert misses(Photos(folder), cache) == SIZE
    keys = {key for key in store_at(cache).store.all_keys() if len(key) == 16}
    copied = folder / "copied"
    copied.mkdir()
    for path in sorted(folder.glob("*.jpg"), reverse=True):
        shutil.copy(path, copied)
    assert misses(Photos(copied), f"{cache}2") == SIZE
    assert {key for key in store_at(f"{cache}2").store.all_keys() if len(key) == 16} == keys


def test_the_parent_of_the_directory_must_exist(folder: Path, tmp_path: Path) -> None:
    """A disk that is not mounted is an error, and nothing fills the system's disk."""
    with (
        pytest.raises(CacheError, match=f"create the directory {tmp_path}/nvme first"),
        fastload.DataLoader(Photos(folder), cache=f"lmdb:{tmp_path}/nvme/files") as loader,
    ):
        next(iter(loader))
    assert not (tmp_path / "nvme").exists()


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


# --- attacks on the memory that is read to ----------------------------------------------------------------


def test_images_that_are_kept_do_not_change(folder: Path, cache: str) -> None:
    """Lazy images, crops and arrays of many files are held while others are read."""
    paths = sorted(folder.glob("*.jpg"))
    expected = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    decoded = DecodeCache(store_at(cache), verify_share=0)
    held: list[Any] = []
    for _ in range(2):
        patches.meet()
        with decoded.active():
            held = [Image.open(path).convert("RGB") for path in paths * 3]
            parts = [image.crop((1, 2, 9, 10)) for image in held]
            copies = [image.copy() for image in held[::2]]
    for number, (image, part) in enumerate(zip(held, parts, strict=True)):
        wanted = expected[number % len(paths)]
        assert np.array_equal(np.asarray(image), wanted)
        assert np.array_equal(np.asarray(part), wanted[2:10, 1:9])
    for number, image in enumerate(copies):
        assert np.array_equal(np.asarray(image), expected[2 * number % len(paths)])


def opened_by_a_job(path: str) -> Any:
    """A job's store."""
    return DecodedFiles(open_files(path)), None


def flush(files: DecodedFiles) -> None:
    """Run in a job."""
    files.store.flush()


def test_a_reader_sees_what_a_job_stores_later(folder: Path, cache: str) -> None:
    """Without opening the cache again."""
    reader, writer = store_at(cache), Job(opened_by_a_job, cache.removeprefix("lmdb:"))
    writer.answer()
    try:
        for number in range(3):
            assert reader.get(bytes([number]) * 16) is None
            assert writer.ask(DecodedFiles.put, bytes([number]) * 16, np.arange(9), number)
            writer.ask(flush)
            stored = reader.get(bytes([number]) * 16)
            assert stored is not None
            assert stored.note == number
    finally:
        writer.end()


assert identity.SETTLED_S >= 0  # what `settled` sets
