"""The manifest of a cache in an object store: `cache.json`, written after all shards.

A cache at a URL has these files directly below the URL:

    plan.json                   as the manifest, with the shards uploaded so far; written after each
    00000-of-00004.lmdb         a shard, as on disk
    errors.jsonl                samples that were left out, if there are any
    cache.json                  the manifest: the plan, and name, length and digest of each shard

Rules:

1. Without a manifest the cache is not finished. A shard whose length or digest differs from the manifest is
   never used.
2. A manifest can come from an untrusted source. The names of its shards are derived from the plan, so they
   are never paths, and every field must have its type and range.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fastload.cache.lmdb.description import FORMAT_VERSION, parse_plan, parse_versioned
from fastload.cache.lmdb.files import MANIFEST_NAME, shard_name
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError, RemoteFolderError
from fastload.files.remote import RemoteFolder
from fastload.system.checks import TEXT, Check, check_fields, integer
from fastload.system.humanize import fastload_command
from fastload.system.notes import short_repr

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastload.cache.lmdb.description import Plan

REMOTE_PLAN_NAME = "plan.json"
REMOTE_REPORT_NAME = "errors.jsonl"

_DIGEST_BYTES = 32
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * _DIGEST_BYTES}}}")
_BUILD_ID = re.compile(r"[0-9a-f]{1,32}")
_MAX_BYTES = 1 << 60
_S3_PARTS = 10  # of a shard, that s3fs writes at the same time


@dataclass(frozen=True)
class ShardFile:
    """A shard in an object store.

    Attributes:
        name: Its name below the URL.
        nbytes: Its length.
        blake2b: The digest of its content, 32 bytes in hexadecimal digits.
        num_left_out: How many of its samples are left out.
    """

    name: str
    nbytes: int
    blake2b: str
    num_left_out: int


@dataclass(frozen=True)
class Manifest:
    """A finished cache in an object store, as its manifest describes it.

    Attributes:
        url: The URL.
        plan: The plan of the cache.
        shards: Its shards, in the order of their indices; for an unfinished cache, the uploaded ones.
    """

    url: str
    plan: Plan
    shards: tuple[ShardFile, ...]

    @property
    def nbytes(self) -> int:
        """The size of all shards."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def num_left_out(self) -> int:
        """How many samples are left out."""
        return sum(shard.num_left_out for shard in self.shards)


def remote_files(url: str, storage_options: Mapping[str, Any] | None = None) -> RemoteFolder:
    """The files of a cache at a URL; opens no connection."""
    in_parts = {"max_concurrency": _S3_PARTS} if url.startswith(("s3://", "s3a://")) else {}
    return RemoteFolder(url, {**in_parts, **(storage_options or {})})


def new_digest() -> Any:
    """A digest that is updated with the content of a shard."""
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def shard_file(path: str, name: str, num_left_out: int) -> ShardFile:
    """The facts about a shard that lies at a path of this machine."""
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, new_digest)
        return ShardFile(name, file.tell(), digest.hexdigest(), num_left_out)


def manifest_text(manifest: Manifest) -> bytes:
    """The content of `cache.json`, or of `plan.json` while shards are missing."""
    fields = {"version": FORMAT_VERSION, **asdict(manifest)}
    return json.dumps(fields, indent=1).encode("ascii")


def parse_manifest(text: bytes, *, is_finished: bool = True) -> Manifest:
    """Read a manifest.

    Args:
        text: The text.
        is_finished: Whether all shards should be listed.

    Raises:
        ValueError: It is not valid; the error gives the reason.
        CacheMismatchError: It has a different format version. The caller adds the URL.
    """
    fields = parse_versioned(text)
    plan = parse_plan(fields.get("plan"))
    if not _BUILD_ID.fullmatch(plan.build_id):
        raise ValueError(f"build_id should be hexadecimal digits, but is {plan.build_id[:40]!r}")
    entries, url = fields.get("shards"), fields.get("url")
    if not isinstance(entries, list) or not isinstance(url, str):
        raise ValueError("it should have a url and a list of shards")
    shards = tuple(_parse_shard(entry, plan) for entry in entries)
    names = [shard.name for shard in shards]
    if names != sorted(set(names)) or (is_finished and len(names) != plan.num_shards):
        raise ValueError(f"it should list {plan.num_shards:,} shards in their order")
    return Manifest(url, plan, shards)


_SHARD_FIELDS = {
    "name": TEXT,
    "nbytes": integer(0, _MAX_BYTES),
    "blake2b": Check(
        f"{2 * _DIGEST_BYTES} hexadecimal digits",
        lambda text: type(text) is str and bool(_DIGEST.fullmatch(text)),
    ),
    "num_left_out": integer(0, _MAX_BYTES),
}


def _parse_shard(fields: Any, plan: Plan) -> ShardFile:
    check_fields(fields, _SHARD_FIELDS, "a shard")
    shard = ShardFile(**fields)
    digits = shard.name.partition("-")[0]
    number = int(digits) if digits.isdecimal() else plan.num_shards
    if number >= plan.num_shards or shard.name != shard_name(plan, number):
        raise ValueError(f"no shard of this cache has the name {short_repr(shard.name)}")
    return shard


def read_manifest(files: RemoteFolder, name: str = MANIFEST_NAME) -> Manifest:
    """The manifest at a URL.

    Args:
        files: The files of the cache.
        name: `cache.json`, or `plan.json` for an unfinished cache.

    Raises:
        FileNotFoundError: There is no finished cache; the error names the command that builds one.
        CacheCorruptError: The manifest is damaged.
        CacheMismatchError: It has a different format version.
        CacheError: The store does not answer, or denies access.
        ImportError: A package is missing.
        ValueError: There is no such protocol.
    """
    try:
        text = files.load(name)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no finished cache at {files.url}, because it has no {MANIFEST_NAME}: build it, or "
            f"finish its build, with {fastload_command('cache', 'build', 'SOURCE', files.url)}"
        ) from None
    except RemoteFolderError as error:
        raise CacheError(str(error)) from error
    try:
        manifest = parse_manifest(text, is_finished=name == MANIFEST_NAME)
    except CacheMismatchError as error:
        raise CacheMismatchError(f"{files.url} {error}") from None
    except ValueError as error:
        raise CacheCorruptError(
            f"{files.url}/{name} is damaged: {error}. Remove all files at that URL, and build the cache again"
        ) from error
    # A bucket can be copied to another URL.
    return Manifest(files.url, manifest.plan, manifest.shards)
