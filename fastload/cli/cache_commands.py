"""Do the work of the `fastload cache` commands, and word their results.

Heavy modules are imported when a command runs. Rules:

1. If an argument names nothing, or the wrong kind of object, the usage is wrong; if a file exists but cannot
   be read, the command fails.
2. A line about a problem also says what to change.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import warnings
from typing import TYPE_CHECKING, Any

from fastload.cli.source_argument import SourceElsewhere, code_ended, is_folder, open_source
from fastload.cli.terminal import Answer, CommandError, ExitCode, table
from fastload.errors import CacheCorruptError, CacheMismatchError
from fastload.system.sizes import readable_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastload.cache.build.build import BuiltShard
    from fastload.cache.fingerprint import Fingerprint
    from fastload.cache.lmdb.description import Plan
    from fastload.cache.lmdb.lmdb_cache import LMDBCache
    from fastload.cache.lmdb.manifest import Manifest


# --- caches on disk --------------------------------------------------------------------------------------


def absolute(name: str, path: str) -> str:
    """The absolute path of an argument.

    Args:
        name: The name of the argument, for messages.
        path: The path as given.

    Raises:
        CommandError: The path is empty, or LMDB cannot open it because it is not valid UTF-8.
    """
    if not path:
        raise CommandError(f"{name} is empty: give a path")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise CommandError(f"{name} {path!a} is not valid UTF-8: give another name") from None
    return os.path.abspath(path)


def opened(path: str) -> LMDBCache:
    """The finished cache at a path.

    Raises:
        CommandError: There is no finished cache.
        CacheMismatchError: The path is not a cache, or shards are missing.
        CacheCorruptError: A file is damaged.
    """
    from fastload.cache.lmdb.lmdb_cache import LMDBCache

    if is_url(path):
        with _url_errors():
            return LMDBCache(path)
    path = absolute("PATH", path)
    try:
        return LMDBCache(path)
    except FileNotFoundError as error:
        is_unfinished = os.path.lexists(f"{path}.partial")
        raise CommandError(str(error), ExitCode.FAILED if is_unfinished else ExitCode.USAGE) from error
    except NotADirectoryError as error:
        raise CommandError(f"there is no cache at {path}: a part of that path is a file") from error
    except CacheMismatchError as error:
        if os.path.isdir(path):
            error.add_note(f"'fastload cache ls {shlex.quote(path)}' lists the caches in a directory")
        raise


def is_url(path: str) -> bool:
    """Whether an argument names a place that fsspec reads."""
    from fastload.files.remote import is_url

    return is_url(path)


def local(name: str, path: str, instead: str) -> str:
    """The absolute path of an argument that must not be a URL.

    Args:
        name: The name of the argument, for messages.
        path: The argument as given.
        instead: What to do with a URL.

    Raises:
        CommandError: It is a URL; or as for `absolute`.
    """
    if is_url(path):
        raise CommandError(f"{name} should be a path on this machine, but is {path}: {instead}")
    return absolute(name, path)


@contextlib.contextmanager
def _url_errors() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CommandError(str(error)) from error
    except CacheMismatchError:  # a ValueError, too
        raise
    except (ImportError, ValueError) as error:
        raise CommandError(str(error)) from error


def manifest_at(url: str) -> Manifest:
    """The manifest of the cache at a URL.

    Raises:
        CommandError: There is no finished cache, or the URL cannot be opened.
    """
    from fastload.cache.lmdb.manifest import read_manifest
    from fastload.files.transfers import RemoteFiles

    with _url_errors():
        return read_manifest(RemoteFiles(url))


def build_at_url(
    source: str, size: str | None, path: str | None, url: str, **options: Any
) -> tuple[Manifest, bool]:
    """The manifest of the cache at a URL, and whether the cache was built now.

    Args:
        source: The user's SOURCE, see `source_argument`.
        size: The user's `--size`; None if not given.
        path: The absolute path at which the cache is kept too; None for nowhere.
        url: The URL.
        options: Further arguments for `upload.build_at_url`.
    """
    from fastload.cache.build import upload
    from fastload.files.transfers import RemoteFiles

    with _url_errors():
        RemoteFiles(url).check()
    with _source_opened(source, size, path, options["codec"]) as (dataset, fingerprint):
        return upload.build_at_url(dataset, url, path=path, fingerprint=fingerprint, **options)


def build(source: str, size: str | None, path: str, **options: Any) -> LMDBCache:
    """The cache at an absolute path; built from SOURCE if it does not exist.

    Args:
        source: The user's SOURCE, see `source_argument`.
        size: The user's `--size`; None if not given.
        path: The path of the cache.
        options: Arguments for `build_lmdb`.
    """
    from fastload.cache.build.build import build_lmdb

    with _source_opened(source, size, path, options["codec"]) as (dataset, fingerprint):
        return build_lmdb(dataset, path, fingerprint=fingerprint, **options)


def build_on_ray(
    source: str, size: str | None, path: str, address: str, shards: int | None, **options: Any
) -> LMDBCache:
    """The cache at an absolute path; built on a Ray cluster if it does not exist.

    Args:
        source: The user's SOURCE, see `source_argument`.
        size: The user's `--size`; None if not given.
        path: The path of the cache.
        address: The user's `--ray`.
        shards: The user's `--shards`; None if not given.
        options: Further arguments for `ray_build.build`.

    Raises:
        CommandError: Ray is not installed, or there is no cluster.
    """
    from fastload.integrations import ray_build

    _check_directory(os.path.dirname(path))
    try:
        ray_build.imported()
    except ImportError as error:
        raise CommandError(f"--ray: {error}") from error
    try:
        return ray_build.build(
            SourceElsewhere(source, size, os.getcwd()), path, address=address, shards=shards, **options
        )
    except SystemExit as error:
        raise code_ended(source, error) from error
    except ConnectionError as error:
        raise CommandError(str(error), ExitCode.FAILED, "ConnectionError") from error
    except (CacheCorruptError, CacheMismatchError) as error:
        if _is_foreign(path):
            error.add_note("DEST exists already and is not a cache: give a path that does not exist yet")
        raise


def build_shard(
    source: str, size: str | None, path: str, shard: tuple[int, int], **options: Any
) -> BuiltShard:
    """One shard of the cache at an absolute path.

    Args:
        source: The user's SOURCE, see `source_argument`.
        size: The user's `--size`; None if not given.
        path: The path of the cache.
        shard: The shard, from 0, and the number of shards.
        options: Further arguments for `build_shard`.
    """
    from fastload.cache.build import build as builds

    with _source_opened(source, size, path, options["codec"]) as (dataset, fingerprint):
        return builds.build_shard(dataset, path, *shard, fingerprint=fingerprint, **options)


@contextlib.contextmanager
def _source_opened(
    source: str, size: str | None, path: str | None, codec: str | None
) -> Iterator[tuple[Any, Fingerprint | None]]:
    """The dataset of SOURCE and its fingerprint, to build a cache at a path, with the errors of a build.

    A path of None is that of a cache that is not kept on this machine.
    """
    from fastload.cache.codecs import SOURCE
    from fastload.cache.fingerprint import fingerprint_of
    from fastload.cache.random_check import refuse_random
    from fastload.cache.sources import decoded_source

    if path is not None:
        _check_directory(os.path.dirname(path))
    try:
        dataset = open_source(source, size)
        if not is_folder(source):
            refuse_random(dataset)
        with warnings.catch_warnings():
            # The user chose the number of workers, or it is the number of cores.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            fingerprint = fingerprint_of(dataset)
            yield dataset if codec == SOURCE else decoded_source(dataset), fingerprint
    except SystemExit as error:
        raise code_ended(source, error) from error
    except (CacheCorruptError, CacheMismatchError) as error:
        if path is not None and _is_foreign(path):
            error.add_note("DEST exists already and is not a cache: give a path that does not exist yet")
        raise


def parse_shard(text: str) -> tuple[int, int]:
    """The shard of `--shard I/N`, from 0, and the number of shards.

    Raises:
        CommandError: It is not I/N, or I is not from 1 to N.
    """
    first, slash, second = text.partition("/")
    if not slash or not first.isdecimal() or not second.isdecimal():
        raise CommandError(f"--shard should be I/N, such as 3/64, but got {text!r}")
    number, num_shards = int(first), int(second)
    if not num_shards:
        raise CommandError(f"--shard should be I/N with an N of at least 1, such as 3/64, but got {text!r}")
    if not 1 <= number <= num_shards:
        raise CommandError(
            f"--shard should be I/N with I from 1 to N, but got {text!r}: shards count from 1, so that the "
            f"last of {max(1, num_shards)} is {max(1, num_shards)}/{max(1, num_shards)}"
        )
    return number - 1, num_shards


def join(path: str, error_budget: int | float | None) -> LMDBCache:
    """The cache at an absolute path, made from its shards.

    Raises:
        CommandError: There is neither a cache nor a shard.
    """
    from fastload.cache.build import build as builds

    try:
        return builds.join(path, error_budget=error_budget)
    except FileNotFoundError as error:
        raise CommandError(str(error)) from error
    except NotADirectoryError as error:
        raise CommandError(f"there is no cache at {path}: a part of that path is a file") from error


def shard_facts(path: str, built: BuiltShard) -> dict[str, Any]:
    """The `--json` output of `build --shard`; shards count from 1, as in the option."""
    return {
        "path": path,
        "shard": built.shard + 1,
        "num_shards": built.num_shards,
        "num_samples": built.num_samples,
        "num_skipped": built.num_left_out,
        "nbytes": built.nbytes,
        "was_built": built.was_built,
        "is_joined": built.is_joined,
    }


def shard_lines(path: str, built: BuiltShard, elapsed_s: float) -> list[str]:
    """The result of `build --shard`, as text."""
    named = f"{path}: shard {built.shard + 1} of {built.num_shards}"
    if not built.num_samples:
        return [f"{named}: nothing to build, because the dataset has fewer samples than shards"]
    if built.is_joined and not built.was_built:
        return [f"{named}: the shards are joined already, and the cache matches"]
    done = f"built in {elapsed_s:,.1f} s" if built.was_built else "was built before"
    lines = [f"{named}: {done}: {built.num_samples:,} samples, {readable_size(built.nbytes)}"]
    if built.num_left_out:
        lines.append(
            f"{built.num_left_out:,} of {built.num_samples:,} samples could not be read: 'fastload cache "
            "join' writes the report"
        )
    return [*lines, f"when all shards are built, run 'fastload cache join {shlex.quote(path)}'"]


def sizing(source: str) -> tuple[dict[str, Any], list[str]]:
    """Which cache fits SOURCE: as plain data, and as text."""
    from fastload.cli.sizing import size_up

    try:
        found = size_up(open_source(source, None), source)
    except SystemExit as error:
        raise code_ended(source, error) from error
    except ValueError as error:
        raise CommandError(f"{source}: {error}") from error
    return found.as_dict(), found.lines()


def _check_directory(directory: str) -> None:
    if os.path.isdir(directory):
        return
    if os.path.lexists(directory):
        raise CommandError(f"DEST should lie in a directory, but {directory} is a file")
    raise CommandError(f"there is no directory at {directory}: make it first, or give another DEST")


def _is_foreign(path: str) -> bool:
    from fastload.cache.build import inventory

    try:
        inventory.files_of(os.path.realpath(path))
    except CacheMismatchError:
        return True
    except FileNotFoundError:
        pass
    return False


def interrupted(path: str) -> str:
    """The message after Ctrl-C."""
    if not os.path.exists(f"{path}.partial"):
        return "interrupted before anything was written"
    return (
        f"interrupted: the decoded samples are kept in {path}.partial. Run the same command again to "
        f"continue, or 'fastload cache rm {shlex.quote(path)}' to remove them"
    )


def interrupted_upload(url: str) -> str:
    """The message after Ctrl-C while a cache was built for a URL."""
    return f"interrupted: uploaded shards are kept at {url}. Run the same command again to continue"


def facts_at_url(manifest: Manifest) -> dict[str, Any]:
    """The `--json` output of `build` and `info` about a cache at a URL."""
    from fastload.cache.lmdb.manifest import REMOTE_REPORT_NAME

    report = f"{manifest.url}/{REMOTE_REPORT_NAME}" if manifest.num_left_out else None
    return _facts(manifest.url, manifest.plan, manifest.num_left_out, report, manifest.nbytes)


def facts(cache: LMDBCache) -> dict[str, Any]:
    """The `--json` output of `build` and `info`."""
    report = f"{cache.path}.errors.jsonl"
    num_skipped = cache.num_samples - cache.num_cached
    return _facts(
        cache.path, cache.plan, num_skipped, report if os.path.exists(report) else None, cache.nbytes
    )


def _facts(path: str, plan: Plan, num_skipped: int, report: str | None, nbytes: int) -> dict[str, Any]:
    return {
        "path": path,
        "num_samples": plan.num_samples,
        "num_cached": plan.num_samples - num_skipped,
        "num_skipped": num_skipped,
        "report": report,
        "nbytes": nbytes,
        "codec": plan.codec,
        "quality": plan.quality,
        "num_shards": plan.num_shards,
        "classes": plan.classes,
        "parts": None if plan.parts is None else dict(plan.parts),
        "created_s": plan.created_s,
    }


def held(found: dict[str, Any]) -> str:
    """The contents of a cache, in one line; from its facts."""
    quality = "" if found["quality"] is None else f" of quality {found['quality']}"
    shards = "" if found["num_shards"] == 1 else f" in {found['num_shards']} shards"
    size = f"{readable_size(found['nbytes'])}{shards}, {found['codec']}{quality}"
    return f"{found['num_cached']:,} of {found['num_samples']:,} samples, {size}"


def cure(path: str) -> str:
    """What to do about a damaged cache: a local copy is downloaded again."""
    from fastload.cache.build import inventory

    url = inventory.url_of_copy(path)
    if url is None:
        return "Remove the cache and build it again"
    return (
        f"Remove this copy with 'fastload cache rm {shlex.quote(path)}', and open {url} again, which "
        "downloads it again"
    )


def skipped(found: dict[str, Any]) -> list[str]:
    """A line that says how many samples were left out and where the reasons are; no line if none were."""
    if not found["num_skipped"]:
        return []
    where = "the report no longer exists" if found["report"] is None else f"see {found['report']}"
    return [f"{found['num_skipped']:,} of {found['num_samples']:,} samples could not be read: {where}"]


def training(found: dict[str, Any]) -> str:
    """How to train from a cache; if samples were left out, from the samples of the cache alone."""
    path = found["path"]
    if found["num_samples"] and not found["num_cached"]:
        remove = "remove its files" if is_url(path) else f"'fastload cache rm {shlex.quote(path)}'"
        return f"the cache is empty: look at the reasons, then {remove}"
    transform = "; a random transform is its second argument"
    if found["num_cached"] == found["num_samples"]:
        return f"train from it with fastload.CachedDataset.from_cache({path!r}){transform}"
    return (
        f"train from it with fastload.CachedDataset.from_cache({path!r}), which leaves these samples out"
        f"{transform}; CachedDataset(dataset, ...) would read them from the dataset again and fail"
    )


def list_disk(directory: str, answer: Answer) -> None:
    """Answer with the caches in a directory.

    Raises:
        CommandError: There is no such directory.
    """
    from fastload.cache.build import inventory

    path = local(
        "DIRECTORY", directory, f"'fastload cache info {shlex.quote(directory)}' shows the cache there"
    )
    try:
        found = inventory.list_caches(path)
    except FileNotFoundError as error:
        raise CommandError(f"there is no directory at {path}") from error
    except NotADirectoryError as error:
        raise CommandError(
            f"{path} is not a directory: give the directory in which to look for caches"
        ) from error
    rows = []
    for item in found:
        copied = "" if item.url is None else f", a copy of {item.url}"
        said = item.problem or f"run the build again to continue with {item.path}{inventory.PARTIAL}"
        said = "a build is running" if item.state == "building" and item.problem is None else said
        rows.append(
            [
                item.path,
                item.state,
                readable_size(item.nbytes),
                held(facts(item.cache)) + copied if item.cache else said,
            ]
        )
    answer.result = {
        "caches": [
            {
                **(facts(item.cache) if item.cache else {"path": item.path, "problem": item.problem}),
                "state": item.state,
                "nbytes": item.nbytes,
                **({} if item.url is None else {"url": item.url}),
            }
            for item in found
        ]
    }
    answer.lines = table(rows) if rows else [f"no caches in {path}"]


def removable_bytes(path: str) -> int:
    """Size of all files of the cache or unfinished build at an absolute path.

    Raises:
        CommandError: The path does not exist, or this user may not change its directory.
        CacheMismatchError: The path is not a cache.
    """
    from fastload.cache.build import inventory

    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(path)  # raises if a directory may not be entered; a search for the name would not
    try:
        files = inventory.files_of(path)
    except FileNotFoundError as error:
        raise CommandError(str(error)) from error
    directory = os.path.dirname(path)
    effective = os.access in os.supports_effective_ids
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=effective):
        raise CommandError(
            f"{path} was not removed: files in {directory} may not be removed by this user",
            ExitCode.FAILED,
            "PermissionError",
        )
    return inventory.size_of(files)


# --- caches in memory ------------------------------------------------------------------------------------


def list_memory(answer: Answer) -> None:
    """Answer with the caches that this user's processes share."""
    from fastload.cache.lmdb.copies import copies, copies_directory
    from fastload.cache.ram.registry import live_caches

    live = live_caches()
    names = (
        "name",
        "key",
        "parts",
        "owners",
        "num_samples",
        "num_cached",
        "nbytes",
        "budget_bytes",
        "created_s",
    )
    found = copies()
    nbytes = sum(copy.on_disk for copy in found)
    answer.result = {
        "caches": [{name: getattr(cache, name) for name in names} for cache in live],
        "copies": {"directory": copies_directory(), "number": len(found), "nbytes": nbytes},
    }
    rows = [
        [
            cache.key or cache.name,
            f"{cache.num_cached:,} of {cache.num_samples:,} samples",
            f"{readable_size(cache.nbytes)} of at most {readable_size(cache.budget_bytes)}",
            f"held by {', '.join(map(str, cache.owners))}",
        ]
        for cache in live
    ]
    answer.lines = (
        table(rows)
        if rows
        else [
            "no process of yours shares a cache in memory; 'fastload cache ls DIRECTORY' lists those on disk"
        ]
    )
    if found:
        answer.lines.append(
            f"{len(found)} local copies of caches at URLs take {readable_size(nbytes)}: 'fastload cache ls "
            f"{copies_directory()}' lists them"
        )
