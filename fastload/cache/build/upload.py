"""Builds a cache whose place is a URL: shard by shard on the local disk, uploaded as they are finished.

See `lmdb.manifest` for the files at the URL. Rules:

1. The plan is written to the URL first, again with each shard that is there, and the manifest last. A build
   that finds a plan follows it, and builds only the shards that it lacks; it never follows a plan of other
   samples or settings.
2. A shard is in the plan once the whole of it is at the URL. So a part of a shard is never taken for a shard,
   whatever the store shows.
3. One thread uploads while the next shard is built. At most two finished shards wait for it, so the disk
   holds three shards. Uploaded shards are removed from the disk. A cache that is also kept on the disk is
   built there first.
4. One process of a host builds for a URL: it holds a lock, which forked workers do not inherit. Two hosts
   that build the same plan write the same shards. The plan is compared again before each shard is uploaded.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import shlex
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastload.batch.failures import check_left_out
from fastload.cache.build.build import build_lmdb, build_shard
from fastload.cache.build.differences import why_different
from fastload.cache.build.plan import as_stored, check_arguments, make_plan
from fastload.cache.build.reports import parse_report, read_report, report_text
from fastload.cache.build.unfinished import Unfinished
from fastload.cache.build.writer import writing
from fastload.cache.codecs import SOURCE
from fastload.cache.lmdb.copies import DIRECTORY_VARIABLE, digest_of_url, own_directory
from fastload.cache.lmdb.files import MANIFEST_NAME, shard_name
from fastload.cache.lmdb.manifest import (
    REMOTE_PLAN_NAME,
    REMOTE_REPORT_NAME,
    Manifest,
    ShardFile,
    manifest_text,
    read_manifest,
    remote_files,
    shard_file,
)
from fastload.cache.locks import held
from fastload.cache.record import record_parts
from fastload.errors import CacheBusyError, CacheError, CacheMismatchError, RemoteFolderError, add_note
from fastload.nested.spec import flatten
from fastload.system.disk import make_private_directory
from fastload.system.logs import log
from fastload.system.sizes import readable_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastload.batch.failed_sample import FailedSample
    from fastload.cache.fingerprint import Fingerprint
    from fastload.cache.lmdb.description import Plan
    from fastload.files.remote import RemoteFolder

SHARD_BYTES = 1 << 30  # of a shard, about, unless the user gives a number of shards
_REMOVE = "remove all files at that URL with your store's own tool"


def build_at_url(
    dataset: Any,
    url: str,
    *,
    path: str | None = None,
    num_workers: int | None = None,
    progress: bool = True,
    codec: str | None = None,
    quality: int | None = None,
    shards: int | None = None,
    on_error: str = "raise",
    error_budget: int | float = 1.0,
    fingerprint: Fingerprint | None = None,
) -> tuple[Manifest, bool]:
    """The cache of a dataset at a URL: built and uploaded, unless it is there already.

    Args:
        dataset: Map-style and deterministic.
        url: Any URL of fsspec to which files can be written.
        path: Where the cache is built and kept on the local disk, too; None to keep no shard that was
            uploaded. A cache or an unfinished build of shards at the path is used.
        num_workers: As in `build_lmdb`.
        progress: As in `build_lmdb`.
        codec: As in `build_lmdb`.
        quality: As in `build_lmdb`.
        shards: Number of files of the cache; None for that of an earlier build at the URL, or else so many
            that a file has about 1 GiB, by the size of sample 0.
        on_error: As in `build_lmdb`; the report is `errors.jsonl` below the URL.
        error_budget: As in `build_lmdb`. The build ends after the shard that exceeds it.
        fingerprint: As in `build_lmdb`.

    Returns:
        The manifest, and whether this call has written it.

    Raises:
        CacheMismatchError: The URL or the path has a cache, or a build, of other samples or settings.
        CacheCorruptError: The plan or the manifest at the URL is damaged.
        CacheBusyError: Another process of this host builds for this URL.
        UnsupportedSampleError: A value in a sample cannot be cached.
        CacheError: The local disk or the store cannot be written; all finished shards are kept.
        ErrorBudgetError: More samples than the budget could not be read; all finished shards are kept.
        ImportError: A package for the URL is missing.
        ValueError: An argument has none of the forms above, or the URL has an unknown protocol.
    """
    check_arguments(codec, quality, shards, on_error, error_budget)
    files = remote_files(url)
    scratch = os.path.join(own_directory("builds"), digest_of_url(files.url))
    with _explained(is_scratch=path is None), contextlib.ExitStack() as stack:
        with writing(scratch):
            make_private_directory(os.path.dirname(scratch))
            is_ours = stack.enter_context(held(f"{scratch}.lock", by_process=True))
        if not is_ours:
            raise CacheBusyError(
                f"another process on this machine builds {files.url}: wait until it has finished"
            )
        options: dict[str, Any] = {
            "codec": codec,
            "quality": quality,
            "num_workers": num_workers,
            "progress": progress,
            "probed": {},
            "on_error": on_error,
            "error_budget": error_budget,
            "fingerprint": fingerprint,
        }
        local = None if path is None else os.path.abspath(path)
        job = _Job(dataset, files, scratch, local, shards, options)
        return job.run()


@contextlib.contextmanager
def _explained(*, is_scratch: bool) -> Iterator[None]:
    """Say how to go on after an error of the store, and how to build elsewhere after one of the disk."""
    try:
        yield
    except RemoteFolderError as error:
        raise CacheError(
            f"{error}. Shards that were uploaded or finished are kept: build again to resume"
        ) from error
    except CacheError as error:
        cause = error.__cause__
        is_of_disk = type(error) is CacheError and not isinstance(cause, RemoteFolderError | None)
        if is_scratch and is_of_disk:
            add_note(error, f"The environment variable {DIRECTORY_VARIABLE} names the directory for builds")
        raise


@dataclass
class _Job:
    """A build for a URL.

    Attributes:
        dataset: As in `build_at_url`.
        files: The files at the URL.
        scratch: How the paths of its files on the disk begin, where they are not kept.
        path: Where they are kept; None for nowhere.
        shards: As in `build_at_url`.
        options: Arguments of `build_lmdb` and `build_shard`.
    """

    dataset: Any
    files: RemoteFolder
    scratch: str
    path: str | None
    shards: int | None
    options: dict[str, Any]

    def run(self) -> tuple[Manifest, bool]:
        """Build and upload what is missing."""
        finished = self._read(MANIFEST_NAME)
        found = finished or self._read(REMOTE_PLAN_NAME)
        plan = self._wanted(None if found is None else found.plan)
        if found is not None and (why := why_different(found.plan, plan)) is not None:
            state = "an unfinished build" if finished is None else "a finished cache"
            raise CacheMismatchError(
                f"{self.files.url} has {state} of other samples or settings: {why} (here: this command, "
                f"there: the URL). Nothing was changed: build with its samples and settings, give another "
                f"URL, or {_REMOVE}"
            )
        plan = plan if found is None else found.plan
        if self.path is not None:
            plan = self._build_local(self.path, plan, is_there=found is not None)
        manifest = finished or self._upload_all(found or Manifest(self.files.url, plan, ()))
        self._remove_scratch()  # also that of a build that was killed at its end
        return manifest, finished is None

    def _read(self, name: str) -> Manifest | None:
        try:
            return read_manifest(self.files, name)
        except FileNotFoundError:
            return None

    def _wanted(self, found: Plan | None) -> Plan:
        """The plan of these samples and settings; where the user has none, the settings are those there."""
        options = self.options
        codec = options["codec"] = options["codec"] or ("raw" if found is None else found.codec)
        if options["quality"] is None and found is not None and codec == found.codec:
            options["quality"] = found.quality
        quality = check_arguments(codec, options["quality"], None, "raise", 1.0)
        source, fingerprint = as_stored(self.dataset, options["fingerprint"], codec)
        probed = options["probed"]
        plan = make_plan(
            source,
            probed,
            codec=codec,
            quality=quality,
            shards=1,
            skips=options["on_error"] == "skip",
            fingerprint=fingerprint,
        )
        num_shards = self.shards or (None if found is None else found.num_shards)
        if num_shards is None and 0 in probed:
            parts, _ = record_parts(*flatten(probed[0]), "raw" if codec == SOURCE else codec, quality)
            num_shards = math.ceil(sum(map(len, parts)) * plan.num_samples / SHARD_BYTES)
        return replace(plan, num_shards=max(1, min(num_shards or 1, plan.num_samples)))

    # --- on the disk --------------------------------------------------------------------------------------

    def _remove_scratch(self, kept: str | None = None) -> None:
        """Remove what was built for this URL, except by the plan with this id."""
        root, name = os.path.split(self.scratch)
        for other in os.listdir(root):
            if other.startswith(f"{name}-") and other != f"{name}-{kept}.partial":
                shutil.rmtree(os.path.join(root, other))

    def _build_local(self, path: str, plan: Plan, *, is_there: bool) -> Plan:
        """Build the cache that is kept on the disk, by the plan at the URL if there is one."""
        num_shards = self.shards
        if not os.path.lexists(path):
            num_shards = plan.num_shards
            if is_there:
                self._follow(path, plan)
        cache = build_lmdb(self.dataset, path, shards=num_shards, **self.options)
        cache.close()
        if is_there:
            self._check_one_build(path, plan, cache.plan)
        return cache.plan

    def _follow(self, path: str, plan: Plan) -> None:
        """Have the cache at a path built by a plan."""
        with contextlib.closing(Unfinished(path)) as files:
            files.begin(plan, self.options["error_budget"], is_shared=True)
            self._check_one_build(path, plan, files.plan)

    def _check_one_build(self, path: str, plan: Plan, local: Plan) -> None:
        if plan.build_id != local.build_id:
            raise CacheMismatchError(
                f"{path} and {self.files.url} are of the same samples, but of two builds: omit the "
                f"local DEST, remove it with 'fastload cache rm {shlex.quote(path)}', or {_REMOVE}"
            )

    def _built(self, plan: Plan, shards: list[int]) -> Iterator[tuple[int, str, list[FailedSample]]]:
        """Shards, each with its file on the disk and the samples that it leaves out."""
        if self.path is not None:
            left_out = _by_shard(plan, read_report(f"{self.path}.errors.jsonl"))
            is_one = os.path.isfile(self.path)
            for shard in shards:
                file = self.path if is_one else os.path.join(self.path, shard_name(plan, shard))
                yield shard, file, left_out[shard]
            return
        scratch = f"{self.scratch}-{plan.build_id}"
        self._remove_scratch(kept=plan.build_id)
        self._follow(scratch, plan)
        for shard in shards:
            built = build_shard(
                self.dataset, scratch, shard, plan.num_shards, name=self.files.url, **self.options
            )
            yield shard, os.path.join(f"{scratch}.partial", shard_name(plan, shard)), list(built.left_out)

    # --- at the URL ---------------------------------------------------------------------------------------

    def _upload_all(self, found: Manifest) -> Manifest:
        """Build the shards that are not at the URL, upload them, and write the manifest."""
        url, plan = found.url, found.plan
        report = b""
        if found.num_left_out:
            with contextlib.suppress(FileNotFoundError):  # then its shards are built again
                report = self.files.load(REMOTE_REPORT_NAME)
        left_out = _by_shard(plan, parse_report(report.decode(errors="replace")))
        listed = {shard.name: shard for shard in found.shards}
        there = {}
        for number in range(plan.num_shards):
            shard = listed.get(shard_name(plan, number))
            if shard is not None and shard.num_left_out == len(left_out[number]):
                there[number] = shard
            else:
                left_out[number] = []
        if any(left_out) and self.options["on_error"] == "raise":
            raise CacheMismatchError(
                f'shards at {url} were built before with on_error="skip", and leave out '
                f'{sum(map(len, left_out)):,} samples: build with on_error="skip" too, or {_REMOVE}'
            )
        if there:
            log.info("%s: %d of %d shards are there already", url, len(there), plan.num_shards)
        else:
            self.files.write(REMOTE_PLAN_NAME, manifest_text(found))
        missing = [number for number in range(plan.num_shards) if number not in there]
        with ThreadPoolExecutor(1, "fastload-upload") as thread:
            uploads: list[Future[None]] = []
            for number, file, left_out[number] in self._built(plan, missing):
                for upload in uploads:
                    upload.result()  # waits for room on the disk, and raises the error of an upload
                uploads.append(thread.submit(self._upload, plan, number, file, there, left_out))
                check_left_out(
                    [sample for samples in left_out for sample in samples],
                    self.options["error_budget"],
                    plan.num_samples,
                    f"Finished shards are kept at {url}: raise the budget, and build again to resume, or "
                    f"repair the files, {_REMOVE}, and build again",
                )
            for upload in uploads:
                upload.result()
        if any(left_out):
            log.warning(
                "%s: %d of %d samples could not be read and are left out: see %s/%s",
                *(url, sum(map(len, left_out)), plan.num_samples, url, REMOTE_REPORT_NAME),
            )
        manifest = Manifest(url, plan, tuple(there[number] for number in range(plan.num_shards)))
        self.files.write(MANIFEST_NAME, manifest_text(manifest))
        return manifest

    def _upload(
        self,
        plan: Plan,
        number: int,
        file: str,
        there: dict[int, ShardFile],
        left_out: list[list[FailedSample]],
    ) -> None:
        """Upload a shard, and note in the plan that it is there."""
        url = self.files.url
        followed = self._read(REMOTE_PLAN_NAME)
        if followed is None or followed.plan.build_id != plan.build_id:
            raise CacheError(
                f"{url}/{REMOTE_PLAN_NAME} was removed or replaced while the cache was built, for example by "
                "a build on another machine: run one build, and build again"
            )
        shard = shard_file(file, shard_name(plan, number), len(left_out[number]))
        self.files.put(shard.name, file)
        there[number] = shard
        report = report_text(sample for done in sorted(there) for sample in left_out[done])
        if report:
            self.files.write(REMOTE_REPORT_NAME, report.encode())
        shards = tuple(there[done] for done in sorted(there))
        self.files.write(REMOTE_PLAN_NAME, manifest_text(Manifest(url, plan, shards)))
        if self.path is None:
            os.unlink(file)
        size = readable_size(shard.nbytes)
        log.info("%s: shard %d of %d is uploaded, %s", url, number + 1, plan.num_shards, size)


def _by_shard(plan: Plan, report: list[FailedSample]) -> list[list[FailedSample]]:
    """The samples that each shard leaves out."""
    firsts = [plan.indices_of(number).start for number in range(plan.num_shards)]
    found: list[list[FailedSample]] = [[] for _ in firsts]
    for sample in report:
        found[bisect.bisect_right(firsts, sample.index) - 1].append(sample)
    return found
