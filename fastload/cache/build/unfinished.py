"""The directory of an unfinished cache, DEST.partial: its plan, its finished shards, and their reports.

Any number of processes build shards in it, also on several machines that share the file system. Rules:

1. A process writes each file under a temporary name (see `names`), syncs it, and renames it. A shard with its
   final name is finished. A process that dies loses only the shard that it is writing.
2. Exactly one process makes the plan, by linking it to its name; all others follow it. A plan is never
   replaced: `fastload cache rm` removes it.
3. The report about the samples that a shard leaves out is complete before the shard gets its name. A shard
   whose report does not fit it is built again.
4. Builders of one shard on one machine exclude each other by a lock (see `build_lock`). Where the file system
   has no locks, or machines do not see each other's, the last builder's shard wins: all follow the plan.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fastload.batch.failed_sample import FailedSample
from fastload.batch.failures import check_max_errors
from fastload.cache.build.names import (
    PLAN_NAME,
    foreign_part,
    own_name,
    own_prefix,
    remove_all_but_shards,
    report_name,
)
from fastload.cache.build.writer import writing
from fastload.cache.lmdb.description import (
    FORMAT_VERSION,
    check_version,
    parse_json,
    parse_plan,
    why_different,
)
from fastload.cache.lmdb.files import open_file, shard_name
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError
from fastload.system.disk import sync_directory, write_new

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastload.cache.lmdb.description import Plan

REPORT = ".errors.jsonl"  # the end of the name of a cache's report, beside the cache
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_REPORTED = ("index", "path", "type", "reason", "worker")


class Unfinished:
    """The directory of an unfinished cache.

    Args:
        destination: The path of the finished cache.

    Attributes:
        path: The directory.
        plan: The plan that all processes follow; see `begin` and `open`.
        max_errors: The limit of the process that made the plan.
    """

    plan: Plan
    max_errors: int | float = 0.01

    def __init__(self, destination: str) -> None:
        self.path = f"{destination}.partial"
        self._destination = destination
        self._remove = f"'fastload cache rm {shlex.quote(destination)}'"

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
                fields = parse_json(Path(self.path, PLAN_NAME).read_bytes())
                check_version(fields)
                self.plan = parse_plan(fields.get("plan"))
                limit = fields.get("max_errors")
                check_max_errors(limit)
                self.max_errors = limit
                return True
        except ValueError as error:  # CacheMismatchError is a ValueError
            raise CacheMismatchError(
                f"{self.path}/{PLAN_NAME} is damaged, or from a different release ({error}): remove it with "
                f"{self._remove}, and build again"
            ) from error
        return False

    def begin(self, plan: Plan, max_errors: int | float) -> None:
        """Follow the plan in the directory, which becomes this one if there is none.

        Args:
            plan: The plan of this build.
            max_errors: The maximum number or share of left-out samples, for a new plan.

        Raises:
            CacheMismatchError: The directory belongs to a build of other samples or settings.
            CacheError: The directory contains files that no build made, or cannot be written.
        """
        if not self.open():
            fields = {"version": FORMAT_VERSION, "max_errors": max_errors, "plan": asdict(plan)}
            with writing(self.path):
                os.makedirs(self.path, exist_ok=True)
                self._make_plan(json.dumps(fields).encode())
            self.plan = plan
            self.open()
        why = why_different(self.plan, plan)
        if why is not None:
            raise CacheMismatchError(
                f"{self.path} belongs to a different build: {why} (here: this process, there: the build). "
                "Nothing was changed: build with its samples and settings, use a different path, or remove "
                f"it with {self._remove}"
            )

    def _make_plan(self, text: bytes) -> None:
        """Create the plan with this text, unless there is one."""
        path, own = os.path.join(self.path, PLAN_NAME), self.own_path(PLAN_NAME)
        write_new(own, text)
        try:
            os.link(own, path)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            # If two processes get here at once, the shards of one of them do not count.
            if not os.path.lexists(path):
                os.rename(own, path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(own)
        sync_directory(self.path)

    def remove_unused(self) -> None:
        """Remove the directory if it holds only the plan."""
        with contextlib.suppress(OSError):
            if os.listdir(self.path) == [PLAN_NAME]:
                os.unlink(os.path.join(self.path, PLAN_NAME))
            os.rmdir(self.path)

    # --- shards -------------------------------------------------------------------------------------------

    def path_of(self, shard: int) -> str:
        """The path of a finished shard."""
        return os.path.join(self.path, shard_name(self.plan, shard))

    def own_path(self, name: str) -> str:
        """A new temporary path for a file that gets this name."""
        return os.path.join(self.path, own_name(name))

    def finished(self, shard: int) -> list[FailedSample] | None:
        """The samples that a finished shard leaves out; None if the shard is not finished."""
        path = self.path_of(shard)
        try:
            file = open_file(path)
        except (FileNotFoundError, CacheCorruptError, CacheMismatchError):
            return None
        found = file.description
        if (found.plan.build_id, found.shard) != (self.plan.build_id, shard):
            return None
        left_out = file.left_out_indices.tolist()
        report = read_report(report_name(path)) if left_out else []
        # Without its report the shard is rebuilt, so no sample is left out without a reason.
        return report if [sample.index for sample in report] == left_out else None

    def remove_remains(self, shard: int) -> None:
        """Remove what killed processes of this machine left of a shard; the caller holds its lock."""
        prefix = own_prefix(shard_name(self.plan, shard))
        for name in os.listdir(self.path):
            if name.startswith(prefix):
                os.unlink(os.path.join(self.path, name))

    def complete(self, shard: int, own: str, left_out: list[FailedSample]) -> None:
        """Give a shard that this process has written at `own` its final name."""
        path = self.path_of(shard)
        with writing(self.path):
            if left_out:
                self._write_report(left_out, report_name(path))
            os.rename(own, path)
            sync_directory(self.path)

    def check_followed(self) -> None:
        """Check that the directory still has the plan that this process follows.

        Raises:
            CacheError: A different process removed the directory.
        """
        now = Unfinished(self._destination)
        if not now.open() or now.plan.build_id != self.plan.build_id:
            raise CacheError(
                f"{self.path} was removed while a shard was built in it, for example by 'fastload cache rm': "
                "build again"
            )

    # --- the end ------------------------------------------------------------------------------------------

    def publish(self, left_out: list[FailedSample]) -> None:
        """Move the finished cache to its destination, after placing its report beside it.

        Args:
            left_out: All left-out samples, by ascending index.
        """
        destination = self._destination
        if os.path.lexists(destination):
            raise CacheError(
                f"another program created {destination} while the cache was built; it was not changed. The "
                f"finished cache is kept at {self.path}: move {destination} away, and build again"
            )
        with writing(destination):
            if left_out:
                self._write_report(left_out, destination + REPORT)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(destination + REPORT)  # the report of an older cache
            if self.plan.num_shards > 1:
                os.rename(self.path, destination)
                remove_all_but_shards(destination)
            else:
                os.rename(self.path_of(0), destination)
                remove_all_but_shards(self.path)
                with contextlib.suppress(OSError):  # another program has put a file there
                    os.rmdir(self.path)
            sync_directory(os.path.dirname(destination))

    def _write_report(self, left_out: list[FailedSample], path: str) -> None:
        own = self.own_path(report_name(shard_name(self.plan, 0)))
        write_new(own, report_text(left_out).encode())
        os.replace(own, path)


def report_text(samples: Iterable[FailedSample]) -> str:
    """The report about left-out samples: one line of JSON each."""
    return "".join(json.dumps({name: getattr(one, name) for name in _REPORTED}) + "\n" for one in samples)


def parse_report(text: str) -> list[FailedSample]:
    """The samples in a report; damaged lines are left out."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            sample = FailedSample(**parse_json(line))
            if type(sample.index) is int:
                found.append(sample)
    return found


def read_report(path: str) -> list[FailedSample]:
    """The samples in the report at a path; a report that does not exist is empty."""
    try:
        return parse_report(Path(path).read_text(errors="replace"))
    except FileNotFoundError:
        return []
