"""The names of the files in DEST.partial: which are a build's, and which process writes a file.

Only files whose names a build gives are changed or removed. A process writes a file under a name of its own,
which tells the machine and the process, and the file gets its lasting name when it is complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import zlib
from pathlib import Path

from fastload.cache.lmdb.files import MANIFEST_NAME
from fastload.system.cgroups import read_text

PLAN_NAME = "plan.json"
_MAX_HOST_LETTERS = 64
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARD = r"\d{5,}-of-\d{5,}"
_WRITTEN = rf"plan\.json|{_SHARD}\.lmdb|{_SHARD}\.errors(-[0-9a-f]{{8}})?\.jsonl"
_SHARD_NAME = re.compile(rf"{_SHARD}\.lmdb")
_OWN_NAME = re.compile(
    rf"\.({_WRITTEN})\.[\w.]{{1,64}}-(?P<pid>\d{{1,20}})-(?P<machine>[0-9a-f]{{8}})(?P<build>[0-9a-f]{{8}})"
    r"[0-9a-f]{8}"
)
# The last two are those of a local copy of a cache in an object store; see `lmdb.copies`.
NAMES = re.compile(rf"{_WRITTEN}|{_OWN_NAME.pattern}|{re.escape(MANIFEST_NAME)}|{_SHARD}\.lmdb\.part")
_NOBODY = 0  # the process number of a file that its process left to the next build


def report_name(shard_file: str, left_out: list[tuple[int, int]] | None = None) -> str:
    """The name of the report of a shard: while it is written, or of the shard that leaves out these runs.

    Two processes that build one shard at the same time may leave out different samples. The checksum in the
    name ties the report to the shard that was kept.
    """
    stem = f"{shard_file.removesuffix('.lmdb')}.errors"
    if left_out is None:
        return f"{stem}.jsonl"
    return f"{stem}-{zlib.crc32(repr([tuple(run) for run in left_out]).encode('ascii')):08x}.jsonl"


def own_suffix(build_id: str) -> str:
    """The end of the names of this process's files in one build."""
    host = re.sub(r"[^\w]", "_", socket.gethostname(), flags=re.ASCII)[:_MAX_HOST_LETTERS] or "_"
    return f"{host}-{os.getpid()}-{_machine()}{_build(build_id)}{os.urandom(4).hex()}"


def left_name(name: str) -> str:
    """The name of a process's own file after the process has left it to the next build."""
    match = _OWN_NAME.fullmatch(name)
    if match is None:
        raise AssertionError(f"{name} is no process's own file")
    return f"{name[: match.start('pid')]}{_NOBODY}{name[match.end('pid') :]}"


def can_be_taken_over(name: str, shard_file: str, build_id: str) -> bool:
    """Whether a name is that of a shard of this build whose process, of this machine, has ended."""
    match = _OWN_NAME.fullmatch(name)
    if match is None or match[1] != shard_file or match["build"] != _build(build_id):
        return False
    return match["machine"] == _machine() and not _is_alive(match)


def is_written_here(name: str) -> bool:
    """Whether a name is that of a file that a live process of this machine writes."""
    match = _OWN_NAME.fullmatch(name)
    return match is not None and match["machine"] == _machine() and _is_alive(match)


def _is_alive(match: re.Match[str]) -> bool:
    if int(match["pid"]) == _NOBODY:
        return False
    try:
        os.kill(int(match["pid"]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # a process of another user
    return True


def _machine() -> str:
    """An id of this boot of this machine, and of the process numbers in this container."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return f"{zlib.crc32(f'{socket.gethostname()} {read_text(_BOOT_ID)} {numbers}'.encode()):08x}"


def _build(build_id: str) -> str:
    return f"{zlib.crc32(build_id.encode()):08x}"


# --- foreign files ---------------------------------------------------------------------------------------


def foreign_part(path: str) -> str | None:
    """The path of a file or directory at PATH that no build made; None if a build made all of them.

    A build leaves a directory of regular files with certain names.
    """
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return path
        with os.scandir(path) as entries:
            for entry in entries:
                is_ours = NAMES.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
                if not is_ours and os.path.lexists(entry.path):  # else it was removed just now
                    return entry.path
    except FileNotFoundError:
        pass  # another process removed the directory just now
    return None


def remove_all_but_shards(directory: str) -> None:
    """Remove from the directory of a finished cache the other files that its build made."""
    for name in os.listdir(directory):
        if NAMES.fullmatch(name) and not _SHARD_NAME.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))
