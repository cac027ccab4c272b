"""identity: equal for equal bytes alone, and asking never raises."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import socket
import tarfile
import tempfile
import time
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.readers import identity
from fastload.readers.identity import (
    Identity,
    digest,
    identify_content,
    identify_descriptor,
    identify_path,
    identify_stream,
)
from fastload.readers.reasons import NOT_A_FILE, TOO_LARGE, TOO_NEW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    return path


@pytest.fixture
def mounted_as(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Call it with a kind of file system: all mounts are of that kind in this test."""
    mounts = Path("/proc/self/mountinfo").read_text()

    def pretend(kind: str, options: str = "rw") -> None:
        fake = tmp_path / "mountinfo"
        fake.write_text(re.sub(r" - \S+ (\S+) .*", rf" - {kind} \1 {options}", mounts))
        monkeypatch.setattr(identity, "_MOUNTS", fake)
        identity._file_systems.clear()

    yield pretend
    identity._file_systems.clear()


@pytest.mark.usefixtures("settled")
def test_a_path_a_stream_and_a_descriptor_agree(path: Path) -> None:
    """A file has one identity, however it is asked for, and from any position."""
    expected = identify_path(path)
    assert isinstance(expected, Identity)
    assert identify_path(str(path)) == identify_path(os.fsencode(path)) == expected
    with path.open("rb") as buffered, io.FileIO(path) as raw:
        buffered.read(3)
        assert identify_stream(buffered) == identify_stream(raw) == expected
        assert buffered.tell() == 3
        assert identify_descriptor(raw.fileno()) == expected


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"another"),
        lambda path: _replace(path, b"content"),
        lambda path: os.link(path, path.with_name("link")),
        lambda path: path.chmod(0o600),
        lambda path: os.utime(path, (1, 1)),
        lambda path: path.rename(path.with_name("other")).rename(path),
    ],
    ids=["written", "replaced", "linked", "chmod", "touched", "renamed"],
)
def test_a_change_ends_an_identity(path: Path, change: Callable[[Path], Any]) -> None:
    """Whatever touches a file gives it another identity, though its size and mtime are as before."""
    os.utime(path, (1e9, 1e9))
    _wait_for_tick(path)
    before = identify_path(path)
    change(path)
    os.utime(path, (1e9, 1e9))
    assert isinstance(before, Identity)
    assert identify_path(path) != before


def _replace(path: Path, content: bytes) -> None:
    other = path.with_name("new")
    other.write_bytes(content)
    other.replace(path)


def _wait_for_tick(path: Path) -> None:
    """Wait until a change would get a later ctime: clocks of file systems tick each few milliseconds."""
    probe, before = path.with_name("probe"), path.stat().st_ctime_ns
    while True:
        probe.write_bytes(b"")
        if probe.stat().st_ctime_ns > before:
            return
        probe.unlink()


@pytest.mark.usefixtures("settled")
def test_a_time_in_the_future_never_becomes_old(path: Path) -> None:
    """A file of the future has no identity, and a reason of its own."""
    os.utime(path, (time.time() + 3600,) * 2)
    assert identify_path(path) is TOO_NEW


@pytest.mark.parametrize(("kind", "seconds"), [("nfs4", 59), ("fuse.sshfs", 59), ("9p", 59), ("ext4", 1)])
def test_files_of_servers_settle_later(
    path: Path, mounted_as: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, kind: str, seconds: int
) -> None:
    """Times of a server count as settled after a minute, those of a local disk after two seconds."""
    os.utime(path, (1e9, 1e9))  # ctime counts
    mounted_as(kind)
    now_ns = path.stat().st_ctime_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + seconds * 10**9)
    assert identify_path(path) is TOO_NEW
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + (seconds + 1) * 10**9)
    assert isinstance(identify_path(path), Identity)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "9p", "overlay", "cifs", "made_up"])
def test_where_inodes_do_not_last_path_and_mount_count(
    path: Path, mounted_as: Callable[..., None], kind: str
) -> None:
    """Elsewhere than on disks that keep inodes, a link or another mount is another file."""
    link = path.with_name("link")
    os.link(path, link)
    mounted_as(kind)
    identities = [identify_path(path), identify_path(link)]
    mounted_as(kind, "rw,other")
    identities.append(identify_path(path))
    assert all(isinstance(one, Identity) for one in identities)
    assert len(set(identities)) == 3


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs"])
def test_where_inodes_last_paths_do_not_count(
    path: Path, mounted_as: Callable[[str], None], kind: str
) -> None:
    """A file that is opened by two links is one file."""
    link = path.with_name("link")
    os.link(path, link)
    mounted_as(kind)
    assert identify_path(path) == identify_path(link)


@pytest.mark.usefixtures("settled")
def test_without_proc_no_inode_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the mounts are not known, the path and the long wait count."""
    monkeypatch.setattr(identity, "_MOUNTS", path.with_name("none"))
    known = identify_path(path)
    assert isinstance(known, Identity)
    assert str(path) in known.parts


@pytest.mark.usefixtures("settled")
def test_a_symbolic_link_that_is_switched_is_another_file(path: Path) -> None:
    """What a link leads to now is what is identified."""
    other, link = path.with_name("other"), path.with_name("link")
    other.write_bytes(b"another")
    link.symlink_to(path)
    before = identify_path(link)
    link.unlink()
    link.symlink_to(other)
    assert identify_path(link) == identify_path(other) != before


def _tar(path: Path) -> Any:
    with tarfile.open(path.with_name("tar"), "w") as archive:
        archive.add(path)
    return tarfile.open(path.with_name("tar")).extractfile(str(path).lstrip("/"))


def _zip(path: Path) -> Any:
    with zipfile.ZipFile(path.with_name("zip"), "w") as archive:
        archive.write(path, "member")
    return zipfile.ZipFile(path.with_name("zip")).open("member")


def _gzip(path: Path) -> Any:
    with gzip.open(path.with_name("gz"), "wb") as file:
        file.write(b"content")
    return gzip.open(path.with_name("gz"))


def _spooled(path: Path) -> Any:
    file = tempfile.SpooledTemporaryFile()  # noqa: SIM115
    file.write(path.read_bytes())
    file.rollover()
    file.seek(0)
    return file


class _Offset(io.FileIO):
    """A file that begins elsewhere."""


def _pipe(path: Path) -> Any:
    read, write = os.pipe()
    os.close(write)
    return os.fdopen(read, "rb", buffering=0)


def _socket(path: Path) -> Any:
    one, other = socket.socketpair()
    other.close()
    return _Both(one.makefile("rb"), one)


class _Both:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def close(self) -> None:
        for part in self.parts:
            part.close()


STREAMS: dict[str, Callable[[Path], Any]] = {
    "tar": _tar,
    "zip": _zip,
    "gzip": _gzip,
    "spooled": _spooled,
    "pipe": _pipe,
    "socket": _socket,
    "named": lambda path: tempfile.NamedTemporaryFile(),  # noqa: SIM115
    "written": lambda path: path.open("r+b"),
    "text": lambda path: path.open(),
    "bytes": lambda path: io.BytesIO(b"content"),
    "subclass": lambda path: _Offset(path),
    "subclass below": lambda path: io.BufferedReader(_Offset(path)),
    "directory": lambda path: _Descriptor(os.open(path.parent, os.O_RDONLY)),
    "device": lambda path: Path("/dev/zero").open("rb"),  # noqa: SIM115
}


class _Descriptor:
    def __init__(self, number: int) -> None:
        self.number = number

    def fileno(self) -> int:
        return self.number

    def close(self) -> None:
        os.close(self.number)


@pytest.mark.usefixtures("settled")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("name", STREAMS)
def test_only_a_plain_file_is_identified_by_its_descriptor(path: Path, name: str) -> None:
    """The descriptor of anything but exactly a plain file may be that of a different file."""
    stream = STREAMS[name](path)
    try:
        assert identify_stream(stream) is NOT_A_FILE
    finally:
        stream.close()


@pytest.mark.usefixtures("settled")
def test_a_closed_stream_is_no_error(path: Path) -> None:
    """A stream that was closed, or whose descriptor was, has no identity."""
    with path.open("rb") as stream, io.FileIO(path) as raw:
        os.close(raw.fileno())
        assert identify_stream(raw) is NOT_A_FILE
        os.dup2(stream.fileno(), raw.fileno())
    assert identify_stream(stream) is NOT_A_FILE
    assert identify_stream(raw) is NOT_A_FILE
    assert identify_descriptor(-1) is NOT_A_FILE


PATHS: list[Any] = [
    *(None, 3, "", "\0", b"\0", "/nonexistent/file", "\udcff", "x" * 5000, ["a"], io.BytesIO()),
]


@pytest.mark.parametrize("source", PATHS, ids=range(len(PATHS)))
def test_what_is_no_path_is_no_error(source: Any) -> None:
    """Asking for the identity of anything at all never raises."""
    assert isinstance(identify_path(source), str)
    assert isinstance(identify_stream(source), str)


def test_special_files_are_not_opened(tmp_path: Path) -> None:
    """Asking about a directory, a named pipe or a device neither waits nor reads."""
    os.mkfifo(tmp_path / "pipe")
    for path in tmp_path / "pipe", tmp_path, "/dev/zero":
        assert identify_path(path) is NOT_A_FILE


def test_content_is_known_by_its_sha_256() -> None:
    """On every processor: caches on disk move from one to another."""
    assert identify_content(b"bytes") == Identity((hashlib.sha256(b"bytes").digest(), 5))


def test_a_released_buffer_is_no_error() -> None:
    """A view that was released has no identity, and a bytearray can be resized after it was asked for."""
    view = memoryview(b"bytes")
    view.release()
    assert identify_content(view) is NOT_A_FILE
    buffer = bytearray(b"bytes")
    identify_content(buffer)
    buffer.append(1)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(st.text(), parts, max_size=2)
    ),
    max_leaves=5,
)


@given(VALUES, VALUES)
def test_keys_are_equal_for_equal_values_alone(one: Any, other: Any) -> None:
    """A key tells types, signs of zero and nesting apart."""
    assert (digest(one) == digest(other)) == (repr(one) == repr(other))
    assert digest(one, other) != digest((one, other))


class _Lies(str):
    def __repr__(self) -> str:
        return "'lies'"


_ENDLESS: list[Any] = []
_ENDLESS.append(_ENDLESS)
_ODD = [np.int64(1), _Lies("a"), Ellipsis, {1}, (1, [{2: {"a": (Ellipsis,)}}]), {_Lies("a"): 1}, _ENDLESS]


@pytest.mark.parametrize("value", [*_ODD, np.zeros(2), OrderedDict(a=1), 10**5000], ids=lambda _: "")
def test_values_of_other_types_have_no_key(value: Any) -> None:
    """What a repr might not tell apart, or does not give, is no part of a key, at any depth."""
    assert digest("a", value) is None
    assert digest("a", [value]) is None
    assert digest("a", {"b": (value,)}) is None


@pytest.mark.parametrize(
    ("ctime_ns", "kind", "options", "expected"),
    [
        (5_000_000_001, "ext4", "rw", True),
        (5_000_000_000, "ext4", "rw", False),
        (5_000_000_001, "squashfs", "ro", True),
        (5_000_000_000, "squashfs", "ro,errors=continue", False),
        (5_000_000_000, "fuse.s3fs", "rw,user_id=0", True),
        (5_000_000_000, "", "", False),
    ],
)
def test_whole_seconds_are_told_from_a_kernels_times(
    ctime_ns: int, kind: str, options: str, expected: bool
) -> None:
    """By the time, and by the mount where the file system is not one of finer times."""
    mount = kind and f"36 35 7:0 / /a ro - {kind} /dev/x {options}"
    file_system = identity._FileSystem(kind == "ext4", 0, mount, 0)
    assert identity._has_own_times(ctime_ns, file_system) == expected


@pytest.fixture
def chosen_times(monkeypatch: pytest.MonkeyPatch, settled: None) -> None:
    """All files have times that whoever made a disk image chose."""
    real = identity._facts
    monkeypatch.setattr(identity, "_facts", lambda stat: (*real(stat)[:3], 0, 0, real(stat)[-1]))
    monkeypatch.setattr(identity, "_contents", {})


@pytest.mark.usefixtures("chosen_times")
def test_a_file_with_chosen_times_is_its_content(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is hashed once for each mount, as another disk image can have equal times."""
    before = identify_path(path)
    assert isinstance(before, Identity)
    assert before.is_of_content
    assert before != identify_content(b"content")  # libraries leave a stream in another state
    path.write_bytes(b"another")
    assert identify_path(path) == before  # as is inherent in equal times

    real = identity._file_system_of
    monkeypatch.setattr(identity, "_file_system_of", lambda fd: real(fd)._replace(mount="another"))
    identity._file_systems.clear()
    assert identify_path(path) != before
    identity._file_systems.clear()


@pytest.mark.usefixtures("chosen_times")
def test_a_large_file_with_chosen_times_is_not_hashed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be read in whole by each process."""
    monkeypatch.setattr(identity, "MAX_FILE_BYTES", 3)
    assert identify_path(path) is TOO_LARGE


def test_a_stream_is_fresh_until_it_gives_something_else_than_its_file(path: Path) -> None:
    """Read-ahead counts if the file has the same bytes still; another position, and old bytes, do not."""
    with path.open("rb") as stream, path.open("rb", buffering=0) as raw:
        assert identity.is_fresh(stream)
        assert identity.is_fresh(raw)
        stream.read(3)
        assert not identity.is_fresh(stream)
        stream.seek(0)
        assert identity.is_fresh(stream)
        path.write_bytes(b"another")
        assert not identity.is_fresh(stream)
        assert identity.is_fresh(raw)
        os.lseek(stream.fileno(), 5, os.SEEK_SET)
        assert not identity.is_fresh(stream)
    assert not identity.is_fresh(stream)
    assert not identity.is_fresh(object())
