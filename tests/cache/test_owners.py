"""The registry of live owners: entries are hints, the directory is private, the lock delays nobody."""

from __future__ import annotations

import contextlib
import fcntl
import logging
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
from tests.cache.build_zoo import exit_codes

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

    assert "is not a directory of this user alone" in caplog.text


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
