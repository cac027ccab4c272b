"""The files of an unfinished build, and the conditions for resuming it.

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
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fastload.batch.failed_sample import FailedSample
from fastload.cache.build.writer import writing
from fastload.cache.fingerprint import Fingerprint
from fastload.cache.lmdb.description import FORMAT_VERSION, Plan, check_version, parse_json, parse_plan
from fastload.cache.lmdb.files import SHARD_SUFFIX
from fastload.cache.lmdb.format import read_description
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError
from fastload.system.cgroups import read_text
from fastload.system.logs import log

_PLAN_NAME = "plan.json"
_ERRORS_NAME = "errors.jsonl"
_REPORTED = ("index", "path", "type", "reason", "worker")  # fields of a line for a sample that was left out
NAMES = re.compile(r"((plan\.json|errors\.jsonl)(\.new)?|\d{5,}-of-\d{5,}\.lmdb)")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def foreign_part(path: str) -> str | None:
    """The path of a file or directory at PATH that no build made; None if a build made all of them.

    A build leaves a directory of regular files with certain names.
    """
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return path
    except FileNotFoundError:
        return None
    with os.scandir(path) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            is_alone = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            if not is_alone or not NAMES.fullmatch(entry.name):
                return entry.path
    return None


class Partial:
    """The directory of an unfinished build; the caller holds the build lock.

    Args:
        destination: The path of the finished cache.

    Attributes:
        path: The directory.
        skipped: Samples that were left out so far, by index.
    """

    def __init__(self, destination: str) -> None:
        self.path = f"{destination}.partial"
        self.skipped: dict[int, FailedSample] = {}
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
        """
        boot_id = _boot_id()
        with writing(self.path):
            self._check_ours()
            stored = self._stored()
            if stored is not None:
                found, was = stored
                why = _why_anew(found, plan)
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
            fields = {"version": FORMAT_VERSION, "plan": asdict(plan), "boot_id": boot_id, "skips": skips}
            _write_whole(os.path.join(self.path, _PLAN_NAME), json.dumps(fields))
        return plan

    def _check_ours(self) -> None:
        foreign = foreign_part(self.path)
        if foreign is not None:
            raise CacheError(
                f"{foreign} is not from a build of fastload, which keeps unfinished caches at {self.path}, "
                "and was not changed: move it away, or give the cache another path"
            )

    def _stored(self) -> tuple[Plan, dict[str, Any]] | None:
        try:
            fields = parse_json(Path(self.path, _PLAN_NAME).read_text())
            check_version(fields)
            plan = parse_plan(fields.get("plan"))
        except (FileNotFoundError, ValueError):  # CacheMismatchError is a ValueError
            return None  # the build was killed before it wrote a plan, or another release wrote it
        is_whole = isinstance(fields.get("boot_id"), str) and isinstance(fields.get("skips"), bool)
        return (plan, fields) if is_whole else None

    def _remove_unfinished(self, plan: Plan) -> None:
        for shard in range(plan.num_shards):
            if not self.is_finished(plan, shard) and os.path.exists(self.shard_path(plan, shard)):
                os.unlink(self.shard_path(plan, shard))
                log.info("%s: the machine was rebooted: unfinished shards are written again", self.path)

    def shard_path(self, plan: Plan, shard: int) -> str:
        """The path of a shard in this directory."""
        return os.path.join(self.path, f"{shard:05d}-of-{plan.num_shards:05d}{SHARD_SUFFIX}")

    def is_finished(self, plan: Plan, shard: int) -> bool:
        """Whether a shard is complete and on the disk."""
        try:
            found = read_description(self.shard_path(plan, shard))
        except (FileNotFoundError, CacheCorruptError, CacheMismatchError):
            return False
        return (found.plan.build_id, found.shard) == (plan.build_id, shard)

    # --- samples that are left out ------------------------------------------------------------------------

    def _error_lines(self) -> list[FailedSample]:
        """The samples that were reported so far; the last line may be cut off."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in Path(self.path, _ERRORS_NAME).read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError, TypeError):
                    sample = FailedSample(**parse_json(line))
                    if type(sample.index) is int:
                        found.append(sample)
        return found

    def forget_from(self, position: int) -> None:
        """Drop the reports about samples that are read again."""
        self.skipped = {line.index: line for line in self._error_lines() if line.index < position}
        lines = "".join(map(_line, self.skipped.values()))
        with writing(self.path):
            _write_whole(os.path.join(self.path, _ERRORS_NAME), lines)

    def report(self, sample: FailedSample) -> None:
        """Report that a sample is left out."""
        self.skipped[sample.index] = sample
        with writing(self.path), open(os.path.join(self.path, _ERRORS_NAME), "a") as file:
            file.write(_line(sample))
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
                lines = "".join(map(_line, self.skipped.values()))
                _replace_whole(report, lines, os.path.join(self.path, f"{_ERRORS_NAME}.new"))
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(report)  # the report of an older cache
            if plan.num_shards > 1:
                os.rename(self.path, destination)
                _sync_directory(os.path.dirname(destination))
                for name in (_PLAN_NAME, _ERRORS_NAME):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(os.path.join(destination, name))
            else:
                os.rename(self.shard_path(plan, 0), destination)
                _sync_directory(os.path.dirname(destination))
                self.remove()

    def remove(self) -> None:
        """Remove the files that a build made there.

        Raises:
            CacheError: There are also files that no build made; nothing is removed.
        """
        self._check_ours()
        if os.path.lexists(self.path):
            shutil.rmtree(self.path)


def _line(sample: FailedSample) -> str:
    return json.dumps({name: getattr(sample, name) for name in _REPORTED}) + "\n"


def source_differences(cached: Plan, fingerprint: Fingerprint | None) -> list[str] | None:
    """Which parts of the fingerprints differ; None if one of the two has no fingerprint."""
    if fingerprint is None or cached.parts is None:
        return None
    return fingerprint.differences(Fingerprint(cached.parts))


def _why_anew(found: Plan, plan: Plan) -> str | None:
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


def _write_whole(path: str, text: str) -> None:
    _replace_whole(path, text, f"{path}.new")


def _replace_whole(path: str, text: str, new: str) -> None:
    """Replace a file atomically: it is seen with all of its content or not at all, also after power failure.

    Args:
        path: The file.
        text: Its content.
        new: The path where the content is written first; an older file of ours there is removed, not reused.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    with open(new, "x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    _sync_directory(os.path.dirname(path))


def _sync_directory(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
