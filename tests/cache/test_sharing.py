"""One cache for all processes of a user: found, checked, shared, and gone with the last of them."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import stat
from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import pytest
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

from fastload.cache.dataset import CachedDataset
from fastload.cache.fingerprint import fingerprint_of
from fastload.cache.ram import owners, registry
from fastload.cache.ram.layout import DESCRIPTION_AT
from fastload.cache.ram.owners import Entry
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.errors import CacheMismatchError, SegmentError
from fastload.memory.segment import Segment
from fastload.system import logs
from fastload.system.logs import say_once
from tests.cache.build_zoo import exit_codes
from tests.cache.zoo import Everything, Images, KnownImages, RaggedImages
from tests.kit.batches import assert_same_samples
from tests.kit.faults import OTHER_KINDS, something_else

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.kit.jobs import Job


MB = 1 << 20


pytestmark = pytest.mark.usefixtures("registry")


def fill(dataset: Images, key: str | None = None) -> tuple[Any, Any]:
    """Open and fill; gives who made the cache."""
    ds = CachedDataset(dataset, cache_key=key, max_memory=64 * MB)
    ds.fill(num_workers=0)
    return ds, ds.cache.origin.pid


def look(dataset: Images, key: str | None = None) -> tuple[Any, Any]:
    """Open; gives who made the cache and how many samples are there."""
    ds = CachedDataset(dataset, cache_key=key, max_memory=64 * MB)
    return ds, (ds.cache.origin.pid, ds.cache_info().num_cached)


class KnownRagged(KnownImages, RaggedImages):
    """Every image of another size, and it says so."""


class KnownEverything(KnownImages, Everything):
    """Every kind of leaf, and it says so."""


@pytest.mark.parametrize("kind", [KnownImages, KnownRagged, KnownEverything])
def test_a_second_job_finds_what_the_first_decoded(
    kind: type[KnownImages], start: Callable[..., Job]
) -> None:
    """A job that opens a filled cache gets every sample right, and reads one from the source to compare."""
    first = start(fill, kind(30))
    assert first.answer() == first.pid
    dataset = kind(30)
    ds = CachedDataset(dataset)

    assert ds.cache_info().num_cached == 30
    assert sum(dataset.reads) == 1
    for index in range(30):
        assert_same_samples(ds._view(index), dataset.sample(index))
    assert sum(dataset.reads) == 1


@pytest.mark.slow
def test_a_cache_lives_as_long_as_one_of_its_jobs(start: Callable[..., Job], registry: Path) -> None:
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
    third = start(look, KnownImages(30))
    assert third.answer() == (os.getpid(), 30)
    second.kill()
    third.kill()
    fourth = start(look, KnownImages(30))

    assert fourth.answer() == (fourth.pid, 3)
    fourth.kill()
    assert owners.entries() == []
    assert os.listdir(registry) == ["lock"]


@pytest.mark.slow
def test_jobs_that_start_together_make_one_cache(start: Callable[..., Job]) -> None:
    """Of eight jobs that open the same at once, one makes the cache and all use it."""
    jobs = [start(look, KnownImages(30)) for _ in range(8)]

    assert len({job.answer()[0] for job in jobs}) == 1


@pytest.mark.slow
def test_a_key_shares_any_dataset(start: Callable[..., Job]) -> None:
    """With cache_key= a dataset that says nothing of itself is shared by that name, and by no other."""
    maker = start(fill, Images(30), "photos").answer()

    assert start(look, Images(30), "photos").answer() == (maker, 30)
    assert start(look, Images(30), "pictures").answer()[0] != maker


LAUNCHERS = [
    {"LOCAL_WORLD_SIZE": "8"},
    {"LOCAL_RANK": "0", "WORLD_SIZE": "2"},  # Lightning
    {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    {"MPI_LOCALNRANKS": "4"},
    {"SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "4"},
    {"SLURM_LOCALID": "3"},
]
ALONE = [
    {},
    {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},  # a rank on each of two hosts
    {"LOCAL_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    {"SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1"},
    {"SLURM_NTASKS_PER_NODE": "4"},  # the shell of a job, which started nothing yet
]


def set_launcher(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {name for launcher in (*LAUNCHERS, *ALONE) for name in launcher}:
        monkeypatch.delenv(name, raising=False)
    say_once.cache_clear()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "world_size"), [*((variables, 1) for variables in (*LAUNCHERS, *ALONE)), ({}, 2)]
)
def test_ranks_are_warned_of_private_caches(
    variables: dict[str, str], world_size: int, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """One warning where a launcher, or a process group, shows that there are several ranks on a host."""
    set_launcher(variables, monkeypatch)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: world_size > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
    is_alone = variables in ALONE and world_size == 1
    with caplog.at_level(logging.WARNING, "fastload"):
        made = [CachedDataset(Images(30)) for _ in range(2)]

    assert ["private to this process and its workers" in text for text in caplog.messages] == (
        [] if is_alone else [True]
    )
    assert "pass cache_key=" in made[0].cache.explain()
    if world_size == 1 and variables in LAUNCHERS:  # that others should find it and cannot is worth one, too
        monkeypatch.setenv(owners.DIRECTORY_VARIABLE, "/proc/no/such")
        CachedDataset(KnownImages(30))
        assert "so this one is private" in caplog.text


def _halved(sample: Any) -> Any:
    return sample[0][::2], sample[1]


@pytest.mark.parametrize(
    ("dataset", "prepare", "lacks"),
    [
        (Images(30), None, "because Images has neither"),
        (Images(30), _halved, "because Images with prepare=_halved has neither"),
        (KnownImages(30), _halved, "because KnownImages with prepare=_halved has neither"),
    ],
    ids=["dataset", "both", "prepare"],
)
def test_a_private_cache_names_the_part_without_a_fingerprint(dataset: Any, prepare: Any, lacks: str) -> None:
    """The user learns what needs a fingerprint()."""
    assert lacks in CachedDataset(dataset, prepare=prepare).cache.explain()


def test_other_samples_under_a_name_are_an_error(start: Callable[..., Job]) -> None:
    """It says which part differs from that of the other process; a broken promise is found at sample 0."""
    maker = start(fill, Images(30), "photos").answer()
    start(fill, KnownImages(30, shape=(8, 8, 3))).answer()

    with pytest.raises(
        CacheMismatchError, match=rf'process {maker}, .* num_samples is "31" here and "30" there'
    ):
        CachedDataset(Images(31), cache_key="photos")
    with pytest.raises(CacheMismatchError, match=r"prepare is .* here and nothing there.*different key"):
        CachedDataset(Images(30), cache_key="photos", prepare=A.Resize(8, 8))
    with pytest.raises(CacheMismatchError, match=r"sample 0 .* differs at \$\[0\].*covers too little"):
        CachedDataset(KnownImages(30))


def test_memory_is_for_its_user_alone() -> None:
    """The segment is open to its user only, and its size is sealed."""
    ds = CachedDataset(KnownImages(3))

    assert stat.S_IMODE(os.fstat(ds.cache.fd).st_mode) == 0o600
    with pytest.raises(PermissionError):
        os.ftruncate(ds.cache.fd, 0)


@pytest.mark.parametrize(
    "fault", ["foreign", "unsealed", "open to others", "damaged", "of another format", "of another name"]
)
def test_what_is_no_cache_is_passed_over(fault: str) -> None:
    """An entry that leads to anything but a sound cache of that name is passed over for a new cache."""
    dataset = KnownImages(3)
    fingerprint = fingerprint_of(dataset)
    assert fingerprint is not None
    cache = SharedMemoryCache(3, [dataset.sample(0)], max_memory=MB, fingerprint=fingerprint)
    name = fingerprint.name
    segment = cache._now.segment
    if fault == "foreign":
        segment = Segment.create(MB, sealed=True)
    elif fault == "unsealed":
        segment = Segment.create(cache._now.segment.nbytes)
        os.pwrite(segment.fd, os.pread(cache._now.segment.fd, segment.nbytes, 0), 0)
    elif fault == "open to others":
        os.fchmod(segment.fd, 0o644)
    elif fault == "damaged":
        os.pwrite(segment.fd, b"?", DESCRIPTION_AT + 5)
    elif fault == "of another format":
        os.pwrite(segment.fd, (2).to_bytes(4, "little"), 8)
    else:
        name = "0" * 32
        fingerprint = type(fingerprint)({"any": "thing"}, None)
        name = fingerprint.name
    owners.register(name, segment.fd)

    assert registry.find(fingerprint, 3) is None
    segment.close()


def hold_something_else(dataset: Images, kind: str) -> tuple[Any, Any]:
    """Open a cache, and let its descriptor's number stand for something else, as daemonisers do."""
    ds, pid = fill(dataset)
    if kind == "closed":
        os.close(ds.cache.fd)
    else:
        with something_else(kind) as other:
            os.dup2(other, ds.cache.fd)
    return ds, pid


@pytest.mark.parametrize("kind", ["closed", *OTHER_KINDS])
def test_a_number_that_stands_for_something_else_is_passed_over(kind: str, start: Callable[..., Job]) -> None:
    """A process whose entry leads elsewhere is no error: the next owner is asked, else a cache is made."""
    start(hold_something_else, KnownImages(30), kind).answer()
    mine = CachedDataset(KnownImages(30), max_memory=64 * MB)
    first = mine.cache.origin.pid
    other = start(look, KnownImages(30)).answer()

    assert first == os.getpid()
    assert other == (os.getpid(), 3)
    assert len(owners.entries()) == 3  # the false one too: its owner may make it true at any moment


@pytest.mark.parametrize("kind", ["directory", "other memory", "closed"])
def test_a_number_that_changes_hands_meanwhile_is_no_error(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner may close its cache between the moment of the listing and that of the opening."""
    first = CachedDataset(KnownImages(3), max_memory=MB)
    real = owners.entries

    def list_and_close(name: str | None = None) -> list[owners.Entry]:
        found, fd = real(name), first.cache.fd
        if fd >= 0:
            first.cache.close()
            if kind != "closed":
                other = os.open("/", os.O_RDONLY) if kind == "directory" else os.memfd_create("other")
                numbers.append(fd)
                if other != fd:
                    os.dup2(other, fd)
                    os.close(other)
        return found

    numbers: list[int] = []
    monkeypatch.setattr(owners, "entries", list_and_close)
    second = CachedDataset(KnownImages(3), max_memory=MB)
    for fd in numbers:
        os.close(fd)

    assert second.cache.origin.created_s > first.cache.origin.created_s
    assert second[1][1] == 1


def test_an_owner_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Where /proc refuses, this process makes its own cache, and one line says so."""
    say_once.cache_clear()
    first = CachedDataset(KnownImages(3))

    def refuse(self: owners.Entry) -> Segment:
        raise SegmentError("its owner runs in a different PID namespace (container)")

    monkeypatch.setattr(owners.Entry, "attach", refuse)
    with caplog.at_level(logging.INFO, "fastload"):
        second = CachedDataset(KnownImages(3))

    assert second.cache.origin.created_s != first.cache.origin.created_s
    assert "it cannot be shared: its owner runs in a different PID namespace" in caplog.text


def test_a_closed_cache_is_not_found() -> None:
    """close() takes the entry back; what another object of this process holds stays found."""
    one, two = CachedDataset(KnownImages(3)), CachedDataset(KnownImages(3))
    one.cache.close()
    assert len(owners.entries()) == 1
    two.cache.close()

    assert owners.entries() == []


def test_live_caches_are_listed(start: Callable[..., Job]) -> None:
    """Each cache is listed once, with all who opened it by name, its key, parts and size."""
    ds = CachedDataset(Images(30), cache_key="photos", max_memory=64 * MB)
    other = start(fill, Images(30), "photos")
    other.answer()
    (live,) = registry.live_caches()

    assert sorted(live.owners) == sorted([os.getpid(), other.pid])
    assert (live.key, live.num_samples, live.num_cached) == ("photos", 30, 30)
    assert live.parts["num_samples"] == "30"
    assert live.nbytes == ds.cache.nbytes
    assert live.max_bytes == 64 * MB


def open_and_stop(dataset: Images) -> tuple[Any, Any]:
    """Take the creation lock, and stop with it."""
    lock = owners.creating()
    assert lock.__enter__()
    os.kill(os.getpid(), signal.SIGSTOP)
    return lock, None


def test_a_stopped_creator_delays_nobody_for_long(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a stopped process holds the creation lock, others make private caches after a short wait."""
    monkeypatch.setattr(owners, "_CREATION_WAIT_S", 0.01)
    job = start(open_and_stop, KnownImages(3))
    os.waitid(os.P_PID, job.pid, os.WSTOPPED)
    ds = CachedDataset(KnownImages(3))

    assert "so this one is private" in ds.cache.explain()
    assert ds[1][1] == 1


class Drawing(KnownImages):
    """Draws a number for each sample, and does not use it."""

    def sample(self, index: int) -> Any:
        np.random.default_rng()
        np.random.rand()
        torch.rand(1)
        return super().sample(index)


def test_attaching_to_a_cache_leaves_the_random_state_alone() -> None:
    """The rank that attaches reads sample 0 to compare it, and then draws what the other ranks draw."""
    first = CachedDataset(Drawing(4))
    first[0]
    np.random.seed(1)
    torch.manual_seed(1)
    expected = np.random.rand(), torch.rand(1).item()
    np.random.seed(1)
    torch.manual_seed(1)

    CachedDataset(Drawing(4))

    assert (np.random.rand(), torch.rand(1).item()) == expected


# --- the registry --------------------------------------------------------------------------------------


NUMBERS = st.integers(0, 2**63)


def registered(name: str, fd: int) -> Entry:
    entry = owners.register(name, fd)
    assert entry is not None
    return entry


@given(st.text("0123456789abcdef", min_size=1), st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS))
def test_an_entry_survives_its_file_name(name: str, numbers: tuple[int, int, int, int]) -> None:
    """What a file name states is what was put into it."""
    entry = Entry(name, *numbers)

    assert Entry.parse(entry.file_name) == entry


@given(st.text(max_size=40))
def test_other_files_are_no_entries(name: str) -> None:
    """Any text is an entry's file name, or none; it is never an error."""
    entry = Entry.parse(name)

    assert entry is None or entry.name == name.split(".")[0]


def test_entries_are_of_living_processes(registry: Path) -> None:
    """A dead owner's is removed; one of a later process with its number is none; a fork takes none back."""
    assert exit_codes(lambda: owners.register("a", 7)) == [0]
    assert len(os.listdir(registry)) == 1
    assert owners.entries("a") == []
    assert os.listdir(registry) == []
    entry = registered("a", 7)
    assert exit_codes(lambda: owners.unregister(entry)) == [0]
    assert owners.entries("a") == [entry]
    later = Entry("a", entry.pid, entry.started + 1, 7, entry.namespace)
    (registry / entry.file_name).rename(registry / later.file_name)
    assert owners.entries("a") == []


@pytest.mark.parametrize("fault", ["open to others", "a link", "a file"])
def test_a_directory_that_is_not_private_is_not_used(fault: str, registry: Path, caplog: Any) -> None:
    """Where others could write, nothing is registered and nothing believed, and one line says so."""
    if fault == "open to others":
        registry.mkdir()
        registry.chmod(0o755)
    elif fault == "a link":
        (registry.parent / "elsewhere").mkdir(0o700)
        registry.symlink_to(registry.parent / "elsewhere")
    else:
        registry.touch(0o600)
    with caplog.at_level(logging.WARNING, "fastload"):
        assert owners.register("a", 7) is None
        assert owners.entries("a") == []

    assert "is not a private directory of this user" in caplog.text


def test_an_owner_elsewhere_cannot_be_reached() -> None:
    """An owner in a different PID namespace counts as alive, and asking it for memory says why that fails."""
    entry = registered("a", 7)
    other = Entry("a", entry.pid, entry.started, 7, entry.namespace + 1)

    assert other.is_alive
    with pytest.raises(SegmentError, match="a different PID namespace"):
        other.attach()


def test_an_owner_that_cannot_be_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says why: the descriptor was closed, is of other memory, or may not be opened."""
    slot = Segment.create(1, name="fastload-slot")
    with contextlib.closing(slot), pytest.raises(SegmentError, match="is now /memfd:fastload-slot"):
        registered("a", slot.fd).attach()
    entry = registered("a", 9999)
    with pytest.raises(SegmentError, match="No such file or directory"):
        entry.attach()

    def refuse(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SegmentError, match=rf"process {os.getpid()} .*Permission denied"):
        entry.attach()


def test_links_in_the_registry_are_not_followed(registry: Path, caplog: Any) -> None:
    """A link in the place of the lock or of an entry is refused, and what it points to is left alone."""
    registry.mkdir(0o700)
    target = registry.parent / "target"
    (registry / "lock").symlink_to(target)
    with contextlib.closing(Segment.create(1)) as memory, caplog.at_level(logging.INFO, "fastload"):
        entry = registered("a", memory.fd)
        owners.unregister(entry)
        (registry / entry.file_name).symlink_to(target)
        again = owners.register("a", memory.fd)
        with owners.creating() as is_alone:
            pass

    assert (again, is_alone) == (None, False)
    assert caplog.text.count("Too many levels of symbolic links") == 2
    assert not target.exists()


def test_an_error_of_the_creator_is_its_own(registry: Path) -> None:
    """An OSError from the creation of a cache is not taken for one of the lock, which is given back."""
    with pytest.raises(OSError, match="mine"), owners.creating():
        raise OSError("mine")
    with owners.creating() as is_alone:
        assert is_alone


@pytest.mark.parametrize("fault", ["no directory", "no locks", "no list"])
def test_without_a_registry_there_are_no_entries(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Nobody may create a shared cache, and the log says why."""
    registered("a", 7)

    def refuse(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    if fault == "no directory":
        monkeypatch.setenv(owners.DIRECTORY_VARIABLE, "/proc/no/registry")  # each path is logged once
    else:
        monkeypatch.setattr(*((fcntl, "flock") if fault == "no locks" else (os, "listdir")), refuse)
    with caplog.at_level(logging.INFO, "fastload"), owners.creating() as is_alone:
        assert is_alone == (fault == "no list")
        assert len(owners.entries("a")) == (fault == "no locks")

    said = {
        "no directory": "no registry of shared caches at /proc/no/registry",
        "no locks": "cannot lock the registry",
    }
    assert said.get(fault, "Function not implemented") in caplog.text


def test_without_proc_there_is_no_registry(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Nothing is registered and nothing believed, and one line says why."""
    logs.say_once.cache_clear()
    real = os.stat

    def hide(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", hide)
    with caplog.at_level(logging.INFO, "fastload"), owners.creating() as is_alone:
        found = owners.register("a", 7), owners.entries("a"), is_alone

    assert found == (None, [], False)
    (record,) = caplog.records
    assert record.getMessage().endswith("it needs /proc, which does not exist")
