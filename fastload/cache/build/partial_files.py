"""The names of the files in DEST.partial, how they are written and read, and which files are foreign.

Rules:

1. A file that other processes read gets its name when its content is complete and on the disk.
2. Only files whose names a build gives are changed or removed (see `foreign_part`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastload.batch.failed_sample import FailedSample
from fastload.cache.lmdb.description import FORMAT_VERSION, Description, Plan, parse_json
from fastload.cache.lmdb.files import MANIFEST_NAME
from fastload.cache.lmdb.format import read_description
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError
from fastload.system.disk import sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterable

PLAN_NAME = "plan.json"
_REPORTED = ("index", "path", "type", "reason", "worker")  # fields of a line for a sample that was left out
_SHARD = r"\d{5,}-of-\d{5,}"
_WRITTEN = rf"plan\.json|{_SHARD}\.lmdb|{_SHARD}\.errors-[0-9a-f]{{8}}\.jsonl"
_SHARD_NAME = re.compile(rf"{_SHARD}\.lmdb")
# A file that one process writes, and that gets its lasting name when it is complete; see `unfinished_shards`.
OWN_NAME = re.compile(
    rf"\.({_WRITTEN})\.[\w.]{{1,64}}-(?P<pid>\d{{1,20}})-(?P<machine>[0-9a-f]{{8}})[0-9a-f]{{8}}"
)
# The last two are those of a local copy of a cache in an object store; see `lmdb.copies`.
NAMES = re.compile(
    rf"(plan\.json|errors\.jsonl)(\.new)?|{_WRITTEN}|{OWN_NAME.pattern}"
    rf"|{re.escape(MANIFEST_NAME)}(\.new)?|{_SHARD}\.lmdb\.part"
)
_LOOKS, _LOOK_AGAIN_S = 20, 0.01  # for a file that another process gives another name


def foreign_part(path: str) -> str | None:
    """The path of a file or directory at PATH that no build made; None if a build made all of them.

    A build leaves a directory of regular files with certain names. A file has two of these names while a
    process replaces one by the other.
    """
    for attempt in range(_LOOKS):
        if attempt:
            time.sleep(_LOOK_AGAIN_S)
        found, may_pass = _look_for_foreign(path)
        if not may_pass:
            break
    return found


def _look_for_foreign(path: str) -> tuple[str | None, bool]:
    """A foreign file, and whether it may be a file of a build that is getting another name now."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return path, False
    except FileNotFoundError:
        return None, False
    paths: dict[tuple[int, int], list[str]] = {}
    num_names: dict[tuple[int, int], int] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # another process removed it just now
            if not stat.S_ISREG(status.st_mode) or not NAMES.fullmatch(entry.name):
                return entry.path, False
            file = status.st_dev, status.st_ino
            paths.setdefault(file, []).append(entry.path)
            num_names[file] = status.st_nlink
    for file, names in paths.items():
        if num_names[file] > len(names):
            return names[0], True
    return None, False


def finished_shard(path: str, plan: Plan, shard: int) -> Description | None:
    """The description of the file at `path`, if it is this shard of this build, complete and on the disk."""
    try:
        found = read_description(path)
    except (FileNotFoundError, CacheCorruptError, CacheMismatchError):
        return None
    return found if (found.plan.build_id, found.shard) == (plan.build_id, shard) else None


def plan_text(plan: Plan, **more: Any) -> str:
    """The content of `plan.json`."""
    return json.dumps({"version": FORMAT_VERSION, "plan": asdict(plan), **more})


def read_plan_file(directory: str) -> dict[str, Any] | None:
    """The fields in `plan.json`; None without the file, an empty dict if it does not contain fields."""
    try:
        fields = parse_json(Path(directory, PLAN_NAME).read_text(errors="replace"))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def is_sharded(fields: dict[str, Any] | None) -> bool:
    """Whether a plan is that of a build in which several processes build one shard each."""
    return fields is not None and fields.get("sharded") is True


def remove_all_but_shards(directory: str) -> None:
    """Remove from the directory of a finished cache the other files that its build made."""
    for name in os.listdir(directory):
        if NAMES.fullmatch(name) and not _SHARD_NAME.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))


def report_text(samples: Iterable[FailedSample]) -> str:
    """The report about samples that were left out: a line of JSON for each."""
    return "".join(map(_line, samples))


def read_report(path: str) -> list[FailedSample]:
    """The samples in the report at a path; a report that does not exist is empty."""
    try:
        return parse_report(Path(path).read_text(errors="replace"))
    except FileNotFoundError:
        return []


def parse_report(text: str) -> list[FailedSample]:
    """The samples in a report; damaged lines are left out."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            sample = FailedSample(**parse_json(line))
            if type(sample.index) is int:
                found.append(sample)
    return found


def _line(sample: FailedSample) -> str:
    return json.dumps({name: getattr(sample, name) for name in _REPORTED}) + "\n"


def replace_whole(path: str, text: str, new: str) -> None:
    """Replace a file atomically: it is seen with all of its content or not at all, also after power failure.

    Args:
        path: The file.
        text: Its content.
        new: The path where the content is written first; an older file of ours there is removed, not reused.
    """
    _write_new(new, text)
    os.replace(new, path)
    sync_directory(os.path.dirname(path))


def create_whole(path: str, text: str, new: str) -> bool:
    """Create a file with all of its content; returns False, and changes nothing, if the file exists.

    This is atomic among all machines that share the file system: one of several processes succeeds. The
    arguments are those of `replace_whole`.

    Raises:
        CacheError: The file system makes no hard links.
    """
    try:
        _write_new(new, text)
        is_new = link_new(new, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
    sync_directory(os.path.dirname(path))
    return is_new


def link_new(source: str, path: str, *, directory_fd: int | None = None) -> bool:
    """Give a file a second name; returns False if a file has that name already.

    Args:
        source: Its first name.
        path: Its second name.
        directory_fd: The open directory in which both names are; None for paths.

    Raises:
        CacheError: The file system makes no hard links.
    """
    try:
        os.link(source, path, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        raise CacheError(
            f"cannot write the cache {path}: the file system does not make hard links "
            f"({error.strerror}), by which processes agree on one plan: give a path on another file system"
        ) from error
    return True


def _write_new(path: str, text: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with open(path, "x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
