"""Builds a cache at a URL: shard by shard on the local disk, each uploaded when finished.

See `lmdb.manifest` for the files at the URL. Rules:

1. The plan is written to the URL first, again after each uploaded shard, and the manifest last. A build that
   finds a plan follows it, and builds only the missing shards; it never follows a plan of other samples or
   settings.
2. A shard is in the plan once all of it is at the URL. So a partial shard is never taken for a shard,
   whatever the store shows.
3. One thread uploads while the next shard is built. At most two finished shards wait for it, so the disk
   holds three shards. Uploaded shards are removed from the disk. A cache that is also kept on the disk is
   built there first.
4. One process of a host builds for a URL: it holds a lock, which forked workers do not inherit. Two hosts
   that build the same plan write the same shards. The plan is compared again before each shard is uploaded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastload.cache.build.build import Build, build_lmdb
from fastload.cache.build.staging import (
    REPORT,
    StagingDirectory,
    only_builder,
    parse_report,
    read_report,
    report_text,
)
from fastload.cache.build.writer import writing
from fastload.cache.lmdb.description import why_different
from fastload.cache.lmdb.files import MANIFEST_NAME, PARTIAL_SUFFIX, shard_name
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.lmdb.manifest import (
    REMOTE_PLAN_NAME,
    REMOTE_REPORT_NAME,
    Manifest,
    manifest_text,
    read_manifest,
    remote_files,
    shard_file,
)
from fastload.cache.lmdb.mirror import DIRECTORY_VARIABLE, digest_of_url, own_directory
from fastload.errors import CacheError, CacheMismatchError, RemoteFolderError
from fastload.system.disk import make_private_directory
from fastload.system.logs import log
from fastload.system.notes import add_note

if TYPE_CHECKING:
    from concurrent.futures import Future

    from fastload.batch.failures import FailedSample
    from fastload.cache.lmdb.description import Plan
    from fastload.files.remote import RemoteFolder

_REMOVE = "use a different URL, or remove all files at that URL with your store's own tool"


def build_at_url(dataset: Any, url: str, *, path: str | None = None, **options: Any) -> tuple[Manifest, bool]:
    """The cache of a dataset at a URL: built and uploaded, unless it is there already.

    Args:
        dataset: Map-style and deterministic.
        url: Any fsspec URL to which files can be written.
        path: Where the cache is built and also kept on the local disk; None to keep no uploaded shards.
        **options: See `Build`. The report about left-out samples is `errors.jsonl` below the URL.

    Returns:
        The manifest, and whether this call has written it.

    Raises:
        CacheMismatchError: The URL or the path has a cache, or a build, of other samples or settings.
        CacheCorruptError: The plan or the manifest at the URL is damaged.
        CacheBusyError: Another process of this host builds for this URL, and `wait` is False.
        UnsupportedSampleError: A value in a sample cannot be cached.
        CacheError: The local disk or the store cannot be written; all finished shards are kept.
        TooManyFailuresError: More samples than `max_errors` allows could not be read; all finished shards are
            kept.
        ImportError: A package for the URL is missing.
        ValueError: An argument is invalid, or the URL has an unknown protocol.
    """
    files = remote_files(url)
    scratch = os.path.join(own_directory("builds"), digest_of_url(files.url))
    build = Build(dataset, path or scratch, kept=files.url, **options)
    try:
        with contextlib.ExitStack() as stack:
            with writing(scratch):
                make_private_directory(os.path.dirname(scratch))
            stack.enter_context(only_builder(scratch, files.url, wait=build.wait))
            finished = _read(files, MANIFEST_NAME)
            existing = finished or _read(files, REMOTE_PLAN_NAME)
            if path is not None:
                _check_one_build(files.url, existing, path)
                with contextlib.closing(build_lmdb(dataset, path, **options)) as cache:
                    manifest = finished or _upload_cache(_Upload(files, existing, cache.description), cache)
                return manifest, not finished
            plan = build.plan(None if existing is None else existing.plan)
            if existing is not None and (why := why_different(existing.plan, plan)) is not None:
                state = "an unfinished build" if finished is None else "a finished cache"
                raise CacheMismatchError(
                    f"{files.url} has {state} of other samples or settings: {why} (here: this command, "
                    f"there: the URL). Nothing was changed: build with its samples and settings, {_REMOVE}"
                )
            manifest = finished or _build(build, _Upload(files, existing, plan))
            shutil.rmtree(scratch + PARTIAL_SUFFIX, ignore_errors=True)
            return manifest, not finished
    except RemoteFolderError as error:
        raise CacheError(f"{error}. {build.kept}: build again to resume") from error
    except CacheError as error:
        if scratch in str(error):
            add_note(error, f"The environment variable {DIRECTORY_VARIABLE} names the directory for builds")
        raise


def _read(files: RemoteFolder, name: str) -> Manifest | None:
    try:
        return read_manifest(files, name)
    except FileNotFoundError:
        return None


def _check_one_build(url: str, existing: Manifest | None, path: str) -> None:
    """Check that a local cache is of the build whose files are at the URL."""
    if existing is None:
        return
    if not os.path.lexists(path) or LMDBCache(path).description.build_id != existing.plan.build_id:
        raise CacheMismatchError(f"{url} has a different build from {path}: omit the local DEST, {_REMOVE}")


def _upload_cache(upload: _Upload, cache: LMDBCache) -> Manifest:
    """Upload the shards of a cache on the disk."""
    report = read_report(cache.path + REPORT)
    for shard in upload.missing():
        file, plan = cache.path, cache.description
        if os.path.isdir(file):
            file = os.path.join(file, shard_name(plan, shard))
        upload.put(shard, file, _left_out_of(plan, shard, report))
    return upload.finish()


def _left_out_of(plan: Plan, shard: int, report: list[FailedSample]) -> list[FailedSample]:
    indices = plan.indices_of(shard)
    return [sample for sample in report if sample.index in indices]


def _build(build: Build, upload: _Upload) -> Manifest:
    """Build the shards that are not at the URL; each is removed from the disk once uploaded."""
    plan, local = upload.manifest.plan, StagingDirectory(build.path)
    uploads: list[Future[None]] = []
    for shard, left_out in upload.left_out.items():
        build.check_may_leave_out(shard, left_out)
        build.left_out += left_out
    with contextlib.suppress(CacheMismatchError):
        if not local.open() or local.plan.build_id != plan.build_id:
            shutil.rmtree(local.path, ignore_errors=True)
    local.begin(plan)

    def put(shard: int, left_out: list[FailedSample]) -> None:
        upload.put(shard, local.path_of(shard), left_out)
        os.unlink(local.path_of(shard))

    def completed(shard: int, left_out: list[FailedSample]) -> None:
        for earlier in uploads:
            earlier.result()  # waits for room on the disk, and raises the error of an upload
        uploads.append(thread.submit(put, shard, left_out))

    try:
        build.check_budget(plan)
        with ThreadPoolExecutor(1, "fastload-upload") as thread:
            build.write(local, upload.missing(), f"building {upload.manifest.url}", completed)
            for future in uploads:
                future.result()
    except BaseException as error:
        add_note(error, f"{build.kept}: build again to resume")
        raise
    return upload.finish()


class _Upload:
    """Uploads the shards of a cache.

    Args:
        files: The files at the URL.
        existing: What is already there; None for nothing.
        plan: The plan of the cache, if nothing is there.

    Attributes:
        manifest: The plan, and the uploaded shards.
        left_out: By shard, the samples that it leaves out.
    """

    def __init__(self, files: RemoteFolder, existing: Manifest | None, plan: Plan) -> None:
        self.manifest = existing or Manifest(files.url, plan, ())
        self.left_out: dict[int, list[FailedSample]] = {}
        self._files = files
        if existing is None:
            self._write_plan()
        elif existing.num_left_out:
            report = parse_report(files.load(REMOTE_REPORT_NAME).decode(errors="replace"))
            for shard in range(existing.plan.num_shards):
                self.left_out[shard] = _left_out_of(existing.plan, shard, report)

    def missing(self) -> list[int]:
        """The shards that are not uploaded."""
        names, plan = {shard.name for shard in self.manifest.shards}, self.manifest.plan
        return [shard for shard in range(plan.num_shards) if shard_name(plan, shard) not in names]

    def put(self, shard: int, path: str, left_out: list[FailedSample]) -> None:
        """Upload a shard, and note it in the plan."""
        plan = self.manifest.plan
        current = _read(self._files, REMOTE_PLAN_NAME)
        if current is None or current.plan.build_id != plan.build_id:
            raise CacheError(
                f"{self._files.url}/{REMOTE_PLAN_NAME} was removed or replaced while the cache was built, "
                "for example by a build on another machine: run one build, and build again"
            )
        file = shard_file(path, shard_name(plan, shard), len(left_out))
        self._files.put(file.name, path)
        self.left_out[shard] = left_out
        if left_out:
            report = [sample for number in sorted(self.left_out) for sample in self.left_out[number]]
            self._files.write(REMOTE_REPORT_NAME, report_text(report).encode())
        shards = sorted([*self.manifest.shards, file], key=lambda shard: shard.name)
        self.manifest = replace(self.manifest, shards=tuple(shards))
        self._write_plan()
        log.info("%s: %d of %d shards are uploaded", self._files.url, len(shards), plan.num_shards)

    def _write_plan(self) -> None:
        self._files.write(REMOTE_PLAN_NAME, manifest_text(self.manifest))

    def finish(self) -> Manifest:
        """Write the manifest."""
        num_left_out, url = self.manifest.num_left_out, self._files.url
        if num_left_out:
            log.warning(
                "%d of %d samples could not be read and are left out: see %s/%s",
                *(num_left_out, self.manifest.plan.num_samples, url, REMOTE_REPORT_NAME),
            )
        self._files.write(MANIFEST_NAME, manifest_text(self.manifest))
        return self.manifest
