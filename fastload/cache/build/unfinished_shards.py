"""The files of a build in which several processes, on any number of machines, build one shard each.

DEST.partial lies on a file system that all these machines share. It contains `plan.json` (with `"sharded":
true`), a file for each finished shard, and a report for each finished shard that leaves samples out. Rules:

1. Processes need no lock, because locks do not work on all network file systems. A process writes files under
   names of its own, brings them to the disk, and links each to its lasting name. Linking fails if the name is
   taken: exactly one process makes the plan, and the first process that finishes a shard decides on its
   content. A finished shard never changes.
2. All processes follow the plan in the directory, and nothing here deletes it: a process with other samples
   or settings gets an error, because other machines may be at work. `fastload cache rm` removes it.
3. Shards are the unit of resumption. A finished shard is not built again; an unfinished one is built from its
   beginning.
4. The report of a shard is complete before the shard gets its name. Its name contains a checksum of the
   indices that the shard leaves out. Two processes that build one shard at the same time may leave out other
   samples, and the shard then tells which report is its own.
5. A build by one process and a build of shards never work in one directory. A build by one process raises an
   error if the plan is that of shards, and begins by replacing the directory otherwise. A process that builds
   a shard keeps the directory open and links files within it, so its files never reach a directory that
   replaced it.
6. Files that a killed process leaves under names of its own are removed by the next process on the same
   machine that builds the same shard, by `join` and by `fastload cache rm`.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastload.cache.build.build_lock import is_being_built
from fastload.cache.build.partial_files import (
    OWN_NAME,
    PLAN_NAME,
    create_whole,
    finished_shard,
    foreign_part,
    is_sharded,
    link_new,
    plan_text,
    read_plan_file,
    read_report,
    replace_whole,
    report_text,
)
from fastload.cache.build.unfinished import why_anew
from fastload.cache.build.writer import writing
from fastload.cache.lmdb.description import Plan, check_version, parse_plan, runs_of
from fastload.cache.lmdb.files import shard_name
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheBusyError, CacheError, CacheMismatchError
from fastload.system.cgroups import read_text
from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastload.batch.failed_sample import FailedSample

_MOST_HOST_LETTERS = 64
_MOST_NAMED = 10  # shards that a message lists
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ShardFiles:
    """The directory of a build of shards, as one process sees it; close it after use.

    Args:
        destination: The path of the finished cache.

    Attributes:
        path: The directory.
        plan: The plan that all processes follow; see `begin` and `open`.
        error_budget: The budget of the process that made the plan.
        skipped: Samples of this process's shard that were left out so far, by index.
        what_is_kept: A sentence for errors, without its full stop.
        where_reported: A clause about the samples that were left out, for errors.
        way_to_resume: What to do then, for errors.
    """

    plan: Plan
    error_budget: int | float

    def __init__(self, destination: str) -> None:
        self.path = f"{destination}.partial"
        self.skipped: dict[int, FailedSample] = {}
        self.what_is_kept = f"Finished shards are kept at {self.path}"
        self.where_reported = ""
        self.way_to_resume = "build this shard again"
        self._destination = destination
        self._own_suffix = f"{_own_name()}{os.urandom(4).hex()}"
        self._fd = -1

    def close(self) -> None:
        """Close the directory."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # --- the plan -----------------------------------------------------------------------------------------

    def open(self) -> bool:
        """Read the plan; returns False if there is no directory, or no plan in it.

        Raises:
            CacheMismatchError: It is the plan of a build by one process, or of another release.
            CacheError: The directory contains files that no build made.
        """
        self._check_ours()
        with writing(self.path):
            try:
                fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            self.close()
            self._fd = fd
            fields = read_plan_file(self.path)
        if fields is None:
            return False
        self._take(fields)
        return True

    def begin(self, plan: Plan, error_budget: int | float) -> None:
        """Follow the plan in the directory, which is this one if no other process made one before.

        Raises:
            CacheMismatchError: The directory belongs to a build of other samples or with other settings.
            CacheBusyError: A build by one process is about to begin there.
            CacheError: The directory contains files that no build made, or cannot be written.
        """
        if not self.open():
            if _is_being_built(self._destination):
                raise CacheBusyError(
                    f"{self._destination} is being built by one process, without --shard: wait until it has "
                    "finished"
                )
            with writing(self.path):
                os.makedirs(self.path, exist_ok=True)
                text = plan_text(plan, sharded=True, error_budget=error_budget)
                create_whole(os.path.join(self.path, PLAN_NAME), text, self._own(PLAN_NAME))
            if not self.open():
                raise self.removed()
        why = why_anew(self.plan, plan)
        if why is not None:
            raise CacheMismatchError(
                f"{self.path} has shards of another build: {why} (here: this process, there: the build). "
                "Nothing was changed, because other machines may be at work on it: build with its samples "
                f"and settings, give another path, or remove it with 'fastload cache rm {self._destination}'"
            )

    def remove_plan(self) -> None:
        """Remove the plan that this process made, and the directory, if no other process has used it."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.path, PLAN_NAME))
            os.rmdir(self.path)

    def _take(self, fields: dict[str, Any]) -> None:
        if not is_sharded(fields):
            raise CacheMismatchError(
                f"{self.path} is an unfinished build by one process: run it again without --shard to "
                f"continue it, or remove it with 'fastload cache rm {self._destination}'"
            )
        try:
            check_version(fields)
            self.plan = parse_plan(fields.get("plan"))
        except ValueError as error:
            raise CacheMismatchError(
                f"{self.path}/{PLAN_NAME} is damaged, or of another release ({error}): remove it with "
                f"'fastload cache rm {self._destination}', and build all shards again"
            ) from error
        budget = fields.get("error_budget")
        is_number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
        self.error_budget = budget if is_number else 1.0  # type: ignore[assignment]

    def _check_ours(self) -> None:
        with writing(self.path):
            foreign = foreign_part(self.path)
        if foreign is not None:
            raise CacheError(
                f"{foreign} is not from a build of fastload, which keeps unfinished caches at {self.path}, "
                "and was not changed: move it away, or give the cache another path"
            )

    # --- shards -------------------------------------------------------------------------------------------

    def shard_path(self, plan: Plan, shard: int) -> str:
        """The path at which this process writes a shard."""
        return self._own(shard_name(plan, shard))

    def finished(self, shard: int) -> list[FailedSample] | None:
        """The samples that a finished shard leaves out; None if the shard is not finished."""
        name = shard_name(self.plan, shard)
        found = finished_shard(os.path.join(self.path, name), self.plan, shard)
        if found is None:
            return None
        if not found.missing:
            return []
        report = read_report(os.path.join(self.path, _report_name(name, found.missing)))
        # Without its report the shard is built again, so that no sample is left out without a reason.
        return report if runs_of([sample.index for sample in report]) == found.missing else None

    def shard_nbytes(self, shard: int) -> int | None:
        """The size of the file of a finished shard; None if the shards were joined meanwhile."""
        try:
            return os.path.getsize(os.path.join(self.path, shard_name(self.plan, shard)))
        except FileNotFoundError:
            return None

    def has_file(self, shard: int) -> bool:
        """Whether there is a file with the name of a finished shard, valid or not."""
        return os.path.lexists(os.path.join(self.path, shard_name(self.plan, shard)))

    def missing(self) -> list[int]:
        """The shards that are not finished."""
        return [shard for shard in range(self.plan.num_shards) if self.finished(shard) is None]

    def report(self, sample: FailedSample) -> None:
        """Note that a sample of this process's shard is left out."""
        self.skipped[sample.index] = sample

    def complete(self, shard: int) -> None:
        """Give the shard that this process has written, and its report, their lasting names.

        If another process has finished the same shard before, its files stay and this process's are removed.

        Raises:
            CacheError: The directory was removed or replaced meanwhile.
        """
        name = shard_name(self.plan, shard)
        own = os.path.basename(self._own(name))
        with writing(self.path):
            if not self._is_followed():
                raise self.removed()
            if self.skipped:
                left_out = runs_of(sorted(self.skipped))
                report = _report_name(name, left_out)
                lines = report_text(self.skipped[index] for index in sorted(self.skipped))
                replace_whole(os.path.join(self.path, report), lines, self._own(report))
            if not link_new(own, name, directory_fd=self._fd) and self.finished(shard) is None:
                # The name has a damaged shard, or a shard of another build.
                os.rename(own, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            os.fsync(self._fd)

    def was_removed(self, shard: int, error: CacheError) -> bool:
        """Whether an error comes from the removal of the directory, or of this process's file."""
        if os.path.exists(self.shard_path(self.plan, shard)):
            return False
        return isinstance(error.__cause__, FileNotFoundError) or not self._is_followed()

    def discard(self) -> None:
        """Remove this process's own files, which are unfinished, or have got their lasting names."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._fd):
                if name.endswith(f".{self._own_suffix}"):
                    os.unlink(name, dir_fd=self._fd)

    def remove_leftovers(self, shard: int | None = None) -> None:
        """Remove the files of killed processes of this machine: of one shard, or of all shards."""
        for name in self._own_names():
            is_meant = shard is None or name.startswith(
                f".{shard_name(self.plan, shard).removesuffix('lmdb')}"
            )
            if is_meant and not is_alive(name):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._fd)
                    log.info("%s: removed %s, which a killed process left", self.path, name)

    def _own_names(self) -> list[str]:
        return [name for name in os.listdir(self._fd) if OWN_NAME.fullmatch(name)]

    def _own(self, name: str) -> str:
        """The path at which this process writes a file that gets this name."""
        return os.path.join(self.path, f".{name}.{self._own_suffix}")

    def _is_followed(self) -> bool:
        """Whether the directory still has the plan that this process follows."""
        fields = read_plan_file(self.path)
        plan = None if fields is None else fields.get("plan")
        return isinstance(plan, dict) and plan.get("build_id") == self.plan.build_id

    def removed(self) -> CacheError:
        """The error that another process removed the directory, or this process's file in it."""
        return CacheError(
            f"{self.path} was removed while a shard was built in it, for example by 'fastload cache rm': "
            "build this shard again"
        )


def _is_being_built(destination: str) -> bool:
    try:
        return is_being_built(destination)
    except OSError:
        return False  # a file system without locks, where rule 5 alone must do


def is_published(destination: str, plan: Plan) -> bool:
    """Whether the finished cache of this plan is at its destination."""
    try:
        return LMDBCache(destination).plan.build_id == plan.build_id
    except (OSError, CacheMismatchError):  # CacheCorruptError is an OSError
        return False


def listed(shards: Sequence[int]) -> str:
    """Shards in a message, counted from 1."""
    named = ", ".join(str(shard + 1) for shard in shards[:_MOST_NAMED])
    return named + (", ..." if len(shards) > _MOST_NAMED else "")


# --- names of a process's own ----------------------------------------------------------------------------


def is_alive(name: str) -> bool:
    """Whether the process that writes the file with this name may be alive; on another machine, it may."""
    match = OWN_NAME.fullmatch(name)
    if match is None or match["machine"] != _machine():
        return True
    try:
        os.kill(int(match["pid"]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # a process of another user
    return True


def is_alive_here(name: str) -> bool:
    """Whether the process that writes the file with this name is alive on this machine."""
    match = OWN_NAME.fullmatch(name)
    return match is not None and match["machine"] == _machine() and is_alive(name)


def _own_name() -> str:
    """The beginning of the names of a process: host, process number, and an id of the boot of the machine."""
    host = re.sub(r"[^\w]", "_", socket.gethostname(), flags=re.ASCII)[:_MOST_HOST_LETTERS] or "_"
    return f"{host}-{os.getpid()}-{_machine()}"


def _machine() -> str:
    """An id of this boot of this machine, and of the process numbers in this container."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    text = f"{socket.gethostname()} {read_text(_BOOT_ID)} {numbers}"
    return f"{zlib.crc32(text.encode()):08x}"


def _report_name(shard_file: str, left_out: Sequence[tuple[int, int]]) -> str:
    """The name of the report of a shard that leaves out these runs of indices."""
    checksum = zlib.crc32(repr([tuple(run) for run in left_out]).encode("ascii"))
    return f"{shard_file.removesuffix('.lmdb')}.errors-{checksum:08x}.jsonl"
