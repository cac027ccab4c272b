"""The files of an unfinished build by one process, and the conditions for resuming it.

DEST.partial is a directory with `plan.json`, one LMDB file per shard, and `errors.jsonl`, with a line for
each sample that was left out. Rules:

1. There is one builder per destination: it holds the exclusive lock on DEST.lock while it lives (see
   `build_lock`). Files of other programs at DEST.partial are not written and not removed.
2. A later build resumes it only if it would write the same: same source (fingerprint, or else number of
   samples and sample 0), codec, quality and shards. Otherwise it starts again, and logs the reason.
3. Commits are not synced, because decoding would then wait for the disk. They survive the process that made
   them, but after a power failure some of their pages may be missing, and LMDB trusts the pages that it
   reads. So the plan names the boot of the machine: unfinished shards of another boot are written again.
   Finished shards were synced to the disk and are kept: with shards, a long build survives a reboot.
4. A line of `errors.jsonl` is written before the records that follow it: after a kill there may be too many
   lines, never too few. Lines of samples that are read again are dropped.
5. A directory in which several processes build one shard each (see `unfinished_shards`) is never resumed and
   never removed here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastload.cache.build.partial_files import (
    PLAN_NAME,
    create_whole,
    finished_shard,
    foreign_part,
    is_sharded,
    plan_text,
    read_plan_file,
    read_report,
    remove_all_but_shards,
    replace_whole,
    report_text,
)
from fastload.cache.build.writer import writing
from fastload.cache.fingerprint import Fingerprint
from fastload.cache.lmdb.description import Plan, check_version, parse_plan
from fastload.cache.lmdb.files import shard_name
from fastload.errors import CacheError, CacheMismatchError
from fastload.system.cgroups import read_text
from fastload.system.disk import sync_directory
from fastload.system.logs import log

if TYPE_CHECKING:
    from fastload.batch.failed_sample import FailedSample

_ERRORS_NAME = "errors.jsonl"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Partial:
    """The directory of an unfinished build; the caller holds the build lock.

    Args:
        destination: The path of the finished cache.

    Attributes:
        path: The directory.
        skipped: Samples that were left out so far, by index.
        what_is_kept: A sentence for errors, without its full stop.
        where_reported: A clause about the samples that were left out, for errors.
        way_to_resume: What to do then, for errors.
    """

    def __init__(self, destination: str) -> None:
        self.path = f"{destination}.partial"
        self.skipped: dict[int, FailedSample] = {}
        self.what_is_kept = f"The finished part is kept at {self.path}"
        self.where_reported = ", with a line for each in errors.jsonl"
        self.way_to_resume = "build again to resume"
        self._destination = destination

    def begin(self, plan: Plan, *, skips: bool) -> Plan:
        """Resume the build that left this directory if it has the same plan, else start again.

        Args:
            plan: The plan of this build.
            skips: Whether this build leaves out samples that cannot be read.

        Returns:
            The plan to follow: the plan in the directory, if the build is resumed.

        Raises:
            CacheError: The directory contains files that no build made.
            CacheMismatchError: Several processes build the shards of this cache.
        """
        boot_id = _boot_id()
        with writing(self.path):
            self._check_ours()
            fields = read_plan_file(self.path)
            if is_sharded(fields):
                raise self._sharded()
            stored = _local_plan(fields)
            if stored is not None:
                found, was = stored
                why = why_anew(found, plan)
                if why is None and was["skips"] and not skips and self._error_lines():
                    why = "it left out samples that could not be read"
                if why is None:
                    plan = replace(found, classes=plan.classes)
                    if was["boot_id"] != boot_id or not boot_id:
                        self._remove_unfinished(plan)
                else:
                    log.info("%s is from another build and is started again: %s", self.path, why)
                    stored = None
            if stored is None:
                self.remove()
                os.makedirs(self.path)
            text = plan_text(plan, boot_id=boot_id, skips=skips)
            plan_path = os.path.join(self.path, PLAN_NAME)
            if stored is not None:
                replace_whole(plan_path, text, f"{plan_path}.new")
            elif not create_whole(plan_path, text, f"{plan_path}.new"):
                raise self._sharded()  # another machine began to build shards in the new directory
        return plan

    def _sharded(self) -> CacheMismatchError:
        return CacheMismatchError(
            f"the shards of {self._destination} are built one by one in {self.path}: build those that are "
            f"missing with --shard, then run 'fastload cache join {self._destination}'; or remove them with "
            f"'fastload cache rm {self._destination}'"
        )

    def _check_ours(self) -> None:
        foreign = foreign_part(self.path)
        if foreign is not None:
            raise CacheError(
                f"{foreign} is not from a build of fastload, which keeps unfinished caches at {self.path}, "
                "and was not changed: move it away, or give the cache another path"
            )

    def _remove_unfinished(self, plan: Plan) -> None:
        for shard in range(plan.num_shards):
            if not self.is_finished(plan, shard) and os.path.exists(self.shard_path(plan, shard)):
                os.unlink(self.shard_path(plan, shard))
                log.info("%s: the machine was rebooted: unfinished shards are written again", self.path)

    def shard_path(self, plan: Plan, shard: int) -> str:
        """The path of a shard in this directory."""
        return os.path.join(self.path, shard_name(plan, shard))

    def is_finished(self, plan: Plan, shard: int) -> bool:
        """Whether a shard is complete and on the disk."""
        return finished_shard(self.shard_path(plan, shard), plan, shard) is not None

    # --- samples that are left out ------------------------------------------------------------------------

    def _error_lines(self) -> list[FailedSample]:
        """The samples that were reported so far; the last line may be cut off."""
        return read_report(os.path.join(self.path, _ERRORS_NAME))

    def forget_from(self, position: int) -> None:
        """Drop the reports about samples that are read again."""
        self.skipped = {line.index: line for line in self._error_lines() if line.index < position}
        path = os.path.join(self.path, _ERRORS_NAME)
        with writing(self.path):
            replace_whole(path, report_text(self.skipped.values()), f"{path}.new")

    def report(self, sample: FailedSample) -> None:
        """Report that a sample is left out."""
        self.skipped[sample.index] = sample
        with writing(self.path), open(os.path.join(self.path, _ERRORS_NAME), "a") as file:
            file.write(report_text([sample]))
            file.flush()
            os.fsync(file.fileno())

    # --- the end ------------------------------------------------------------------------------------------

    def publish(self, plan: Plan) -> None:
        """Move the finished cache to its destination, after the report of errors was placed beside it."""
        destination = self._destination
        report = f"{destination}.errors.jsonl"
        if os.path.lexists(destination):
            raise CacheError(
                f"{destination} was made by another program while the cache was built, and was not changed. "
                f"The finished cache is kept at {self.path}: move {destination} away, and build again"
            )
        with writing(destination):
            if self.skipped:
                lines = report_text(self.skipped.values())
                replace_whole(report, lines, os.path.join(self.path, f"{_ERRORS_NAME}.new"))
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(report)  # the report of an older cache
            if plan.num_shards > 1:
                os.rename(self.path, destination)
                sync_directory(os.path.dirname(destination))
                remove_all_but_shards(destination)
            else:
                os.rename(self.shard_path(plan, 0), destination)
                sync_directory(os.path.dirname(destination))
                self.remove()

    def remove(self) -> None:
        """Remove the files that a build made there.

        Raises:
            CacheError: There are also files that no build made; nothing is removed.
        """
        self._check_ours()
        if os.path.lexists(self.path):
            shutil.rmtree(self.path)


def source_differences(cached: Plan, fingerprint: Fingerprint | None) -> list[str] | None:
    """Which parts of the fingerprints differ; None if one of the two has no fingerprint."""
    if fingerprint is None or cached.parts is None:
        return None
    return fingerprint.differences(Fingerprint(cached.parts))


def why_anew(found: Plan, plan: Plan) -> str | None:
    """The differences that prevent a build from continuing another build's files; None if it can continue.

    Args:
        found: The plan of the files that are there.
        plan: The plan of this build.
    """
    fingerprint = None if plan.parts is None else Fingerprint(plan.parts)
    differences = source_differences(found, fingerprint)
    if differences:
        return "; ".join(differences)
    names = ["num_samples", "num_shards", "codec", "quality"]
    if differences is None:
        names += ["spec", "crc32"]
    changed = [
        f"{name} was {getattr(found, name)} and is now {getattr(plan, name)}"
        for name in names
        if getattr(found, name) != getattr(plan, name)
    ]
    return "; ".join(changed) or None


def _boot_id() -> str:
    """The id of this boot of this machine; if it is unknown, an empty string, which matches no boot."""
    return read_text(_BOOT_ID).strip()


def _local_plan(fields: dict[str, Any] | None) -> tuple[Plan, dict[str, Any]] | None:
    """The plan of a build by one process; None if a killed build left none, or another release wrote it."""
    if fields is None:
        return None
    try:
        check_version(fields)
        plan = parse_plan(fields.get("plan"))
    except ValueError:  # CacheMismatchError is a ValueError
        return None
    is_whole = isinstance(fields.get("boot_id"), str) and isinstance(fields.get("skips"), bool)
    return (plan, fields) if is_whole else None
