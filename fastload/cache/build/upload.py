"""Builds a cache whose place is a URL: shard by shard on the local disk, uploaded as they are finished.

See `lmdb.manifest` for the files at the URL. Rules:

1. The plan is written to the URL first and the manifest last. A build that finds a plan follows it, and
   builds only the shards that are not at the URL; it never follows a plan of other samples or settings.
2. A shard counts as uploaded when the file with its length and digest is there, which is written after it,
   and the shard has that length. So a part of a shard is never taken for a shard, whatever the store shows.
3. One thread uploads while the next shard is built. At most two finished shards wait for it, so the disk
   holds three shards. Uploaded shards are removed from the disk. A cache that is also kept on the disk is
   built there first.
4. One process of a host builds for a URL: it holds a lock, which forked workers do not inherit. Two hosts
   that build the same plan write the same shards. The plan is compared again before the manifest is written.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastload.batch.failures import budget_exceeded, most_failures
from fastload.cache.build.build import build_lmdb, build_shard
from fastload.cache.build.differences import why_different
from fastload.cache.build.plan import as_stored, check_arguments, make_plan
from fastload.cache.build.reports import parse_report, read_report, report_text
from fastload.cache.build.unfinished import Unfinished
from fastload.cache.build.writer import writing
from fastload.cache.codecs import LOSSY, SOURCE
from fastload.cache.lmdb.copies import DIRECTORY_VARIABLE, digest_of_url, own_directory
from fastload.cache.lmdb.description import FORMAT_VERSION, check_version, parse_json, parse_plan
from fastload.cache.lmdb.files import MANIFEST_NAME, shard_name
from fastload.cache.lmdb.manifest import (
    REMOTE_PLAN_NAME,
    REMOTE_REPORT_NAME,
    Manifest,
    ShardFile,
    manifest_text,
    parse_shard,
    read_manifest,
    shard_file,
)
from fastload.cache.locks import held
from fastload.cache.record import record_parts
from fastload.errors import (
    CacheBusyError,
    CacheError,
    CacheMismatchError,
    RemoteFolderError,
    add_note,
)
from fastload.files.transfers import RemoteFiles
from fastload.nested.spec import flatten
from fastload.system.disk import make_private_directory
from fastload.system.logs import log
from fastload.system.sizes import readable_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastload.batch.failed_sample import FailedSample
    from fastload.cache.fingerprint import Fingerprint
    from fastload.cache.lmdb.description import Plan

SHARD_BYTES = 1 << 30  # of a shard, about, unless the user gives a number of shards
_MAX_WAITING = 2  # finished shards, for the upload
_QUESTIONS_AT_ONCE = 16
_REMOVE = "remove all files at that URL with your store's own tool"


@dataclass(frozen=True)
class _Uploaded:
    """A shard that is at the URL, and the samples that it leaves out."""

    shard: ShardFile
    left_out: list[FailedSample]


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
        CacheBusyError: Another process of this host builds for this URL.
        UnsupportedSampleError: A value in a sample cannot be cached.
        CacheError: The local disk or the store cannot be written; all finished shards are kept.
        ErrorBudgetError: More samples than the budget could not be read; all finished shards are kept.
        ImportError: A package for the URL is missing.
        ValueError: An argument has none of the forms above, or the URL has an unknown protocol.
    """
    check_arguments(codec, quality, shards, on_error, error_budget)
    files = RemoteFiles(url)
    root = own_directory("builds")
    scratch = os.path.join(root, digest_of_url(files.url))
    with _noting_directory(), writing(scratch):
        make_private_directory(root)
    with contextlib.ExitStack() as stack:
        with writing(scratch):
            is_ours = stack.enter_context(held(f"{scratch}.lock", by_process=True))
        if not is_ours:
            raise CacheBusyError(
                f"another process on this machine builds {files.url}: wait until it has finished"
            )
        with _as_cache_errors():
            job = _Job(
                _dataset=dataset,
                _files=files,
                _path=scratch if path is None else os.path.abspath(path),
                _keeps_local=path is not None,
                _codec=codec,
                _quality=quality,
                _shards=shards,
                _fingerprint=fingerprint,
                _on_error=on_error,
                _error_budget=error_budget,
            )
            return job.run(num_workers, shown=progress)


@contextlib.contextmanager
def _as_cache_errors() -> Iterator[None]:
    try:
        yield
    except RemoteFolderError as error:
        raise CacheError(
            f"{error}. Shards that were uploaded or finished are kept: build again to resume"
        ) from error


@contextlib.contextmanager
def _noting_directory() -> Iterator[None]:
    """Say how to build on another disk, if the local disk has refused."""
    try:
        yield
    except CacheError as error:
        if type(error) is CacheError and isinstance(error.__cause__, Exception):
            add_note(error, f"The environment variable {DIRECTORY_VARIABLE} names the directory for builds")
        raise


@dataclass
class _Job:
    """A build for a URL; the fields are the arguments of `build_at_url`."""

    _dataset: Any
    _files: RemoteFiles
    _path: str
    _keeps_local: bool
    _codec: str | None
    _quality: int | None
    _shards: int | None
    _fingerprint: Fingerprint | None
    _on_error: str
    _error_budget: int | float
    _probed: dict[int, Any] = field(default_factory=dict)

    def run(self, num_workers: int | None, *, shown: bool) -> tuple[Manifest, bool]:
        """Build and upload what is missing."""
        url = self._files.url
        found = self._read_plan()
        finished = self._read_manifest()
        if finished is not None and (found is None or found.build_id != finished.plan.build_id):
            found = finished.plan  # plan.json is not needed any more
        wanted = self._wanted(found)
        if found is not None and (why := why_different(found, wanted)) is not None:
            state = "a finished cache" if finished is not None else "an unfinished build"
            raise CacheMismatchError(
                f"{url} has {state} of other samples or settings: {why} (here: this command, there: the "
                f"URL). Nothing was changed: build with its samples and settings, give another URL, or "
                f"{_REMOVE}"
            )
        if finished is not None and not self._keeps_local:
            self._remove_scratch()  # a build may have been killed after it had written the manifest
            return finished, False
        plan = self._local_plan(found or wanted, found, num_workers, shown=shown)
        if found is None:
            fields = {"version": FORMAT_VERSION, "plan": asdict(plan)}
            self._files.write(REMOTE_PLAN_NAME, json.dumps(fields).encode("ascii"))
        if finished is None:
            uploaded = {} if found is None else self._uploaded(plan)
            self._check_left_out(uploaded)
            self._finish(plan, self._build(plan, uploaded, num_workers, shown=shown))
        if not self._keeps_local:
            self._remove_scratch()
        return read_manifest(self._files), finished is None

    def _remove_scratch(self) -> None:
        shutil.rmtree(f"{self._path}.partial", ignore_errors=True)

    # --- the plan -----------------------------------------------------------------------------------------

    def _read_plan(self) -> Plan | None:
        try:
            text = self._files.read(REMOTE_PLAN_NAME)
        except FileNotFoundError:
            return None
        try:
            fields = parse_json(text)
            check_version(fields)
            return parse_plan(fields.get("plan"))
        except CacheMismatchError as error:
            raise CacheMismatchError(f"{self._files.url} {error}") from None
        except ValueError as error:
            raise CacheMismatchError(
                f"{self._files.url}/{REMOTE_PLAN_NAME} is damaged, or not from a build of fastload "
                f"({error}): give another URL, or {_REMOVE}"
            ) from error

    def _read_manifest(self) -> Manifest | None:
        try:
            return read_manifest(self._files)
        except FileNotFoundError:
            return None

    def _wanted(self, found: Plan | None) -> Plan:
        """The plan of these samples and settings; where the user has none, the settings are those there."""
        codec = self._codec or ("raw" if found is None else found.codec)
        quality = self._quality
        if quality is None and found is not None and codec == found.codec:
            quality = found.quality
        self._codec = codec
        self._quality = quality if codec in LOSSY else None
        built_quality = check_arguments(codec, self._quality, None, "raise", 1.0)
        source, fingerprint = as_stored(self._dataset, self._fingerprint, codec)
        plan = make_plan(
            source,
            self._probed,
            codec=codec,
            quality=built_quality,
            shards=1,
            skips=self._on_error == "skip",
            fingerprint=fingerprint,
        )
        num_shards = self._shards
        if num_shards is None:
            num_shards = self._default_shards(plan, built_quality) if found is None else found.num_shards
        return replace(plan, num_shards=min(num_shards, max(1, plan.num_samples)))

    def _default_shards(self, plan: Plan, quality: int) -> int:
        if 0 not in self._probed:
            return 1
        codec = "raw" if plan.codec == SOURCE else plan.codec
        parts, _ = record_parts(*flatten(self._probed[0]), codec, quality)
        return max(1, math.ceil(sum(map(len, parts)) * plan.num_samples / SHARD_BYTES))

    def _local_plan(self, wanted: Plan, found: Plan | None, num_workers: int | None, *, shown: bool) -> Plan:
        """The plan to follow, after it was written to the local directory; builds a cache that is kept there.

        Args:
            wanted: The plan to follow unless the directory has one.
            found: The plan at the URL; None without one.
            num_workers: As in `build_lmdb`.
            shown: As in `build_lmdb`.
        """
        num_shards = self._shards
        if not (self._keeps_local and os.path.lexists(self._path)):
            with contextlib.closing(Unfinished(self._path)) as files:
                if not self._keeps_local:
                    self._remove_other_builds(files, wanted)
                with _noting_directory():
                    files.begin(wanted, self._error_budget, is_shared=True)
                self._check_one_build(found, files.plan)
                if not self._keeps_local:
                    return files.plan
                num_shards = files.plan.num_shards
        source, fingerprint = as_stored(self._dataset, self._fingerprint, self._codec)
        cache = build_lmdb(
            source,
            self._path,
            num_workers=num_workers,
            progress=shown,
            probed=self._probed,
            codec=self._codec,
            quality=self._quality,
            shards=num_shards,
            on_error=self._on_error,
            error_budget=self._error_budget,
            fingerprint=fingerprint,
        )
        cache.close()
        self._check_one_build(found, cache.plan)
        return cache.plan

    def _remove_other_builds(self, files: Unfinished, plan: Plan) -> None:
        """Remove shards that were built for this URL by another plan, which is not there any more."""
        try:
            is_same = not files.open() or files.plan.build_id == plan.build_id
        except CacheMismatchError:  # of another release
            is_same = False
        if not is_same:
            shutil.rmtree(files.path)

    def _check_one_build(self, found: Plan | None, local: Plan) -> None:
        if found is not None and found.build_id != local.build_id:
            raise CacheMismatchError(
                f"{self._path} and {self._files.url} are of the same samples, but of two builds: omit the "
                f"local DEST, remove it with 'fastload cache rm {shlex.quote(self._path)}', or {_REMOVE}"
            )

    # --- shards -------------------------------------------------------------------------------------------

    def _uploaded(self, plan: Plan) -> dict[int, _Uploaded]:
        """The shards that are at the URL, complete and of this build."""

        def ask(shard: int) -> _Uploaded | None:
            name = shard_name(plan, shard)
            try:
                fields = parse_json(self._files.read(f"{name}.json"))
                if fields["build_id"] != plan.build_id:
                    return None
                found = parse_shard(fields, name)
                left_out = parse_report(fields["left_out"])
                if self._files.nbytes(name) not in (None, found.nbytes):
                    return None
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                return None
            return _Uploaded(found, left_out) if len(left_out) == found.num_left_out else None

        with ThreadPoolExecutor(_QUESTIONS_AT_ONCE, "fastload-shards") as threads:
            answers = threads.map(ask, range(plan.num_shards))
            return {shard: answer for shard, answer in enumerate(answers) if answer is not None}

    def _check_left_out(self, uploaded: dict[int, _Uploaded]) -> None:
        num_left_out = sum(len(one.left_out) for one in uploaded.values())
        if num_left_out and self._on_error == "raise":
            raise CacheMismatchError(
                f'shards at {self._files.url} were built before with on_error="skip", and leave out '
                f'{num_left_out:,} samples: build with on_error="skip" too, or {_REMOVE}'
            )

    def _build(
        self, plan: Plan, uploaded: dict[int, _Uploaded], num_workers: int | None, *, shown: bool
    ) -> list[_Uploaded]:
        """Build the missing shards, unless the cache is kept here, and upload them."""
        if uploaded:
            log.info("%s: %d of %d shards are there already", self._files.url, len(uploaded), plan.num_shards)
        left_out = [sample for one in uploaded.values() for sample in one.left_out]
        report = read_report(f"{self._path}.errors.jsonl") if self._keeps_local else []
        uploads: dict[int, Future[_Uploaded]] = {}
        with ThreadPoolExecutor(1, "fastload-upload") as thread:
            try:
                for shard in range(plan.num_shards):
                    if shard in uploaded:
                        continue
                    for upload in list(uploads.values())[: 1 - _MAX_WAITING]:
                        upload.result()  # waits for room on the disk, and raises the error of an upload
                    if self._keeps_local:
                        found = [sample for sample in report if sample.index in plan.indices_of(shard)]
                    else:
                        found = self._build_shard(plan, shard, num_workers, shown=shown)
                    uploads[shard] = thread.submit(self._upload, plan, shard, found)
                    left_out += found
                    self._check_budget(plan, left_out)
                uploaded |= {shard: upload.result() for shard, upload in uploads.items()}
            except BaseException:
                thread.shutdown(wait=False, cancel_futures=True)
                if any(upload.running() for upload in uploads.values()):
                    log.info("waiting for the upload that is in progress")
                raise
        return [uploaded[shard] for shard in range(plan.num_shards)]

    def _build_shard(
        self, plan: Plan, shard: int, num_workers: int | None, *, shown: bool
    ) -> list[FailedSample]:
        """Build a shard in the local directory; returns the samples that it leaves out."""
        with _noting_directory():
            build_shard(
                self._dataset,
                self._path,
                shard,
                plan.num_shards,
                num_workers=num_workers,
                progress=shown,
                probed=self._probed,
                codec=plan.codec,
                quality=self._quality,
                on_error=self._on_error,
                error_budget=self._error_budget,
                fingerprint=self._fingerprint,
                name=self._files.url,
            )
        with contextlib.closing(Unfinished(self._path)) as files:
            found = files.finished(shard) if files.open() else None
        if found is None:
            raise CacheError(
                f"shard {shard + 1} was removed from {self._path}.partial while it was built: build again"
            )
        return found

    def _upload(self, plan: Plan, shard: int, left_out: list[FailedSample]) -> _Uploaded:
        name = shard_name(plan, shard)
        directory = self._path if self._keeps_local else f"{self._path}.partial"
        local = os.path.join(directory, name) if os.path.isdir(directory) else directory
        found = shard_file(local, name, len(left_out))
        self._files.put(name, local)
        fields = {**asdict(found), "build_id": plan.build_id, "left_out": report_text(left_out)}
        self._files.write(f"{name}.json", json.dumps(fields).encode("ascii"))
        if not self._keeps_local:
            os.unlink(local)
        log.info(
            "%s: shard %d of %d is uploaded, %s",
            *(self._files.url, shard + 1, plan.num_shards, readable_size(found.nbytes)),
        )
        return _Uploaded(found, left_out)

    def _check_budget(self, plan: Plan, left_out: list[FailedSample]) -> None:
        most = most_failures(self._error_budget, plan.num_samples)
        if len(left_out) <= most:
            return
        raise budget_exceeded(
            len(left_out),
            most,
            plan.num_samples,
            left_out[-1],
            f"Finished shards are kept at {self._files.url}: raise the budget, and build again to resume; or "
            f"repair the files, {_REMOVE}, and build again",
        )

    def _finish(self, plan: Plan, uploaded: list[_Uploaded]) -> None:
        """Write the report and the manifest."""
        there = self._read_plan()
        if there is None or there.build_id != plan.build_id:
            raise CacheError(
                f"{self._files.url}/{REMOTE_PLAN_NAME} was removed or replaced while the cache was built, "
                "for example by a build on another machine: run one build, and build again"
            )
        left_out = [sample for one in uploaded for sample in one.left_out]
        if left_out:
            self._files.write(REMOTE_REPORT_NAME, report_text(left_out).encode())
            log.warning(
                "%s: %d of %d samples could not be read and are left out: see %s/%s",
                self._files.url,
                len(left_out),
                plan.num_samples,
                self._files.url,
                REMOTE_REPORT_NAME,
            )
        manifest = Manifest(self._files.url, plan, tuple(one.shard for one in uploaded))
        self._files.write(MANIFEST_NAME, manifest_text(manifest))
