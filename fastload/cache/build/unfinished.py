"""The directory of an unfinished cache, DEST.partial: its plan, its finished shards, and their reports.

Any number of processes build shards in it, also on several machines that share the file system. Rules:

1. Processes need no lock, because locks do not work on all network file systems. A process writes files under
   names of its own (see `names`), brings them to the disk, and links each to its lasting name. Linking fails
   if the name is taken: exactly one process makes the plan, and the first process that finishes a shard
   decides on its content. A finished shard never changes.
2. All processes follow the plan in the directory. A build of the whole cache by one process, which holds the
   lock on DEST (see `build_lock`), starts again if the plan was another such build's and does not fit. A plan
   that several machines may follow is never replaced: `fastload cache rm` removes it.
3. An unfinished shard is continued by the next process of the same machine that builds it, once its process
   has ended. Commits survive the process that made them, but not the machine, because they are not synced:
   the name of the file tells the boot of the machine.
4. The line about a sample that is left out is written before the records that follow it. A file whose records
   and lines do not add up is not continued.
5. A report is complete before the shard that it belongs to gets its name.
6. A process keeps the directory open and links files within it, so its files never reach a directory that
   replaced it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastload.cache.build.differences import why_different
from fastload.cache.build.names import (
    PLAN_NAME,
    can_be_taken_over,
    foreign_part,
    is_written_here,
    left_name,
    own_suffix,
    remove_all_but_shards,
    report_name,
)
from fastload.cache.build.reports import read_report, report_text
from fastload.cache.build.writer import ShardWriter, writing
from fastload.cache.lmdb.description import (
    FORMAT_VERSION,
    Plan,
    check_version,
    parse_json,
    parse_plan,
    runs_of,
)
from fastload.cache.lmdb.files import shard_name
from fastload.cache.lmdb.format import read_description
from fastload.errors import CacheBusyError, CacheCorruptError, CacheError, CacheMismatchError
from fastload.system.disk import sync_directory, write_new
from fastload.system.logs import log

if TYPE_CHECKING:
    from fastload.batch.failed_sample import FailedSample

_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Unfinished:
    """The directory of an unfinished cache, as one process sees it; close it after use.

    Args:
        destination: The path of the finished cache.

    Attributes:
        path: The directory.
        plan: The plan that all processes follow; see `begin` and `open`.
        error_budget: The budget of the process that made the plan.
        is_shared: Whether several machines may follow the plan.
        skipped: Samples that are left out of the shards that this process writes, by index.
        what_is_kept: A sentence for errors, without its full stop.
    """

    plan: Plan
    error_budget: int | float

    def __init__(self, destination: str) -> None:
        self.path = f"{destination}.partial"
        self.is_shared = False
        self.skipped: dict[int, FailedSample] = {}
        self.what_is_kept = f"The finished part is kept at {self.path}"
        self._destination = destination
        self._suffix = ""
        self._fd = -1

    def close(self) -> None:
        """Close the directory; the next build continues this process's unfinished shards."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        with contextlib.suppress(OSError):  # the directory may be gone
            for name in self._own_names(fd):
                if name.endswith(f".{self._suffix}"):
                    os.rename(name, left_name(name), src_dir_fd=fd, dst_dir_fd=fd)
        os.close(fd)

    # --- the plan -----------------------------------------------------------------------------------------

    def open(self) -> bool:
        """Read the plan; returns False if there is no directory, or no plan in it.

        Raises:
            CacheMismatchError: The plan is damaged, or of another release.
            CacheError: The directory contains files that no build made.
        """
        if not self._open_directory():
            return False
        with writing(self.path):
            fields = self._read_plan()
        if fields is None:
            return False
        self.is_shared = fields.get("is_shared") is True
        try:
            check_version(fields)
            self.plan = parse_plan(fields.get("plan"))
        except ValueError as error:  # CacheMismatchError is a ValueError
            raise CacheMismatchError(
                f"{self.path}/{PLAN_NAME} is damaged, or of another release ({error}): remove it with "
                f"'fastload cache rm {shlex.quote(self._destination)}', and build again"
            ) from error
        budget = fields.get("error_budget")
        is_number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
        self.error_budget = budget if is_number else 1.0  # type: ignore[assignment]
        self._suffix = own_suffix(self.plan.build_id)
        return True

    def begin(self, plan: Plan, error_budget: int | float, *, is_shared: bool) -> None:
        """Follow the plan in the directory, which is this one if no other process made one before.

        Args:
            plan: The plan of this build.
            error_budget: The maximum number or share of samples that are left out, for a new plan.
            is_shared: Whether several machines may follow the plan. Otherwise the caller holds the build
                lock, and a different plan of its own kind is replaced.

        Raises:
            CacheMismatchError: The directory belongs to a build of other samples or with other settings.
            CacheBusyError: A process of this machine builds by the plan that would be replaced.
            CacheError: The directory contains files that no build made, or cannot be written.
        """
        why = None
        try:
            is_there = self.open()
            why = why_different(self.plan, plan) if is_there else None
        except CacheMismatchError as error:
            if is_shared or self.is_shared:
                raise
            is_there, why = True, str(error)
        if why is not None and (is_shared or self.is_shared):
            raise self._different(why)
        if why is not None:
            log.info("%s is from another build and is started again: %s", self.path, why)
        if why is not None or not (is_there or is_shared):
            self.remove()
        if why is None and is_there:
            return
        with writing(self.path):
            os.makedirs(self.path, exist_ok=True)
            if not self._open_directory():
                raise self.removed()
            self.is_shared, self._suffix = is_shared, own_suffix(plan.build_id)
            fields = {"error_budget": error_budget, "is_shared": is_shared}
            text = json.dumps({"version": FORMAT_VERSION, "plan": asdict(plan), **fields})
            write_new(self._own(PLAN_NAME), text.encode())
            try:
                self._link(PLAN_NAME)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._own(PLAN_NAME))
            os.fsync(self._fd)
        if not self.open():
            raise self.removed()
        why = why_different(self.plan, plan)  # another process may have made the plan meanwhile
        if why is not None:
            raise self._different(why)

    def remove_plan(self) -> None:
        """Remove the plan that this process made, and the directory, if no other process has used it."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.path, PLAN_NAME))
            os.rmdir(self.path)

    def _read_plan(self) -> dict[str, Any] | None:
        """The fields of the plan; None without the file, an empty dict if it does not contain fields."""
        try:
            fields = parse_json(Path(self.path, PLAN_NAME).read_text(errors="replace"))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return fields if isinstance(fields, dict) else {}

    def _open_directory(self) -> bool:
        with writing(self.path):
            foreign = foreign_part(self.path)
        if foreign is not None:
            raise CacheError(
                f"{foreign} is not from a build of fastload, which keeps unfinished caches at {self.path}, "
                "and was not changed: move it away, or give the cache another path"
            )
        with writing(self.path):
            try:
                fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
        self.close()
        self._fd = fd
        return True

    def _different(self, why: str) -> CacheMismatchError:
        return CacheMismatchError(
            f"{self.path} has shards of another build: {why} (here: this process, there: the build). "
            "Nothing was changed, because other machines may be at work on it: build with its samples "
            "and settings, give another path, or remove it with "
            f"'fastload cache rm {shlex.quote(self._destination)}'"
        )

    # --- shards -------------------------------------------------------------------------------------------

    def finished(self, shard: int) -> list[FailedSample] | None:
        """The samples that a finished shard leaves out; None if the shard is not finished."""
        name = shard_name(self.plan, shard)
        try:
            found = read_description(os.path.join(self.path, name))
        except (FileNotFoundError, CacheCorruptError, CacheMismatchError):
            return None
        if (found.plan.build_id, found.shard) != (self.plan.build_id, shard):
            return None
        if not found.missing:
            return []
        report = read_report(os.path.join(self.path, report_name(name, found.missing)))
        # Without its report the shard is built again, so that no sample is left out without a reason.
        return report if runs_of([sample.index for sample in report]) == found.missing else None

    def forget(self, shard: int) -> None:
        """Remove a finished shard that leaves samples out, because this build may not leave any out.

        Raises:
            CacheMismatchError: Several machines may follow the plan, where a finished shard never changes.
        """
        if self.is_shared:
            raise self.leaves_out(shard, len(self.finished(shard) or ()))
        with writing(self.path):
            os.unlink(shard_name(self.plan, shard), dir_fd=self._fd)

    def leaves_out(self, shard: int, num_samples: int) -> CacheMismatchError:
        """The error that a finished shard leaves samples out, and this build may not."""
        return CacheMismatchError(
            f'shard {shard + 1} of {self.plan.num_shards} was built before with on_error="skip", and leaves '
            f'out {num_samples:,} samples: build it with on_error="skip" too, or remove all shards with '
            f"'fastload cache rm {shlex.quote(self._destination)}'"
        )

    def missing(self) -> list[int]:
        """The shards that are not finished."""
        return [shard for shard in range(self.plan.num_shards) if self.finished(shard) is None]

    def shard_nbytes(self, shard: int) -> int | None:
        """The size of the file of a finished shard; None if the shards were joined meanwhile."""
        try:
            return os.path.getsize(os.path.join(self.path, shard_name(self.plan, shard)))
        except FileNotFoundError:
            return None

    def has_file(self, shard: int) -> bool:
        """Whether there is a file with the name of a finished shard, valid or not."""
        return os.path.lexists(os.path.join(self.path, shard_name(self.plan, shard)))

    def shard_path(self, shard: int) -> str:
        """The path at which this process writes a shard."""
        return self._own(shard_name(self.plan, shard))

    def take_over(self, shard: int, *, skips: bool) -> int:
        """Continue the unfinished shard of a process that has ended; returns the first index to write.

        Args:
            shard: The shard that the caller is about to write.
            skips: Whether samples may be left out. Otherwise a file that leaves samples out is not continued.
        """
        start = self.plan.indices_of(shard).start
        name = shard_name(self.plan, shard)
        for left in os.listdir(self._fd):
            if not can_be_taken_over(left, name, self.plan.build_id):
                continue
            report = report_name(name)
            left_report = f".{report}{left.removeprefix(f'.{name}')}"
            try:
                self._rename(left, os.path.basename(self._own(name)))
            except FileNotFoundError:
                continue  # another process has taken it over
            with contextlib.suppress(FileNotFoundError):
                self._rename(left_report, os.path.basename(self._own(report)))
            position = self._position(shard, skips=skips)
            if position is not None:
                return position
            self._discard(shard)
        return start

    def _position(self, shard: int, *, skips: bool) -> int | None:
        """The first index that is missing in this process's shard; None if its content cannot be trusted."""
        start = self.plan.indices_of(shard).start
        with writing(self.path):
            with contextlib.closing(ShardWriter(self.shard_path(shard))) as writer:
                position = start if writer.last_index is None else writer.last_index + 1
                num_records = writer.num_records
            report = self._own(report_name(shard_name(self.plan, shard)))
            lines = {line.index: line for line in read_report(report) if start <= line.index < position}
            if (lines and not skips) or num_records + len(lines) != position - start:
                return None
            write_new(report, report_text(lines.values()).encode())  # without samples that are read again
        self.skipped |= lines
        return position

    def report(self, shard: int, sample: FailedSample) -> None:
        """Note that a sample of a shard that this process writes is left out."""
        self.skipped[sample.index] = sample
        path = self._own(report_name(shard_name(self.plan, shard)))
        with writing(self.path), open(path, "a") as file:
            file.write(report_text([sample]))
            file.flush()
            os.fsync(file.fileno())

    def left_out(self, shard: int) -> list[FailedSample]:
        """The samples that a shard of this process leaves out, by ascending index."""
        indices = self.plan.indices_of(shard)
        return [self.skipped[index] for index in sorted(self.skipped) if index in indices]

    def complete(self, shard: int) -> None:
        """Give the shard that this process has written, and its report, their lasting names.

        If another process has finished the same shard before, its files stay and this process's are removed.

        Raises:
            CacheError: The directory was removed or replaced meanwhile.
        """
        name = shard_name(self.plan, shard)
        with writing(self.path):
            if not self._is_followed():
                raise self.removed()
            left_out = self.left_out(shard)
            if left_out:
                report = report_name(name, runs_of([sample.index for sample in left_out]))
                write_new(self._own(report), report_text(left_out).encode())
                self._rename(os.path.basename(self._own(report)), report)
            if not self._link(name) and self.finished(shard) is None:
                # The name has a damaged shard, or a shard of another build.
                self._rename(os.path.basename(self._own(name)), name)
            os.fsync(self._fd)
            self._discard(shard)

    def was_removed(self, shard: int, error: CacheError) -> bool:
        """Whether an error comes from the removal of the directory, or of this process's file."""
        if os.path.exists(self.shard_path(shard)):
            return False
        return isinstance(error.__cause__, FileNotFoundError) or not self._is_followed()

    def _discard(self, shard: int) -> None:
        """Remove this process's own files of a shard."""
        name = shard_name(self.plan, shard)
        for own in (self._own(name), self._own(report_name(name))):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.basename(own), dir_fd=self._fd)

    def _own_names(self, fd: int) -> list[str]:
        return [name for name in os.listdir(fd) if is_written_here(name)]

    def _own(self, name: str) -> str:
        """The path at which this process writes a file that gets this name."""
        return os.path.join(self.path, f".{name}.{self._suffix}")

    def _rename(self, name: str, new: str) -> None:
        os.rename(name, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def _link(self, name: str) -> bool:
        """Give this process's own file its lasting name too; returns False if a file has that name already.

        Raises:
            CacheError: The file system makes no hard links, by which several machines agree.
        """
        own = os.path.basename(self._own(name))
        try:
            os.link(own, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            if self.is_shared:
                raise CacheError(
                    f"cannot write the cache {self.path}: the file system does not make hard links "
                    f"({error.strerror}), by which processes agree on one plan: give a path on another file "
                    "system"
                ) from error
            if os.path.lexists(os.path.join(self.path, name)):
                return False
            self._rename(own, name)
        return True

    def _is_followed(self) -> bool:
        """Whether the directory still has the plan that this process follows."""
        plan = (self._read_plan() or {}).get("plan")
        return isinstance(plan, dict) and plan.get("build_id") == self.plan.build_id

    def removed(self) -> CacheError:
        """The error that another process removed the directory, or this process's file in it."""
        return CacheError(
            f"{self.path} was removed while a shard was built in it, for example by 'fastload cache rm': "
            "build again"
        )

    # --- the end ------------------------------------------------------------------------------------------

    def publish(self, left_out: list[FailedSample]) -> None:
        """Move the finished cache to its destination, after the report of errors was placed beside it.

        Args:
            left_out: The samples that all shards leave out, by ascending index.
        """
        destination = self._destination
        report = f"{destination}.errors.jsonl"
        if os.path.lexists(destination):
            raise CacheError(
                f"{destination} was made by another program while the cache was built, and was not changed. "
                f"The finished cache is kept at {self.path}: move {destination} away, and build again"
            )
        with writing(destination):
            if left_out:
                own = self._own(report_name(shard_name(self.plan, 0)))
                write_new(own, report_text(left_out).encode())
                os.replace(own, report)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(report)  # the report of an older cache
            if self.plan.num_shards > 1:
                os.rename(self.path, destination)
                sync_directory(os.path.dirname(destination))
                remove_all_but_shards(destination)
            else:
                os.rename(os.path.join(self.path, shard_name(self.plan, 0)), destination)
                sync_directory(os.path.dirname(destination))
                shutil.rmtree(self.path)

    def remove_unused(self) -> None:
        """Remove the directory of a build by one process in which nothing was stored."""
        if not self.is_shared:  # other machines may be at work on it
            with contextlib.suppress(OSError):  # the error of the build is raised
                shutil.rmtree(self.path)

    def remove(self) -> None:
        """Remove the files that a build made there.

        Raises:
            CacheBusyError: A process of this machine writes one of them.
            CacheError: There are also files that no build made; nothing is removed.
        """
        if not self._open_directory():
            return
        if self._own_names(self._fd):
            raise CacheBusyError(
                f"shards of {self._destination} are being built on this machine: wait until they are finished"
            )
        shutil.rmtree(self.path)
        self.close()
