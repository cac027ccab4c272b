"""The commands `fastload cache ...`.

If an argument names nothing, or the wrong kind of object, the usage is wrong; if a file exists but cannot be
read, the command fails. A line about a problem also says what to change.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fastload.cli.arguments import Size, Source, cache_file, new_cache_file
from fastload.cli.source_argument import is_folder, open_source
from fastload.cli.terminal import APP, Answer, CommandError, ExitCode, answers, is_quiet
from fastload.system.humanize import fastload_command, readable_size, table
from fastload.system.logs import log
from fastload.system.paths import is_url

if TYPE_CHECKING:
    from fastload.cache.inventory import CacheOnDisk

app = typer.Typer(help="Build and manage caches of decoded samples and files.", **APP)

# --- building --------------------------------------------------------------------------------------------


@answers(app)
def build(
    source: Source,
    dest: Annotated[
        str,
        typer.Argument(parser=new_cache_file, metavar="DEST", help="The file of the cache."),
    ],
    size: Size = None,
    num_workers: Annotated[
        int | None,
        typer.Option(min=0, help="Number of processes that decode; default: one per CPU, at most 16."),
    ] = None,
    on_error: Annotated[
        Literal["raise", "skip"],
        typer.Option(
            help="How to handle a sample that cannot be read: 'raise' ends the build, 'skip' leaves it out "
            "and writes its path and the reason to DEST.errors.jsonl.",
        ),
    ] = "raise",
    max_errors: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e9,
            show_default="0.01",
            help="With --on-error skip: how many samples of the whole cache can be left out, or below 1, "
            "their share.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Build it anew beside a cache at DEST, and replace that at the end."),
    ] = False,
    by: Annotated[
        Literal["sample", "file"],
        typer.Option(
            help="What is cached: 'sample', or 'file', the decoded pixels of the files that SOURCE reads, "
            "for DataLoader(..., cache='lmdb:DEST'). The images of a folder are read as torchvision's "
            "ImageFolder reads them.",
        ),
    ] = "sample",
) -> Answer:
    """Decode every sample of SOURCE once, into a cache at DEST, which appears when it is complete.

    While another process builds it, the command waits, and then compares it.
    """
    from fastload.cache.build import build_files, build_lmdb
    from fastload.cache.fingerprint import fingerprint_of
    from fastload.cache.inventory import look
    from fastload.images.opened_files import OpenedImages
    from fastload.readers.request import CACHE_VARIABLE, requested_cache

    options: dict[str, Any] = {"num_workers": num_workers, "on_error": on_error, "force": force}
    options["progress"] = not is_quiet()
    if max_errors is not None:
        if on_error == "raise":
            raise CommandError("--max-errors is for --on-error skip: add it, or omit --max-errors")
        options["max_errors"] = max_errors if 0 < max_errors < 1 else int(max_errors)
    if by == "file":
        if size is not None:
            raise CommandError("--size is for caches of samples: omit it, or --by file")
        if is_folder(source) and is_url(source):
            raise CommandError("with --by file, SOURCE is on this machine: pass a path")
        try:
            is_off = requested_cache("ram") is None
        except ValueError as error:
            raise CommandError(str(error)) from error
        if is_off:
            raise CommandError(f"{CACHE_VARIABLE}=off turns off what --by file fills: unset it")
    was_built, started_s = force or not os.path.exists(dest), time.monotonic()
    with warnings.catch_warnings():
        # The user chose the number of workers, or it is the number of cores.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        if by == "sample":
            dataset = open_source(source, size)
            build_lmdb(dataset, dest, fingerprint=fingerprint_of(dataset), **options).close()
        else:
            build_files(OpenedImages(source) if is_folder(source) else open_source(source), dest, **options)
    details, elapsed_s = _details(look(dest)), round(time.monotonic() - started_s, 3)
    done = f"built in {elapsed_s:,.1f} s" if was_built else "exists already and matches"
    # If it was built, the log has a line about the skipped samples.
    skipped = [] if was_built else _skipped(details)
    lines = [f"{dest}: {done}: {_content(details)}", *skipped, _training(details)]
    return Answer({**details, "was_built": was_built, "elapsed_s": elapsed_s}, lines)


# --- caches that are there -------------------------------------------------------------------------------

CachePath = Annotated[
    str,
    typer.Argument(parser=cache_file, metavar="PATH", help="The file of a cache."),
]


@answers(app, short_help="Check the checksum of every record.")
def verify(path: CachePath) -> Answer:
    """Read the whole cache: check its structure, and compare every record with its checksum."""
    from fastload.cache.finished import KIND, open_existing, open_finished
    from fastload.cache.inventory import damaged_keys

    store = open_existing(path)
    is_by_sample = store.meta["kind"] == KIND
    if is_by_sample:
        open_finished(path)  # what it says of itself
    damaged = damaged_keys(store, shown=not is_quiet())
    keys = [int.from_bytes(key, "big") if is_by_sample else key.hex() for key in damaged]
    result = {"path": path, "num_records": store.num_records, "num_damaged": len(keys), "damaged": keys}
    if not damaged:
        return Answer(result, [f"{path}: {store.num_records:,} records, none damaged"])
    cure = f"remove it with {fastload_command('cache', 'rm', path)}, and build it again"
    line = f"{path}: {len(damaged):,} of {store.num_records:,} records are damaged: {cure}"
    return Answer(result, [line], ExitCode.FAILED)


@answers(app, short_help="List the caches in memory and in a directory, or show one.")
def ls(
    path: Annotated[
        str | None,
        typer.Argument(
            parser=cache_file,
            metavar="PATH",
            help="List the caches on disk in this directory, and none in memory; subfolders are not "
            "searched. Of a cache at this path, show what it holds and what it was made of.",
        ),
    ] = None,
) -> Answer:
    """List your caches in memory, and the caches and unfinished builds in the working directory.

    Caches in memory are those that your running processes share.
    """
    from fastload.cache.inventory import list_caches

    lines, result = ([], {}) if path is not None else _in_memory()
    directory = os.path.realpath(path or ".")
    caches = list_caches(directory)
    result["disk"] = details = [_details(cache) for cache in caches]
    if path is not None and [cache.path for cache in caches] == [directory]:
        return Answer(result, _shown(details[0]))
    rows = [[item["path"], item["state"], _content(item)] for item in details]
    return Answer(result, [*lines, *(table(rows) if rows else [f"no caches in {directory}"])])


def _shown(details: dict[str, Any]) -> list[str]:
    """All that is known of a cache on disk."""
    rows = [["path", details["path"]], ["state", details["state"]], ["holds", _content(details)]]
    if details.get("created_s"):
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(details["created_s"]))
        rows.append(["made", made])
    if details.get("parts"):
        rows += [["made of", ""], *([f"  {name}", value] for name, value in details["parts"].items())]
    skipped = _skipped(details)
    return [*table(rows), *skipped, *([_training(details)] if skipped else [])]


def _in_memory() -> tuple[list[str], dict[str, Any]]:
    from fastload.cache.ram.registry import live

    caches = live()
    rows = [
        [
            cache["label"] or "decoded files",
            cache["key"] or cache["name"],
            f"{_count(cache)}, {readable_size(cache['nbytes'])}",
            f"at most {readable_size(cache['max_bytes'])}",
            f"used by process {', '.join(map(str, cache['users']))}",
        ]
        for cache in caches
    ]
    return table(rows) if rows else ["no caches in memory"], {"memory": caches}


@answers(app, short_help="Remove caches or unfinished builds.")
def rm(
    paths: Annotated[
        list[str],
        typer.Argument(parser=cache_file, metavar="PATH", help="Caches."),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> Answer:
    """Remove caches or unfinished builds, with their reports of errors.

    Files that are not fastload's stay, and so does a cache being built. Processes that have a cache open can
    continue to use it. A cache in memory is freed when the last process that holds it ends.
    """
    from fastload.cache import inventory

    paths = list(dict.fromkeys(paths))
    nbytes = sum(inventory.look(path, strict=True).nbytes for path in paths)  # raises before one is removed
    if not yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise CommandError(
                "nothing was removed: standard input is not a terminal to confirm on; add --yes"
            )
        question = f"remove {', '.join(paths)} and all files of it, {readable_size(nbytes)}?"
        if not typer.confirm(question, err=True):
            raise CommandError("nothing was removed", ExitCode.FAILED) from typer.Abort()
    removed = [inventory.remove(path) for path in paths]
    result = [{"path": one.path, "removed": one.files, "nbytes": one.nbytes} for one in removed]
    lines = [f"removed {one.path}: {readable_size(one.nbytes)}" for one in removed]
    return Answer({"caches": result}, lines)


@answers(app, short_help="Keep decoded files in memory between runs.")
def hold() -> Answer:
    """Hold the files that loaders with cache="ram" decode, so that the next run finds them in memory.

    Without it, they are freed when the last process that reads them ends. It decodes nothing itself, and
    holds what all your processes of this machine and container store, within their limits, until Ctrl-C.
    """
    from fastload.cache.ram.store import hold_store

    def log_start(num_files: int, nbytes: int) -> None:
        log.info("holding %s decoded files in %s until Ctrl-C", f"{num_files:,}", readable_size(nbytes))

    result = hold_store(log_start)
    nbytes = readable_size(result["nbytes"])
    return Answer(
        result, [f"held {result['num_files']:,} decoded files in {nbytes} for {result['held_s']:,} s"]
    )


# --- what a cache holds ----------------------------------------------------------------------------------


def _details(cache: CacheOnDisk) -> dict[str, Any]:
    """The `--json` output about a cache on disk."""
    from fastload.cache.decoded_files import count_files
    from fastload.cache.finished import KIND, Description
    from fastload.cache.inventory import REPORT

    found = {"path": cache.path, "state": cache.state, "nbytes": cache.nbytes, "problem": cache.problem}
    if cache.store is None:
        return found
    meta = cache.store.meta
    found |= {name: meta[name] for name in ("kind", "version", "created_s", "finished")}
    if meta["kind"] != KIND:
        num_cached, num_contents = count_files(cache.store)
        return {**found, "num_cached": num_cached, "num_contents": num_contents}
    description = asdict(Description.of(cache.store))
    num_skipped = len(description.pop("left_out"))
    report = cache.path + REPORT
    return {
        **found,
        **description,
        "num_cached": cache.store.num_records,
        "num_skipped": num_skipped,
        "report": report if os.path.exists(report) else None,
    }


def _content(details: dict[str, Any]) -> str:
    """The contents of a cache, in one line; from its details."""
    if details["problem"]:
        return f"{readable_size(details['nbytes'])}: {details['problem']}"
    return f"{_count(details)}, {readable_size(details['nbytes'])}"


def _count(details: dict[str, Any]) -> str:
    """How much a cache in memory or on disk holds."""
    if details["kind"] == "samples":
        return f"{details['num_cached']:,} of {details['num_samples']:,} samples"
    return f"{details['num_cached']:,} decoded files"


def _skipped(details: dict[str, Any]) -> list[str]:
    """A line that says how many samples were left out and where the reasons are; no line if none were."""
    if not details.get("num_skipped"):
        return []
    where = "the report no longer exists" if details["report"] is None else f"see {details['report']}"
    return [f"{details['num_skipped']:,} of {details['num_samples']:,} samples could not be read: {where}"]


def _training(details: dict[str, Any]) -> str:
    """How to train from a cache; if samples were left out, from the samples of the cache alone."""
    if details["kind"] != "samples":
        return f"train with it: fastload.DataLoader(dataset, ..., cache={'lmdb:' + details['path']!r})"
    code = f"train from it with fastload.CachedDataset.from_cache({details['path']!r})"
    if not details["num_skipped"]:
        return f"{code}; a random transform is its second argument"
    return (
        f"{code}, which leaves out the samples that could not be read; CachedDataset(dataset, ...) would "
        "read them from the dataset again and fail"
    )
