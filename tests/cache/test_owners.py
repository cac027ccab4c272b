"""The registry of live owners: entries are hints, the directory is private, the lock delays nobody."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.cache.ram import owners
from fastload.cache.ram.layout import SEGMENT_NAME
from fastload.cache.ram.owners import Entry
from fastload.errors import SegmentError
from fastload.memory.segment import Segment
from fastload.system import logs

if TYPE_CHECKING:
    from pathlib import Path

NUMBERS = st.integers(0, 2**63)


pytestmark = pytest.mark.usefixtures("registry")


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


def test_entries_are_found_by_name() -> None:
    """A process that registered is found under that name alone, until it takes the entry back."""
    entry = registered("a", 7)
    registered("b", 8)

    assert owners.entries("a") == [entry]
    assert len(owners.entries()) == 2
    owners.unregister(entry)
    assert owners.entries("a") == []


def test_dead_owners_are_removed(registry: Path) -> None:
    """An entry whose process has ended is gone after the next look."""
    child = multiprocessing.get_context("fork").Process(target=owners.register, args=("a", 7))
    child.start()
    child.join()
    child.close()
    before = os.listdir(registry)

    assert len(before) == 1
    assert owners.entries("a") == []
    assert os.listdir(registry) == []


def test_a_later_process_of_the_same_number_is_another(registry: Path) -> None:
    """An entry is of the process that began when it says, not of one that has its number now."""
    entry = registered("a", 7)
    (registry / entry.file_name).rename(
        registry / Entry("a", entry.pid, entry.started + 1, 7, entry.namespace).file_name
    )

    assert owners.entries("a") == []


def test_a_fork_takes_nothing_back() -> None:
    """A forked child that runs its parent's finalizers leaves the parent's entry alone."""
    entry = registered("a", 7)
    child = multiprocessing.get_context("fork").Process(target=owners.unregister, args=(entry,))
    child.start()
    child.join()
    child.close()

    assert owners.entries("a") == [entry]


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

    assert "is not a directory of this user alone" in caplog.text


def test_a_directory_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Without a registry there are no entries, and the log says why."""
    monkeypatch.setenv(owners.DIRECTORY_VARIABLE, "/proc/no/registry")  # each path is logged once a process
    with caplog.at_level(logging.INFO, "fastload"), owners.creating() as is_alone:
        assert not is_alone
        assert owners.register("a", 7) is None

    assert "no registry of shared caches at /proc/no/registry" in caplog.text


def test_one_creator_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one creates, another is told that it may not, and after that it may."""
    monkeypatch.setattr(owners, "_CREATION_WAIT_S", 0.01)
    with owners.creating() as first, owners.creating() as second:
        assert (first, second) == (True, False)
    with owners.creating() as third:
        assert third


def test_an_owner_elsewhere_cannot_be_reached() -> None:
    """An owner in another PID namespace counts as alive, and asking it for memory says why that fails."""
    entry = registered("a", 7)
    other = Entry("a", entry.pid, entry.started, 7, entry.namespace + 1)

    assert other.is_alive
    with pytest.raises(SegmentError, match="another PID namespace"):
        other.attach()


def test_an_owner_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner whose descriptors may not be opened is named, with the system's reason."""
    entry = registered("a", 7)

    def refuse(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SegmentError, match=rf"process {os.getpid()} .*Permission denied"):
        entry.attach()


def test_a_descriptor_that_is_gone() -> None:
    """An entry whose descriptor was closed is stale."""
    with pytest.raises(SegmentError, match="No such file or directory"):
        registered("a", 9999).attach()


def test_a_descriptor_of_other_memory_is_stale() -> None:
    """Only memory of a cache is opened, not a slot of batches or a library's."""
    slot = Segment.create(1, name="fastload-slot")
    with contextlib.closing(slot), pytest.raises(SegmentError, match="is now /memfd:fastload-slot"):
        registered("a", slot.fd).attach()


def test_the_memory_of_a_cache_is_attached() -> None:
    """The segment that the owner holds, through a descriptor of one's own."""
    memory = Segment.create(1, name=SEGMENT_NAME)
    with contextlib.closing(memory), contextlib.closing(registered("a", memory.fd).attach()) as attached:
        assert attached.fd != memory.fd
        assert os.path.samestat(os.fstat(attached.fd), os.fstat(memory.fd))


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


def test_refused_locks_mean_no_registry(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Where flock(2) is refused no process may create a shared cache, and the log says why."""

    def refuse(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.INFO, "fastload"), owners.creating() as is_alone:
        assert not is_alone

    assert "cannot lock the registry" in caplog.text
    assert "Function not implemented" in caplog.text


def test_an_error_of_the_creator_is_its_own(registry: Path) -> None:
    """An OSError from the creation of a cache is not taken for one of the lock, which is given back."""
    with pytest.raises(OSError, match="mine"), owners.creating():
        raise OSError("mine")
    with owners.creating() as is_alone:
        assert is_alone


def test_a_registry_that_cannot_be_listed_has_no_entries(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """As in a process that has no descriptor left; the log says why."""
    registered("a", 7)

    def refuse(*_: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "listdir", refuse)
    with caplog.at_level(logging.INFO, "fastload"):
        assert owners.entries("a") == []

    assert "Too many open files" in caplog.text


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
