"""One cache for all processes of a user: found, checked, shared, and gone with the last of them."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import pickle
import re
import stat
from types import SimpleNamespace
from typing import Any
from unittest import mock

import albumentations as A
import numpy as np
import pytest
import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset

import fastload
from fastload.cache.dataset import CachedDataset
from fastload.cache.fingerprint import Fingerprint, fingerprint_of
from fastload.cache.ram import arena, registry, shared
from fastload.cache.ram.arena import DESCRIPTION_AT
from fastload.cache.ram.registry import Entry
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.errors import CacheMismatchError, SharedMemoryError
from fastload.memory.segment import Segment, pickled_for_other_machines
from fastload.system.logs import say_once
from tests.cache.build_zoo import exit_codes
from tests.cache.zoo import Everything, Images, KnownImages, Made, RaggedImages
from tests.kit.batches import assert_same_samples
from tests.kit.faults import OTHER_KINDS, something_else

MB = 1 << 20
pytestmark = pytest.mark.usefixtures("registry_folder")


def fill(dataset: Images, key: str | None = None) -> tuple[Any, Any]:
    """Open and fill; gives who made the cache."""
    ds = CachedDataset(dataset, cache_key=key, max_memory=64 * MB)
    ds.fill(num_workers=0)
    return ds, ds.cache.pid


def look(dataset: Images, key: str | None = None) -> tuple[Any, Any]:
    """Open; gives who made the cache and how many samples are there."""
    ds = CachedDataset(dataset, cache_key=key, max_memory=64 * MB)
    return ds, (ds.cache.pid, ds.cache_info().num_cached)


class KnownRagged(KnownImages, RaggedImages):
    """Every image of another size, and it says so."""


@pytest.mark.parametrize(
    ("dataset", "key"), [(KnownImages(30), None), (KnownRagged(30), None), (Everything(30), "photos")]
)
def test_a_second_job_finds_what_the_first_decoded(dataset: Images, key: str | None, start: Any) -> None:
    """It gets every sample right, and reads two from the source to compare; a key shares any dataset."""
    first = start(fill, dataset, key)
    assert first.answer() == first.pid
    ds = CachedDataset(dataset, cache_key=key)
    assert ds.cache_info().num_cached == 30
    by_parts = r" \d+ s ago from the same parts"
    assert re.search(rf"^found, made by process {first.pid}{by_parts}$", ds.cache.reason)
    for index in range(30):
        assert_same_samples(ds._view(index), dataset.sample(index))
    assert sum(dataset.reads) == 2
    assert CachedDataset(dataset, cache_key="pictures").cache.pid == os.getpid()


@pytest.mark.slow
def test_a_cache_lives_as_long_as_one_of_its_jobs(start: Any, registry_folder: Any) -> None:
    """What one job stores is there for all; another follows a killed maker; the last takes it along."""
    mine = CachedDataset(KnownImages(30), max_memory=64 * MB)
    before = mine.cache_info().num_cached
    first = start(fill, KnownImages(30))
    assert first.answer() == os.getpid()
    assert (before, mine.cache_info().num_cached) == (3, 30)
    mine.cache.close()
    second = start(look, KnownImages(30))
    assert second.answer() == (os.getpid(), 30)
    first.kill()
    second.kill()
    third = start(look, KnownImages(30))
    assert third.answer() == (third.pid, 3)
    third.kill()
    assert registry.entries() == []
    assert os.listdir(registry_folder) == ["lock"]


@pytest.mark.slow
def test_jobs_that_start_together_make_one_cache(start: Any) -> None:
    """Of five jobs that open the same at once, one makes the cache and all use it."""
    jobs = [start(look, KnownImages(30)) for _ in range(5)]
    assert len({job.answer()[0] for job in jobs}) == 1


LAUNCHERS: list[tuple[dict[str, str], int, int]] = [  # variables, ranks of the process group, ranks here
    ({}, 1, 1),
    ({}, 2, 2),
    *(({name: "4"}, 1, 4) for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")),
    ({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, 2, 1),  # a rank on each of two hosts
    ({"LOCAL_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 1, 1),
    ({"LOCAL_WORLD_SIZE": "many"}, 1, 1),
    ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, 1, 2),  # Lightning
    ({"WORLD_SIZE": "2"}, 1, 1),  # what starts torchrun on each of two hosts
    ({"SLURM_LOCALID": "3"}, 1, 4),
    ({"SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "4"}, 1, 4),
    ({"SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1"}, 1, 1),
    ({"SLURM_NTASKS_PER_NODE": "4"}, 1, 1),  # the shell of a job, which started nothing yet
    ({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2"}, 1, 4),
    ({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}, 1, 1),
]


@pytest.fixture(params=LAUNCHERS, ids=str)
def num_ranks(request: Any, monkeypatch: Any) -> int:
    """How many ranks of this host a launcher has started, of which this process is one."""
    variables, size, expected = request.param
    for name in {name for others, _, _ in LAUNCHERS for name in others}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: size > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: size)
    say_once.cache_clear()
    return int(expected)


def test_ranks_are_warned_once_of_private_caches(num_ranks: int, monkeypatch: Any, caplog: Any) -> None:
    """Where a launcher, or a process group, shows that there are several on a host."""
    with caplog.at_level(logging.WARNING, "fastload"):
        made = [CachedDataset(Images(30)) for _ in range(2)]
    assert ["private to this process and its workers" in text for text in caplog.messages] == (
        [True] if num_ranks > 1 else []
    )
    assert "pass cache_key=" in made[0].cache.explain()
    if num_ranks > 1:  # that others should find it and cannot is worth one, too
        monkeypatch.setenv(registry.DIRECTORY_VARIABLE, "/proc/no/such")
        CachedDataset(KnownImages(30))
        assert "the registry of shared caches cannot be used. Each rank" in caplog.text


def test_ranks_divide_the_memory_among_private_caches(num_ranks: int, monkeypatch: Any) -> None:
    """A shared cache can take all that is allowed; a private one never more than its rank's share."""
    monkeypatch.setattr(arena, "available_bytes", lambda: 1200 * MB)

    def limit(dataset: Images, max_memory: Any) -> Any:
        return CachedDataset(dataset, max_memory=max_memory).cache_info().max_bytes

    assert limit(KnownImages(30), "auto") == 840 * MB
    assert limit(Images(30), "auto") == 840 * MB // num_ranks
    assert limit(Images(30), 0.5) == 600 * MB // num_ranks
    assert limit(Images(30), 400 * MB) == min(400, 1200 // num_ranks) * MB


class Listed(list[Any]):
    """A list of samples, with an attribute."""

    def __init__(self, labels: list[int]) -> None:
        super().__init__((image_of(index), label) for index, label in enumerate(labels))
        self.name = "train"


class Labeled:
    """Images whose labels are held in some way."""

    __slots__ = ("__dict__", "held")

    def __init__(self, held: Any) -> None:
        self.held = held
        self.root = "/data"

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        label = self.held(index) if callable(self.held) else self.held[index]
        return image_of(index), int(getattr(label, "value", label))


def image_of(index: int) -> Any:
    return np.full((4, 4, 3), index, np.uint8)


class Corrected(KnownImages):
    """Changes a label of a dataset that has a fingerprint."""

    def __init__(self, label: int) -> None:
        super().__init__(30)
        self.label = label

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image, self.label if index == 20 else label


def in_a_circle(labels: list[int]) -> Labeled:
    dataset = Labeled(None)
    dataset.held = [SimpleNamespace(value=label, owner=dataset) for label in labels]
    return dataset


OF_ONE_CLASS: dict[str, Any] = {
    "a list": Listed,
    "slots": Labeled,
    "bfloat16": lambda labels: Labeled(torch.tensor(labels, dtype=torch.bfloat16)),
    "a circle": in_a_circle,
    "a function": lambda labels: Labeled(lambda index: labels[index]),
    "a subclass of one with a fingerprint": lambda labels: Corrected(labels[20]),
    "a subset": lambda labels: Subset(Corrected(labels[20]), range(30)),
}


@pytest.mark.parametrize("make", OF_ONE_CLASS.values(), ids=OF_ONE_CLASS)
def test_datasets_of_one_class_without_a_key_get_their_own_samples(
    make: Any, start: Any, monkeypatch: Any
) -> None:
    """Two ranks, or two trials that one process starts as a launcher does: one label differs."""

    def wrong(label: int) -> tuple[Any, Any]:
        dataset = make([label if index == 20 else index for index in range(30)])
        ds = CachedDataset(dataset, max_memory=MB)
        ds.fill(num_workers=0)
        return ds, [index for index in range(30) if ds[index][1] != dataset[index][1]]

    for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    first = start(wrong, 1024)
    assert first.answer() == []
    assert start(wrong, 1280).answer() == []


def test_other_samples_under_a_name_are_an_error(start: Any) -> None:
    """It says which part differs from that of the other process; a broken promise is found at sample 0."""
    maker = start(fill, Images(30), "photos").answer()
    start(fill, KnownImages(30, shape=(8, 8, 3))).answer()

    said = rf'process {maker}, .* num_samples is "31" here and "30" there'
    with pytest.raises(CacheMismatchError, match=said):
        CachedDataset(Images(31), cache_key="photos")
    with pytest.raises(
        CacheMismatchError, match=r"pre_transform is .* here and nothing there.*different key"
    ):
        CachedDataset(Images(30), cache_key="photos", pre_transform=A.Resize(8, 8))
    with pytest.raises(CacheMismatchError, match=r"sample 0 .* differs at sample\[0\].*covers too little"):
        CachedDataset(KnownImages(30))


FAULTS = "foreign", "unsealed", "open to others", "damaged", "of another format", "of another name", "closed"


@pytest.mark.parametrize("fault", [*FAULTS, *OTHER_KINDS])
def test_what_is_no_cache_is_passed_over(fault: str, start: Any) -> None:
    """An entry that leads to anything but a sound cache of that name is no error: the next one is asked."""
    fingerprint: Any = fingerprint_of(dataset := KnownImages(3))
    made = fingerprint if fault != "of another name" else Fingerprint({"any": "thing"}, None)
    cache = SharedMemoryCache(3, [dataset.sample(0)], max_memory=MB, fingerprint=made)
    segment = cache._arena.segment
    number = None
    if fault == "foreign":
        segment = Segment.create(MB, sealed=True)
    elif fault == "unsealed":
        segment = Segment.create(cache._arena.segment.nbytes)
        os.pwrite(segment.fd, os.pread(cache._arena.segment.fd, segment.nbytes, 0), 0)
    elif fault == "open to others":
        os.fchmod(segment.fd, 0o644)
    elif fault == "damaged":
        os.pwrite(segment.fd, b"?", DESCRIPTION_AT + 5)
    elif fault == "of another format":
        os.pwrite(segment.fd, (2).to_bytes(4, "little"), 8)
    elif fault == "closed":
        number = fcntl.fcntl(segment.fd, fcntl.F_DUPFD, 500)  # far from those that are opened next
        os.close(number)
    elif fault != "of another name":
        with something_else(fault) as other:
            os.dup2(other, segment.fd)
    registry.register(fingerprint.name, number or segment.fd)

    assert shared.find(fingerprint, 3) is None
    mine = CachedDataset(dataset, max_memory=MB)
    assert start(look, dataset).answer() == (os.getpid(), 3)
    assert mine.cache.created_s > cache.created_s
    assert len(registry.entries()) == 3  # the false one too: its owner may make it true at any moment
    segment.close()


def test_a_cache_that_is_closed_meanwhile_is_no_error(monkeypatch: Any) -> None:
    """Its owner may close it between the moment of the listing and that of the opening."""
    first = CachedDataset(KnownImages(3), max_memory=MB)
    real = registry.entries
    monkeypatch.setattr(registry, "entries", lambda name: (real(name), first.cache.close())[0])
    second = CachedDataset(KnownImages(3), max_memory=MB)
    assert second.cache.created_s > first.cache.created_s
    assert second[1][1] == 1


def test_live_caches_are_listed_until_they_are_closed(start: Any) -> None:
    """Each once, with who opened it, its key, parts and size; it is its user's, and its size is sealed."""
    one, two = (CachedDataset(Images(30), cache_key="photos", max_memory=64 * MB) for _ in range(2))
    other = start(fill, Images(30), "photos")
    other.answer()
    one.cache.close()
    (live,) = registry.live()
    nbytes, mode = two.cache.nbytes, os.fstat(two.cache._arena.segment.fd).st_mode
    with pytest.raises(PermissionError):
        os.ftruncate(two.cache._arena.segment.fd, 0)
    two.cache.close()
    assert set(live["users"]) == {os.getpid(), other.pid}
    assert (live["key"], live["num_samples"], live["num_cached"]) == ("photos", 30, 30)
    assert live["parts"]["num_samples"] == "30"
    assert (live["nbytes"], live["max_bytes"]) == (nbytes, 64 * MB)
    assert stat.S_IMODE(mode) == 0o600
    assert [entry.pid for entry in registry.entries()] == [other.pid]


def test_a_stopped_creator_delays_nobody_for_long(monkeypatch: Any) -> None:
    """While somebody holds the creation lock, others make private caches; an error of its holder frees it."""
    monkeypatch.setattr(registry, "_CREATION_WAIT_S", 0.01)
    with pytest.raises(OSError, match="mine"), registry.creating():
        raise OSError("mine")  # which is not taken for one of the lock
    with registry.creating() as is_alone:
        assert is_alone
        ds = CachedDataset(KnownImages(3))
    assert "the registry of shared caches cannot be used" in ds.cache.explain()
    assert ds[1][1] == 1


NUMBERS = st.tuples(*[st.integers(0, 2**63)] * 4)


@given(st.text("0123456789abcdef", min_size=1), NUMBERS, st.text(max_size=40))
def test_an_entry_survives_its_file_name(name: str, numbers: Any, other: str) -> None:
    """What a file name states is what was put into it; any other text is none, and never an error."""
    entry, odd = Entry(name, *numbers), Entry.parse(other)
    assert Entry.parse(entry.file_name) == entry
    assert odd is None or odd.name == other.split(".")[0]


def test_entries_are_of_living_processes(registry_folder: Any) -> None:
    """A dead owner's is removed; one of a later process with its number is none; a fork takes none back."""
    assert exit_codes(lambda: registry.register("a", 7)) == [0]
    assert len(os.listdir(registry_folder)) == 1
    assert registry.entries("a") == []
    assert os.listdir(registry_folder) == []
    entry: Any = registry.register("a", 7)
    assert exit_codes(lambda: registry.unregister(entry)) == [0]
    assert registry.entries("a") == [entry]
    later = dataclasses.replace(entry, started=entry.started + 1)
    (registry_folder / entry.file_name).rename(registry_folder / later.file_name)
    assert registry.entries("a") == []


def test_entries_of_other_containers_are_ignored(registry_folder: Any) -> None:
    """Nobody here knows whether their processes run, or can reach them; their files stay."""
    entry: Any = registry.register("a", 7)
    other = dataclasses.replace(entry, namespace=entry.namespace + 1)
    (registry_folder / entry.file_name).rename(registry_folder / other.file_name)
    assert registry.entries("a") == []
    assert (registry_folder / other.file_name).exists()


def test_an_owner_that_cannot_be_reached(registry_folder: Any, monkeypatch: Any, caplog: Any) -> None:
    """An error says why: closed, other memory, or forbidden; a cache is made, with a line."""
    say_once.cache_clear()
    first = CachedDataset(KnownImages(3))
    (mine,) = registry.entries()
    lost = dataclasses.replace(mine, fd=9999)
    (registry_folder / mine.file_name).rename(registry_folder / lost.file_name)
    with caplog.at_level(logging.INFO, "fastload"):
        second = CachedDataset(KnownImages(3))
    assert second.cache.created_s != first.cache.created_s
    assert "it cannot be shared: the descriptor of process" in caplog.text
    slot = Segment.create(1, name="fastload-slot")
    with contextlib.closing(slot), pytest.raises(SharedMemoryError, match="is now /memfd:fastload-slot"):
        dataclasses.replace(mine, fd=slot.fd).attach()
    with pytest.raises(SharedMemoryError, match="No such file or directory"):
        dataclasses.replace(mine, fd=9999).attach()
    monkeypatch.setattr(os, "open", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(SharedMemoryError, match=rf"process {os.getpid()} .*Permission denied"):
        mine.attach()


def test_links_in_the_registry_are_not_followed(registry_folder: Any, caplog: Any) -> None:
    """A link in the place of the lock or of an entry is refused, and what it points to is left alone."""
    registry_folder.mkdir(0o700)
    target = registry_folder.parent / "target"
    (registry_folder / "lock").symlink_to(target)
    with caplog.at_level(logging.INFO, "fastload"):
        entry: Any = registry.register("a", 7)
        registry.unregister(entry)
        (registry_folder / entry.file_name).symlink_to(target)
        again = registry.register("a", 7)
        with registry.creating() as is_alone:
            pass
    assert (again, is_alone) == (None, False)
    assert caplog.text.count("Too many levels of symbolic links") == 2
    assert not target.exists()


NOT_PRIVATE = "is not a private directory of this user"
WITHOUT_A_REGISTRY = {
    **dict.fromkeys(("open to others", "a link", "a file"), NOT_PRIVATE),
    "no directory": "no registry of shared caches at /proc/no/registry",
    "no /proc": "it needs /proc, which does not exist",
    "no locks": "cannot lock the registry",
    "no list": "Function not implemented",
}


@pytest.mark.parametrize("fault", WITHOUT_A_REGISTRY)
def test_without_a_registry_none_is_shared(
    fault: str, registry_folder: Any, monkeypatch: Any, caplog: Any
) -> None:
    """Where others could write, or the system refuses, nothing is believed; one line says why."""
    say_once.cache_clear()
    real, refuse = os.stat, mock.Mock(side_effect=OSError(38, "Function not implemented"))

    def hide(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path, *args, **options)

    if fault == "a link":
        (registry_folder.parent / "elsewhere").mkdir(0o700)
        registry_folder.symlink_to(registry_folder.parent / "elsewhere")
    elif fault == "a file":
        registry_folder.touch(0o600)
    else:
        registry.register("a", 7)
    if fault == "open to others":
        registry_folder.chmod(0o755)
    elif fault == "no directory":
        monkeypatch.setenv(registry.DIRECTORY_VARIABLE, "/proc/no/registry")
    elif fault == "no /proc":
        monkeypatch.setattr(os, "stat", hide)
    elif fault in ("no locks", "no list"):
        monkeypatch.setattr(*((fcntl, "flock") if fault == "no locks" else (os, "listdir")), refuse)
    with caplog.at_level(logging.INFO, "fastload"), registry.creating() as has_lock:
        found = registry.entries("a")
        entry = registry.register("a", 7)

    assert (has_lock, len(found)) == (fault == "no list", fault == "no locks")
    assert (entry is None) == fault.startswith(("open", "a ", "no d", "no /"))
    assert caplog.text.count(WITHOUT_A_REGISTRY[fault]) == 1


def sent(value: Any) -> bytes:
    """Its pickle for other machines."""
    with pickled_for_other_machines():
        return pickle.dumps(value)


def from_elsewhere(dataset: CachedDataset) -> bytes:
    """The pickle of a cached dataset whose cache cannot be reached from here, as on a different machine."""
    text = sent(dataset)
    dataset.cache.close()
    return text


def test_on_the_same_machine_it_is_the_same_cache() -> None:
    """Nodes of a cluster can share a machine."""
    here = CachedDataset(Images(8))
    there = pickle.loads(sent(here))
    here.fill(num_workers=0)
    assert there.cache_info().num_cached == 8


@pytest.mark.parametrize(
    "source", [Images(8), KnownImages(8), RaggedImages(8)], ids=lambda d: type(d).__name__
)
def test_a_machine_that_cannot_reach_the_cache_makes_one(source: Any) -> None:
    """All workers of that machine share it, with the same layout; jobs find it by its fingerprint."""
    first = CachedDataset(source)
    layout = first.cache_info().layout
    text = from_elsewhere(first)
    one, other = pickle.loads(text), pickle.loads(text)
    assert one.cache_info().num_cached == 0
    one.fill(num_workers=0)
    assert isinstance(other.cache, SharedMemoryCache)
    assert (other.cache_info().num_cached, other.cache_info().layout) == (8, layout)
    assert_same_samples([other[i] for i in range(8)], [source[i] for i in range(8)])
    assert CachedDataset(source).cache_info().num_cached == (8 if isinstance(source, KnownImages) else 3)


def test_a_machine_with_less_memory_has_a_smaller_cache(monkeypatch: Any) -> None:
    """It stores what fits, and all samples are right."""
    source = Images(64, shape=(64, 64, 3))  # 0.8 of a megabyte
    first, limit = CachedDataset(source, max_memory=MB), MB // 2
    monkeypatch.setattr(shared, "budget_bytes", lambda *_, **__: limit)
    there = pickle.loads(from_elsewhere(first))
    assert_same_samples([there[i] for i in range(64)], [source[i] for i in range(64)])
    assert there.cache_info().max_bytes == limit
    assert 0 < there.cache_info().nbytes <= limit


def test_a_machine_without_shared_memory_reads_the_dataset(monkeypatch: Any, caplog: Any) -> None:
    """With a warning; no sample is lost."""
    text = from_elsewhere(CachedDataset(Images(8)))
    monkeypatch.setattr(arena.Arena, "create", mock.Mock(side_effect=SharedMemoryError("denied")))
    there = pickle.loads(text)
    assert "cache: none, because shared memory is not available: denied" in caplog.text
    assert_same_samples([there[3], pickle.loads(pickle.dumps(there))[3]], [Images(8)[3]] * 2)
    assert there.cache_info().num_cached == 0


def test_an_edit_that_leaves_the_first_sample_is_noticed() -> None:
    """By the middle one; a sample that is not cached yet is not compared."""
    first = CachedDataset(Made(lambda index: index, 40), cache_key="edited")
    edited = Made(lambda index: -index, 40)  # equal at 0
    with pytest.raises(CacheMismatchError, match="sample 20 of the dataset differs"):
        CachedDataset(edited, cache_key="edited")
    first.cache.close()
    empty = CachedDataset(Made(lambda index: np.full(4, index), 40), cache_key="empty", max_memory="40B")
    assert empty.cache_info().num_cached == 0
    CachedDataset(Made(lambda index: np.full(4, -index), 40), cache_key="empty")


def test_a_key_used_twice_at_the_same_moment_is_noticed(monkeypatch: Any) -> None:
    """Whoever finds a cache finds the samples that its maker has read, to compare them."""
    hold, errors = registry.hold, list[Exception]()

    def held(arena: Any) -> bool:
        monkeypatch.setattr(registry, "hold", hold)
        is_held = hold(arena)
        with pytest.raises(CacheMismatchError, match="sample 20 of the dataset differs") as raised:
            CachedDataset(Made(lambda index: -index, 40), cache_key="both")
        errors.append(raised.value)
        return is_held

    monkeypatch.setattr(registry, "hold", held)
    CachedDataset(Made(lambda index: index, 40), cache_key="both")
    assert len(errors) == 1


def test_an_entry_that_a_cleaner_removed_is_put_back_at_the_end_of_an_epoch(registry_folder: Any) -> None:
    """So jobs that start later find the samples."""
    ds = CachedDataset(Images(8), cache_key="photos")
    names = set(os.listdir(registry_folder))
    for path in registry_folder.iterdir():
        path.unlink()
    assert len(list(fastload.DataLoader(ds, 4))) == 2
    assert set(os.listdir(registry_folder)) == names - {"lock"}
