"""The directory of an unfinished cache, DEST.partial: its plan, its finished shards, and their reports.

One build at a time works in it, and holds the lock of the destination, as the removal of a cache does. Tasks
of the build's executor write shards there, also on other machines that share the file system. Rules:

1. A process writes each file under a temporary name, syncs it, and renames it. A shard with its final name is
   finished. A process that dies loses only the shard that it is writing.
2. A later build follows the plan that it finds; `fastload cache rm` removes a plan.
3. The report about the samples that a shard leaves out is complete before the shard gets its name. A shard
   whose report does not fit it is built again.
4. On a file system without locks, two builds can work here at once. A shard of another plan does not count,
   and of two shards of one plan the last one wins.
5. Only files with names that a build gives are changed or removed.
6. The lock ends with the process that holds it, and forked workers do not hold it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import re
import stat
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fastload.batch.failures import FailedSample
from fastload.cache.build.writer import writing
from fastload.cache.lmdb.description import (
    FORMAT_VERSION,
    parse_plan,
    parse_versioned,
    why_different,
)
from fastload.cache.lmdb.files import PARTIAL_SUFFIX, open_file, shard_name
from fastload.errors import CacheBusyError, CacheCorruptError, CacheError, CacheMismatchError
from fastload.system.disk import sync_directory, write_new
from fastload.system.humanize import fastload_command, readable_size
from fastload.system.locks import is_lock_file_held, is_lock_file_held_here, lock_file
from fastload.system.logs import log
from fastload.system.ranks import are_several_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.cache.lmdb.description import Plan

REPORT = ".errors.jsonl"  # the end of the name of a cache's report, beside the cache
_REPORTED = ("index", "path", "type", "reason", "worker")
_PLAN_NAME = "plan.json"
_SHARD = r"\d{5,}-of-\d{5,}"
_LASTING = rf"plan\.json|{_SHARD}\.lmdb|{_SHARD}\.errors\.jsonl"
NAMES = re.compile(rf"{_LASTING}|\.({_LASTING})\.[0-9a-f]{{16}}")  # the second is a file being written
_SHARD_NAME = re.compile(rf"{_SHARD}\.lmdb")
_POLL_S = 0.2
_LOG_POLLS = 50
_sleep = time.sleep
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class StagingDirectory:
    """The directory of an unfinished cache.

    Args:
        destination: The path of the finished cache.

    Attributes:
        path: The directory.
        plan: The plan that all processes follow; see `begin` and `open`.
    """

    plan: Plan

    def __init__(self, destination: str) -> None:
        self.path = destination + PARTIAL_SUFFIX
        self._destination = destination
        self._remove = fastload_command("cache", "rm", destination)

    # --- the plan -----------------------------------------------------------------------------------------

    def open(self) -> bool:
        """Read the plan; returns False if there is none.

        Raises:
            CacheMismatchError: The plan is damaged, or from a different release.
            CacheError: The directory contains files that no build made.
        """
        with writing(self.path):
            foreign = foreign_part(self.path)
        if foreign is not None:
            raise CacheError(
                f"{foreign} is not from a build of fastload, which keeps unfinished caches at {self.path}, "
                "and was not changed: move it away, or use a different path for the cache"
            )
        try:
            with writing(self.path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                fields = parse_versioned(Path(self.path, _PLAN_NAME).read_bytes())
                self.plan = parse_plan(fields.get("plan"))
                return True
        except ValueError as error:  # CacheMismatchError is a ValueError
            raise CacheMismatchError(
                f"{self.path}/{_PLAN_NAME} is damaged, or from a different release ({error}): remove it with "
                f"{self._remove}, and build again"
            ) from error
        return False

    def begin(self, plan: Plan) -> None:
        """Follow the plan in the directory, which becomes this one if there is none.

        Files that killed processes left unfinished are removed.

        Raises:
            CacheMismatchError: The directory belongs to a build of other samples or settings.
            CacheError: The directory contains files that no build made, or cannot be written.
        """
        if not self.open():
            with writing(self.path):
                os.makedirs(self.path, exist_ok=True)
                own = self.own_path(_PLAN_NAME)
                write_new(own, json.dumps({"version": FORMAT_VERSION, "plan": asdict(plan)}).encode())
                os.rename(own, os.path.join(self.path, _PLAN_NAME))
                sync_directory(self.path)
            self.plan = plan
        self.check(plan)
        with writing(self.path):
            _remove(self.path, lambda name: name.startswith("."))

    def check(self, plan: Plan) -> None:
        """Check that a process that would make this plan can follow that of the directory.

        Raises:
            CacheMismatchError: Its samples or settings are different.
        """
        why = why_different(self.plan, plan)
        if why is not None:
            raise CacheMismatchError(
                f"{self.path} belongs to a different build: {why} (here: this process, there: the build). "
                "Nothing was changed: build with its samples and settings, use a different path, or remove "
                f"it with {self._remove}"
            )

    def remove_unused(self) -> None:
        """Remove the directory if it holds only the plan."""
        with contextlib.suppress(OSError):
            if os.listdir(self.path) == [_PLAN_NAME]:
                os.unlink(os.path.join(self.path, _PLAN_NAME))
            os.rmdir(self.path)

    # --- shards -------------------------------------------------------------------------------------------

    def path_of(self, shard: int) -> str:
        """The path of a finished shard."""
        return os.path.join(self.path, shard_name(self.plan, shard))

    def own_path(self, name: str) -> str:
        """A new temporary path for a file that gets this name."""
        return os.path.join(self.path, f".{name}.{os.urandom(8).hex()}")

    def finished(self, shard: int) -> list[FailedSample] | None:
        """The samples that a finished shard leaves out; None if the shard is not finished."""
        path = self.path_of(shard)
        try:
            file = open_file(path)
        except (FileNotFoundError, CacheCorruptError, CacheMismatchError):
            return None
        if (file.plan.build_id, file.shard) != (self.plan.build_id, shard):
            return None
        left_out = file.left_out_indices.tolist()
        report = read_report(_report_name(path)) if left_out else []
        # Without its report the shard is rebuilt, so no sample is left out without a reason.
        return report if [sample.index for sample in report] == left_out else None

    def complete(self, shard: int, own: str, left_out: list[FailedSample]) -> None:
        """Give a shard that this process has written at `own` its final name."""
        path = self.path_of(shard)
        with writing(self.path):
            if left_out:
                self._write_report(left_out, _report_name(path))
            os.rename(own, path)
            sync_directory(self.path)

    # --- the end ------------------------------------------------------------------------------------------

    def write_report(self, left_out: list[FailedSample]) -> None:
        """Write the report beside the destination; its samples are in order."""
        with writing(self._destination):
            self._write_report(left_out, self._destination + REPORT)

    def publish(self, left_out: list[FailedSample]) -> None:
        """Move the finished cache to its destination, after placing its report beside it.

        Args:
            left_out: All left-out samples, by ascending index.
        """
        destination = self._destination
        if os.path.lexists(destination):
            raise self._taken()
        with writing(destination):
            if left_out:
                self._write_report(left_out, destination + REPORT)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(destination + REPORT)  # the report of an older cache
            if self.plan.num_shards > 1:
                os.rename(self.path, destination)
                _remove_all_but_shards(destination)
            else:
                self._move_shard(destination)
                _remove_all_but_shards(self.path)
                with contextlib.suppress(OSError):  # another program has put a file there
                    os.rmdir(self.path)
            sync_directory(os.path.dirname(destination))

    def _move_shard(self, destination: str) -> None:
        shard = self.path_of(0)
        try:
            os.link(shard, destination)  # unlike a rename, it replaces no file that came meanwhile
        except FileExistsError:
            raise self._taken() from None
        except OSError:  # a file system without hard links
            os.rename(shard, destination)
        else:
            os.unlink(shard)

    def _taken(self) -> CacheError:
        path = self._destination
        return CacheError(
            f"another program created {path} while the cache was built; it was not changed. The finished "
            f"cache is kept at {self.path}: move {path} away, and build again"
        )

    def _write_report(self, left_out: list[FailedSample], path: str) -> None:
        own = self.own_path(_report_name(shard_name(self.plan, 0)))
        lines = [json.dumps({name: getattr(sample, name) for name in _REPORTED}) for sample in left_out]
        write_new(own, "".join(f"{line}\n" for line in lines).encode())
        os.replace(own, path)


def foreign_part(path: str) -> str | None:
    """The path of a file or directory at PATH that no build made; None if a build made all of them.

    A build leaves a directory of regular files with known names.
    """
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return path
        with os.scandir(path) as entries:
            for entry in entries:
                is_known = NAMES.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
                if not is_known and os.path.lexists(entry.path):  # else it was removed just now
                    return entry.path
    except (FileNotFoundError, NotADirectoryError):
        pass  # another process might have just removed the directory
    return None


def _remove_all_but_shards(directory: str) -> None:
    _remove(directory, lambda name: not _SHARD_NAME.fullmatch(name))


def _remove(directory: str, is_useless: Callable[[str], bool]) -> None:
    """Remove files of a build, chosen by their names."""
    for name in os.listdir(directory):
        if NAMES.fullmatch(name) and is_useless(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))


# --- reports ----------------------------------------------------------------------------------------------


def _report_name(shard_file: str) -> str:
    """The path of the report about the samples that a shard leaves out."""
    return shard_file.removesuffix(".lmdb") + REPORT


def read_report(path: str) -> list[FailedSample]:
    """The samples in the report at a path, without damaged lines; none if there is no report."""
    samples = []
    with contextlib.suppress(FileNotFoundError):
        for line in Path(path).read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                sample = FailedSample(**json.loads(line))
                if type(sample.index) is int:
                    samples.append(sample)
    return samples


# --- the lock ---------------------------------------------------------------------------------------------


def lock_name(path: str) -> str:
    """The path of the lock file of a destination; no other program uses this name."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.fastload-lock")


@contextlib.contextmanager
def only_builder(path: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock on a destination.

    On a file system without locks nothing is locked, and a log line says so: rule 4 keeps the files safe.

    Args:
        path: The path of the cache.
        wait: Wait for a builder in another process. A thread of this process is never waited for, because it
            can be this one.

    Raises:
        CacheBusyError: Another builder holds it.
        CacheError: The lock file cannot be made.
    """
    name = lock_name(path)
    for attempt in itertools.count():
        with contextlib.ExitStack() as stack:
            with writing(path):
                try:
                    has_lock = stack.enter_context(lock_file(name))
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name)
                    log.info("%s: not locked, because this file system does not have locks", path)
                    has_lock = True
            if has_lock:
                yield
                return
        is_own = is_lock_file_held_here(name)
        busy = f"{path} is being built by {'another thread' if is_own else _holder(name)}"
        if is_own or not wait:
            raise CacheBusyError(f"{busy}: wait until it has finished")
        if attempt % _LOG_POLLS == 0:
            level = logging.INFO if attempt or are_several_ranks() else logging.WARNING
            written = readable_size(_num_bytes(path + PARTIAL_SUFFIX))
            log.log(level, "this process waits until it has finished: %s, %s so far", busy, written)
        _sleep(_POLL_S)


def is_being_built(path: str) -> bool:
    """Whether a builder holds the lock on a destination now."""
    return is_lock_file_held(lock_name(path))


def _holder(name: str) -> str:
    try:
        return f"process {int(Path(name).read_text())}"
    except (OSError, ValueError):  # it has just ended, or has not written its id yet
        return "another process"


def _num_bytes(directory: str) -> int:
    """The size of the files in a directory that a builder changes meanwhile; 0 if there is none."""
    nbytes = 0
    with contextlib.suppress(OSError):
        for file in os.scandir(directory):
            with contextlib.suppress(OSError):
                nbytes += file.stat().st_size
    return nbytes
