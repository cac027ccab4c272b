"""`cache="ram"` of a loader, and CachedDataset by file: the same batches, and nothing is decoded twice."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest
import torch
import torch.utils.data as tud
from PIL import Image

import fastload
from fastload.cache.decoded_files import DecodedFiles
from fastload.cache.file_cache import forget_stores, store_of_process
from fastload.errors import DecodeMismatchError
from fastload.readers import identity, patches, reasons
from fastload.readers.decode_cache import VERIFY_VARIABLE
from fastload.readers.reasons import LEARNING, NEW, TOO_NEW
from fastload.readers.request import CACHE_VARIABLE
from fastload.system.logs import say_once
from tests.kit import torchs_own
from tests.kit.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SIZE = 12


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files count as unchanged at once, in child processes too; the store is this test's own."""
    monkeypatch.setenv("FASTLOAD_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv(VERIFY_VARIABLE, "1")
    monkeypatch.setattr(identity, "SETTLED_S", 0.0)
    monkeypatch.setattr(identity, "_file_systems", {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Photographs."""
    rng = np.random.default_rng(0)
    for number in range(SIZE):
        content = rng.integers(0, 256, (20 + number, 24, 3), np.uint8)
        Image.fromarray(content).save(tmp_path / f"{number:02d}.jpg")
    return tmp_path


class Photos(tud.Dataset[Any]):
    """As people write them: Pillow, random crops and flips, a label, and a dict."""

    def __init__(self, folder: Path) -> None:
        identity.SETTLED_S = 0.0  # also in a spawned worker
        self.paths = sorted(folder.glob("*.jpg"))

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state)
        identity.SETTLED_S = 0.0

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = Image.open(self.paths[index]).convert("RGB")
        left, top = random.randrange(8), int(torch.randint(4, ()))
        image = image.crop((left, top, left + 16, top + 16))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return {"image": np.asarray(image).copy(), "label": index % 3, "path": str(self.paths[index])}


class Batched(Photos):
    """The loader asks it for lists of samples."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(tud.IterableDataset[Any]):
    """The same samples in a row, shared among workers."""

    def __init__(self, photos: Photos) -> None:
        self.photos = photos

    def __iter__(self) -> Iterator[Any]:
        info = tud.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(start, len(self.photos), step):
            yield self.photos[index]


class Bgr(Photos):
    """OpenCV, and a result that is written to."""

    def __getitem__(self, index: int) -> Any:
        image = cv2.imread(str(self.paths[index]))
        assert image is not None
        image[image > 200] = 0
        return image[:16, :16], index


def plain(batch: Any) -> Any:
    """A batch that can be compared."""
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return str(batch.dtype), batch.tolist()
    return [plain(value) for value in batch] if isinstance(batch, (list, tuple)) else batch


def epochs(loader: Any, number: int = 3) -> list[Any]:
    """The batches of some epochs, from equal seeds."""
    torch.manual_seed(5)
    random.seed(5)
    return [plain(batch) for _ in range(number) for batch in loader]


KINDS = {
    "map": Photos,
    "batched": Batched,
    "stream": lambda folder: Stream(Photos(folder)),
    "subset": lambda folder: tud.Subset(Photos(folder), range(1, 11)),
    "opencv": Bgr,
}
WORKERS: list[Any] = [
    pytest.param({}, id="none"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "fork"}, id="fork"),
    pytest.param(
        {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}, id="persistent"
    ),
    pytest.param(
        {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
        id="spawn",
        marks=pytest.mark.slow,
    ),
    pytest.param({"num_workers": 1, "in_order": False, "multiprocessing_context": "fork"}, id="as they come"),
    pytest.param({"num_workers": 1, **torchs_own.FORK}, id="torch's"),
]


# Each kind of dataset, and each kind of workers, with both kinds of stores.
CASES = [
    *((kind, workers, "ram") for kind in KINDS for workers in WORKERS[:2]),
    *(("map", workers, "ram") for workers in (WORKERS[2], *WORKERS[4:])),
    ("opencv", WORKERS[3], "ram"),
    *((kind, WORKERS[1], "disk") for kind in KINDS),
    *(("map", workers, "disk") for workers in (WORKERS[0], WORKERS[2], WORKERS[5])),
]


@pytest.mark.parametrize(
    ("kind", "options", "cache"),
    [
        pytest.param(kind, *workers.values, cache, id=f"{kind}-{workers.id}-{cache}", marks=workers.marks)
        for kind, workers, cache in CASES
    ],
)
def test_batches_are_those_of_torch_and_files_are_decoded_once(
    kind: str, options: dict[str, Any], cache: str, folder: Path
) -> None:
    """Three epochs, with every hit decoded again and compared; then a loader without workers decodes nothing.

    What was decoded in a spawned worker is found there, too: OpenCV's number of threads changes no pixel.
    """
    dataset: Any = KINDS[kind](folder)
    shuffle = {} if kind == "stream" else {"shuffle": True}
    name = "ram" if cache == "ram" else f"lmdb:{folder}/cache"
    expected = epochs(tud.DataLoader(dataset, 4, **shuffle, **options))
    with fastload.DataLoader(dataset, 4, cache=name, **shuffle, **options) as loader:
        assert epochs(loader) == expected
        stats = loader.stats()
        if cache == "ram":
            assert misses(dataset, name) == 0
    if cache == "disk":
        forget_stores()  # as another process begins
        assert misses(dataset, name) == 0
        forget_stores()
    number = len(dataset) if kind != "stream" else SIZE
    if options.get("persistent_workers") and cache == "disk":
        # There, a worker can ask for a file before another one has committed its last batch.
        assert stats.cache_misses is not None
        assert number <= stats.cache_misses < 2 * number
    else:
        assert (stats.cache_hits, stats.cache_misses) == (2 * number, number)
    assert stats.miss_reasons == {"new": stats.cache_misses}
    assert "hits" in str(stats)


def misses(dataset: Any, cache: str) -> int:
    """How many files an epoch without workers decodes."""
    with fastload.DataLoader(dataset, 4, cache=cache) as loader:
        list(loader)
        count = loader.stats().cache_misses
    assert count is not None
    return count


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_threads_share_the_files(cache: str, folder: Path) -> None:
    """Each file is decoded once or, if two threads ask at the same moment, twice; later epochs find all."""
    name = "ram" if cache == "ram" else f"lmdb:{folder}/cache"
    loader = fastload.DataLoader(Bgr(folder), 4, num_workers=3, worker_type="thread", cache=name)
    expected = [plain(batch) for batch in tud.DataLoader(Bgr(folder), 4)]
    for _ in range(3):
        assert [plain(batch) for batch in loader] == expected
    assert loader.stats().cache_hits == 2 * SIZE
    loader.close()


class Resized(Photos):
    """Every image is resized first, to one size."""

    def __getitem__(self, index: int) -> Any:
        image = Image.open(self.paths[index]).convert("RGB").resize((8, 8))
        return np.asarray(image).copy()


@pytest.mark.parametrize(
    ("method", "num_workers"), [("fork", 8), pytest.param("spawn", 2, marks=pytest.mark.thorough)]
)
def test_workers_learn_together_which_resizes_repeat(
    method: str, num_workers: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 200 files, one of 8 workers reads 25, too few to learn by itself, and ends with the epoch."""
    monkeypatch.setenv(VERIFY_VARIABLE, "0")
    rng = np.random.default_rng(1)
    for number in range(200 - SIZE):
        Image.fromarray(rng.integers(0, 256, (60, 60, 3), np.uint8)).save(folder / f"more {number}.jpg")
    dataset = Resized(folder)
    num_decoded = []
    with fastload.DataLoader(
        dataset, 4, cache="ram", num_workers=num_workers, multiprocessing_context=method
    ) as loader:
        for _ in range(3):
            list(loader)
            num_decoded.append((loader.stats().cache_misses or 0) - sum(num_decoded))
        store = store_of_process("auto")
        assert (num_decoded[0], num_decoded[2], store.num_files) == (200, 0, 200)
        assert store.nbytes < 300 * 1024  # the results, and not the images of 10 kB


@pytest.mark.slow
def test_workers_remember_the_files_of_a_dataset_that_pickle_cannot_send(folder: Path) -> None:
    """A local class with lambdas, which took a function of OpenCV before it was replaced or while it was."""

    class Local(Bgr):
        def __init__(self) -> None:
            super().__init__(folder)
            self.read = cv2.imread
            self.flip = lambda image: image[::-1].copy()

        def __getitem__(self, index: int) -> Any:
            image, number = super().__getitem__(index)
            return self.flip(image), number, self.read(str(self.paths[index]))[:16]

    patches.meet()
    meanwhile = Local()
    expected = [plain(batch) for batch in tud.DataLoader(Local(), 4)]
    options: Any = {"num_workers": 1, "multiprocessing_context": "forkserver", "cache": "ram"}
    for number, dataset in enumerate((Local(), meanwhile)):
        with fastload.DataLoader(dataset, 4, **options) as loader:
            assert [plain(batch) for batch in loader] == expected
            assert loader.stats().cache_misses == (0 if number else SIZE)


def test_a_cell_that_runs_again_decodes_nothing(folder: Path) -> None:
    """New objects of the same script, the old ones dropped, find the files in the store of the process."""
    for number in range(5):
        loader: Any = fastload.DataLoader(Photos(folder), 4, cache="ram")
        list(loader)
        assert loader.stats().cache_misses == (0 if number else SIZE)
        loader.close()
        del loader


def test_a_second_job_decodes_nothing(folder: Path) -> None:
    """While the first one lives, another process with its own dataset finds its files."""
    loader = fastload.DataLoader(
        Photos(folder), 4, num_workers=1, multiprocessing_context="fork", cache="ram"
    )
    list(loader)

    def work() -> Any:
        forget_stores()  # that of its parent
        return None, misses(Photos(folder), "ram")

    job = Job(work)
    assert job.answer() == 0
    job.end()
    loader.close()


def test_train_and_val_and_copies_share_the_files(folder: Path) -> None:
    """Loaders of different datasets over the same files, alive at once, with different limits."""
    train = fastload.DataLoader(Photos(folder), 4, cache="ram")
    list(train)
    val = fastload.DataLoader(tud.Subset(Photos(folder), range(6)), 4, cache="ram:100MB")
    list(val)
    assert val.stats().cache_misses == 0
    train.close()
    assert [batch["label"].tolist() for batch in val] == [[0, 1, 2, 0], [1, 2]]
    val.close()


def test_the_environment_decides_for_loaders_that_name_no_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FASTLOAD_CACHE=ram turns it on, and off turns all off; another value is an error."""
    monkeypatch.setenv(CACHE_VARIABLE, "ram")
    loader = fastload.DataLoader(Photos(folder), 4)
    list(loader)
    assert loader.stats().cache_misses == SIZE
    loader.close()
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    loader = fastload.DataLoader(Photos(folder), 4, cache="ram")
    list(loader)
    assert loader.stats().cache_misses is None
    monkeypatch.setenv(CACHE_VARIABLE, "disk")
    with pytest.raises(ValueError, match="FASTLOAD_CACHE"):
        iter(fastload.DataLoader(Photos(folder), 4))


@pytest.mark.parametrize("cache", ["disk", "ram:", "ram:lots", "lmdb:", "lmdb:s3://a/b", 3, True])
def test_other_caches_are_errors_at_once(cache: Any, folder: Path) -> None:
    """What a loader cannot do names what it can."""
    with pytest.raises(ValueError, match="cache"):
        fastload.DataLoader(Photos(folder), cache=cache)


class Archive(tud.Dataset[Any]):
    """One array of a compressed archive."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "volume.npz"
        np.savez_compressed(self.path, image=np.zeros(3))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        with np.load(self.path) as archive:
            return archive["image"]


def test_a_wrong_hit_is_an_error_that_names_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With FASTLOAD_VERIFY=1, a value that is not what the decoder returns now stops the epoch."""
    loader = fastload.DataLoader(Archive(folder), cache="ram")
    list(loader)
    real = DecodedFiles.get

    def wrong(self: Any, key: bytes) -> Any:
        stored = real(self, key)
        return stored and stored._replace(array=stored.array + 1)

    monkeypatch.setattr(DecodedFiles, "get", wrong)
    with pytest.raises(DecodeMismatchError, match=r"volume\.npz"):
        list(loader)
    loader.close()


def test_a_cache_that_is_set_after_an_epoch_is_judged_by_its_own_epochs(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first epoch of the cache, which is not the first one of the loader, has no hits, and no warning."""
    loader = fastload.DataLoader(Photos(folder), 4)
    list(loader)
    loader.cache = "ram"
    with caplog.at_level(logging.WARNING, "fastload"):
        for _ in range(4):
            list(loader)
    assert loader.stats().cache_hits
    assert not [text for text in caplog.messages if "is not found" in text]
    loader.close()


@pytest.fixture
def complaints(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What a cache that serves less than half has said."""
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "fastload"):
        yield lambda: [text for text in caplog.messages if text.startswith("cache: ")]


def test_few_hits_are_told_once(folder: Path, complaints: Callable[[], list[str]]) -> None:
    """If files keep changing, a warning after the second epoch says why they were decoded again."""
    loader = fastload.DataLoader(Photos(folder), 4, cache="ram")
    identity.SETTLED_S = 1e9
    list(loader)
    assert not complaints()
    for _ in range(3):
        list(loader)
    (told,) = complaints()
    assert "half or more of what Photos reads is not found" in told
    assert "changed a moment ago" in told
    loader.close()


def test_what_was_read_while_the_loader_learnt_is_not_missed_later(
    folder: Path, complaints: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 80 images that are resized first, 64 are stored in the second epoch, which is no reason to warn."""
    monkeypatch.setenv(VERIFY_VARIABLE, "0")
    for number in range(80 - SIZE):
        Image.new("RGB", (20, 20), (number, 0, 0)).save(folder / f"more {number}.jpg")
    with fastload.DataLoader(Resized(folder), 8, cache="ram") as loader:
        for _ in range(3):
            list(loader)
        assert loader.stats().miss_reasons == {LEARNING: 64, NEW: 80}
    assert not complaints()


def test_files_that_were_new_are_not_missed_later(folder: Path, complaints: Callable[[], list[str]]) -> None:
    """They are stored in the first epoch in which they have an identity, which is no reason to warn."""
    with fastload.DataLoader(Bgr(folder), 4, cache="ram") as loader:
        identity.SETTLED_S = 1e9
        list(loader)
        identity.SETTLED_S = 0.0
        identity._file_systems.clear()
        list(loader)
        assert loader.stats().miss_reasons == {TOO_NEW: SIZE, NEW: SIZE}
    assert not complaints()


class Pairs(Photos):
    """A photo, and a mask in a format that is not remembered."""

    def __getitem__(self, index: int) -> Any:
        gif = self.paths[index].with_suffix(".gif")
        if not gif.exists():
            Image.new("P", (8, 8)).save(gif)
        return super().__getitem__(index), np.asarray(Image.open(gif))


class Uncompressed(Photos):
    """Reads masks that are not compressed beside, or instead of, each photo."""

    alone = False

    def __getitem__(self, index: int) -> Any:
        path = self.paths[index].with_suffix(".npz")
        if not path.exists():
            np.savez(path, a=np.arange(9))
        with np.load(path) as archive:
            return archive["a"], None if self.alone else super().__getitem__(index)


class Masks(Uncompressed):
    alone = True


class Written(Photos):
    """Opens its files to write to them."""

    def __getitem__(self, index: int) -> Any:
        with self.paths[index].open("r+b") as file:
            return np.asarray(Image.open(file))


class Threads(Photos):
    """Reads in a thread of its own."""

    def __getitem__(self, index: int) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super().__getitem__, index).result()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Pillow keeps GIFs open
@pytest.mark.parametrize("options", WORKERS[:2])
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Pairs, "in a format that"),
        (Threads, "threads of its own"),
        (Masks, "uncompressed data is read as fast"),
        (Written, 'open files with "rb"'),
    ],
)
def test_a_cache_that_serves_half_or_nothing_is_told_after_one_epoch(
    folder: Path, complaints: Callable[[], list[str]], options: dict[str, Any], make: Any, why: str
) -> None:
    """Also of a loader that nobody holds while it is read."""
    for _ in fastload.DataLoader(make(folder), 4, cache="ram", collate_fn=list, **options):
        pass
    (told,) = complaints()
    assert why in told
    loader = fastload.DataLoader(make(folder), 4, cache="ram", collate_fn=list, **options)
    list(loader)
    assert why in loader.explain()
    assert len(complaints()) == 1
    loader.close()


def test_uncompressed_files_beside_what_is_found_are_no_reason_to_warn(
    folder: Path, complaints: Callable[[], list[str]]
) -> None:
    """The cache does for them what it can."""
    with fastload.DataLoader(Uncompressed(folder), 4, cache="ram", collate_fn=list) as loader:
        for _ in range(3):
            list(loader)
    assert not complaints()


@pytest.mark.parametrize("make", [Photos, Threads])
def test_a_sampler_without_an_end_is_judged(
    folder: Path, complaints: Callable[[], list[str]], make: Any
) -> None:
    """By as many samples as the dataset has, some hundred batches at the latest."""
    dataset = make(folder)
    with fastload.DataLoader(dataset, 1, sampler=itertools.cycle(range(len(dataset))), cache="ram") as loader:
        for _ in zip(range(300), loader, strict=False):
            pass
    assert len(complaints()) == (make is Threads)


def test_iterators_that_are_dropped_are_no_epochs(folder: Path, complaints: Callable[[], list[str]]) -> None:
    """Prefetchers make them; their batches are no reason to warn."""
    loader = fastload.DataLoader(
        Photos(folder), 4, cache="ram", num_workers=1, multiprocessing_context="fork"
    )
    for _ in range(4):
        next(iter(loader))
    for _ in range(3):
        list(loader)
    assert not complaints()
    loader.close()


class Unmet(Photos):
    """Files read without any library."""

    def __getitem__(self, index: int) -> Any:
        return len(self.paths[index].read_bytes())


class TestExplain:
    """explain(): what was remembered, why the rest was not, and what to do."""

    @pytest.mark.filterwarnings("ignore::ResourceWarning")  # Pillow keeps GIFs open
    @pytest.mark.parametrize("options", WORKERS[:2])
    def test_each_reason_has_an_advice(self, folder: Path, options: dict[str, Any]) -> None:
        """Files of every kind, with and without workers: counts that add up, and a line for each reason."""
        with Image.open(folder / "05.jpg") as image:
            image.save(folder / "05.jpg", format="GIF")
            others = [Image.new("RGB", image.size)]
            image.save(folder / "06.jpg", format="WEBP", save_all=True, append_images=others)
        os.utime(folder / "07.jpg", (time.time() + 3600,) * 2)
        with fastload.DataLoader(Photos(folder), 4, cache="ram", **options) as loader:
            assert "nothing was read" in loader.explain()
            list(loader)
            list(loader)
            first, counts, *lines = loader.explain().split("\n")
            stats = loader.stats()
        assert f"{SIZE - 3} decoded files" in first
        assert (stats.cache_hits, stats.cache_misses) == (SIZE - 3, SIZE + 3)
        assert counts == f"so far: {SIZE - 3} found, {SIZE + 3} decoded"
        assert [line.split(":")[0].strip() for line in lines] == [
            f"{SIZE - 3} new",
            "4 in a format that is not remembered, or a later frame",
            "2 changed a moment ago",
        ]
        assert "touch" in lines[-1]

    def test_a_reader_that_is_not_met_is_told(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """If nothing was decoded by a known library, a line names the way out, and what was replaced."""
        monkeypatch.setattr(cv2, "imread", lambda path: path)
        with fastload.DataLoader(Unmet(folder), 4, cache="ram") as loader:
            list(loader)
            text = loader.explain()
        assert "@fastload.remember" in text
        assert "cv2.imread" in text

    def test_a_data_pipe_is_not_remembered_and_it_says_so(self, folder: Path) -> None:
        """It is read by torch's own iterator."""
        pipe = tud.datapipes.map.SequenceWrapper(Photos(folder), deepcopy=False)
        with fastload.DataLoader(pipe, 4, cache="ram") as loader:
            list(loader)
            assert "so far: nothing is remembered, because torch's own loader reads" in loader.explain()

    def test_it_names_functions_that_the_program_wrapped(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Such as by a timer: that is left alone, and called on each access."""
        calls, imread = [], cv2.imread

        @functools.wraps(imread)
        def counted(*args: Any) -> Any:
            calls.append(args)
            return imread(*args)

        monkeypatch.setattr(cv2, "imread", counted)
        loader = fastload.DataLoader(Bgr(folder), cache="ram")
        for _ in range(2):
            list(loader)
        assert len(calls) == 2 * SIZE
        assert "replaced or held by other code, so not remembered: cv2.imread" in loader.explain()

    def test_without_a_cache_it_says_why(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """None was asked for, or the environment turns it off."""
        assert 'cache="ram"' in fastload.DataLoader(Photos(folder)).explain()
        monkeypatch.setenv(CACHE_VARIABLE, "off")
        assert "FASTLOAD_CACHE=off" in fastload.DataLoader(Photos(folder), cache="ram").explain()

    def test_without_a_cache_of_its_own_it_says_what_the_dataset_caches(self, folder: Path) -> None:
        """A CachedDataset, also inside torch's Subset."""
        dataset = fastload.CachedDataset(Bgr(folder))
        assert f"3 of {SIZE} samples" in dataset.explain()  # those that the constructor reads
        for wrapped in (dataset, tud.Subset(dataset, [0, 1])):
            assert fastload.DataLoader(wrapped).explain() == f"cache of the dataset: {dataset.explain()}"
        dataset.cache.close()

    def test_every_reason_has_a_meaning(self) -> None:
        """The reasons that readers count are those that explain() knows."""
        names = {value for name, value in vars(reasons).items() if name[0].isupper() and type(value) is str}
        assert len(reasons.report(0, len(names), dict.fromkeys(names, 1))) == 1 + len(names)
