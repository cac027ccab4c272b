"""The commands `fastload cache ...`.

If an argument names nothing, or the wrong kind of object, the usage is wrong; if a file exists but cannot be
read, the command fails. A line about a problem also says what to change.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fastload.cli.arguments import Size, Source, cache_file, duration, new_cache_file
from fastload.cli.source_argument import open_source, users_code
from fastload.cli.terminal import APP, Answer, CommandError, ExitCode, answers, is_quiet
from fastload.system.humanize import fastload_command, readable_size, table
from fastload.system.logs import log
from fastload.system.paths import is_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastload.cache.inventory import CacheOnDisk

app = typer.Typer(help="Build and manage caches of decoded samples and files.", **APP)

# --- building --------------------------------------------------------------------------------------------

NumWorkers = Annotated[
    int | None,
    typer.Option(min=0, help="Number of processes that decode; default: one per CPU, at most 16."),
]
OnError = Annotated[
    Literal["raise", "skip"],
    typer.Option(
        help="How to handle a sample that cannot be read: 'raise' ends the build, 'skip' leaves it out "
        "and writes its path and the reason to DEST.errors.jsonl; with --by file, to the log.",
    ),
]
_MAX_ERRORS = 0.01
MaxErrors = Annotated[
    float,
    typer.Option(
        min=0,
        max=1e9,
        help="With --on-error skip: how many samples of the whole cache can be left out, or below 1, their "
        "share.",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with code 3 if samples were skipped.")]


@answers(app, ExitCode.SKIPPED, ExitCode.BUSY)
def build(
    source: Source,
    dest: Annotated[
        str,
        typer.Argument(parser=new_cache_file, metavar="DEST", help="The file of the cache."),
    ],
    size: Size = None,
    num_workers: NumWorkers = None,
    on_error: OnError = "raise",
    max_errors: MaxErrors = _MAX_ERRORS,
    strict: Strict = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait",
            help="While another process builds the cache: wait and then compare it, or exit with code 75.",
        ),
    ] = True,
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
    """Decode every sample of SOURCE once, into a cache at DEST.

    DEST appears when it is complete.
    """
    if on_error == "raise" and max_errors != _MAX_ERRORS:
        raise CommandError("--max-errors is for --on-error skip: add it, or omit --max-errors")
    max_errors = max_errors if 0 < max_errors < 1 else int(max_errors)
    options: dict[str, Any] = {
        "num_workers": num_workers,
        "on_error": on_error,
        "max_errors": max_errors,
        "progress": not is_quiet(),
        "wait": wait,
        "force": force,
    }
    if by == "file":
        for option, value in {"--size": size, "--strict": strict or None}.items():
            if value is not None:
                raise CommandError(f"{option} is for caches of samples: omit it, or --by file")
        return _build_files(source, dest, **options)
    was_built = force or not os.path.exists(dest)
    started_s = time.monotonic()
    from fastload.cache.build import build_lmdb
    from fastload.cache.inventory import look

    with _opened(source, size) as (dataset, fingerprint):
        cache = build_lmdb(dataset, dest, fingerprint=fingerprint, **options)
    elapsed_s = time.monotonic() - started_s
    done = f"built in {elapsed_s:,.1f} s" if was_built else "exists already and matches"
    cache.close()
    details = _details(look(dest))
    skipped = _skipped(details)
    # If it was built, the log has a line about the skipped samples.
    lines = [
        f"{details['path']}: {done}: {_content(details)}",
        *([] if was_built else skipped),
        _training(details),
    ]
    result = {**details, "was_built": was_built, "elapsed_s": round(elapsed_s, 3)}
    return Answer(result, lines, ExitCode.SKIPPED if strict and skipped else ExitCode.FINE)


def _build_files(source: str, dest: str, **options: Any) -> Answer:
    """Decode the files that SOURCE reads, into a file at DEST."""
    from fastload.cache.build import build_files
    from fastload.cache.inventory import look
    from fastload.cli.source_argument import is_folder
    from fastload.images.opened_files import OpenedImages
    from fastload.readers.request import CACHE_VARIABLE, requested_cache

    if is_folder(source) and is_url(source):
        raise CommandError("with --by file, SOURCE is on this machine: pass a path")
    if requested_cache("ram") is None:
        raise CommandError(f"{CACHE_VARIABLE}=off turns off what --by file fills: unset it")
    started_s = time.monotonic()
    with users_code(source):
        dataset = OpenedImages(source) if is_folder(source) else open_source(source)
        build_files(dataset, dest, **options)
    details, elapsed_s = _details(look(dest)), time.monotonic() - started_s
    lines = [
        f"{dest}: read {len(dataset):,} samples in {elapsed_s:,.1f} s: {_content(details)}",
        f"train with it: fastload.DataLoader(dataset, ..., cache={f'lmdb:{dest}'!r})",
    ]
    return Answer({**details, "num_samples": len(dataset), "elapsed_s": round(elapsed_s, 3)}, lines)


@contextlib.contextmanager
def _opened(source: str, size: Any) -> Iterator[tuple[Any, Any]]:
    """The dataset of SOURCE as a build reads it, and its fingerprint."""
    from fastload.cache.fingerprint import fingerprint_of

    with users_code(source), warnings.catch_warnings():
        # The user chose the number of workers, or it is the number of cores.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        dataset = open_source(source, size)
        yield dataset, fingerprint_of(dataset)


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

    if os.path.isdir(path):
        listing = fastload_command("cache", "ls", path)
        raise CommandError(f"{path} is a directory: {listing} lists the caches in it", ExitCode.FAILED)
    store = open_existing(path)
    is_by_sample = store.meta["kind"] == KIND
    if is_by_sample:
        open_finished(path)  # what it says of itself
    damaged = damaged_keys(store, shown=not is_quiet())
    numbers = [int.from_bytes(key, "big") if is_by_sample else key.hex() for key in damaged]
    result = {"path": path, "num_records": store.num_records, "num_damaged": len(damaged), "damaged": numbers}
    if not damaged:
        return Answer(result, [f"{path}: {store.num_records:,} records, none damaged"])
    lines = [f"{path}: {len(damaged):,} of {store.num_records:,} records are damaged"]
    if is_by_sample:
        lines[0] += f", of samples {', '.join(map(str, numbers[:10]))}{', ...' * (len(numbers) > 10)}"
        lines.append(f"remove it with {fastload_command('cache', 'rm', path)}, and build it again")
    else:
        lines.append("loaders never return them: they decode these files again")
    return Answer(result, lines, ExitCode.FAILED, lines[0])


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
    directory = path or os.getcwd()
    caches = list_caches(directory)
    result["disk"] = details = [_details(cache) for cache in caches]
    if path is not None and [cache.path for cache in caches] == [path]:
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


Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def _confirm(what: str, nbytes: int, *, yes: bool) -> None:
    """Ask on the terminal before files are removed."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandError("nothing was removed: standard input is not a terminal to confirm on; add --yes")
    if not typer.confirm(f"remove {what}, {readable_size(nbytes)}?", err=True):
        raise CommandError("nothing was removed", ExitCode.FAILED) from typer.Abort()


@answers(app, ExitCode.BUSY, short_help="Remove caches or unfinished builds.")
def rm(
    paths: Annotated[
        list[str],
        typer.Argument(parser=cache_file, metavar="PATH", help="Caches."),
    ],
    yes: Yes = False,
) -> Answer:
    """Remove caches or unfinished builds, with their reports of errors.

    Files that are not fastload's stay, and so does a cache being built. Processes that have a cache open can
    continue to use it. A cache in memory is freed when the last process that holds it ends. The decoded files
    in memory, by the name that `fastload cache ls` shows, are forgotten by all processes.
    """
    from fastload.cache import inventory
    from fastload.cache.ram.registry import live

    names = set(map(os.path.basename, paths))
    in_memory = [cache for cache in live() if names & {cache["key"], cache["name"]}]
    if in_memory and not any(map(os.path.lexists, paths)):
        return _forget(in_memory, yes=yes)
    nbytes = sum(inventory.look(path, strict=True).nbytes for path in paths)  # raises before one is removed
    named = paths[0] if len(paths) == 1 else f"{len(paths)} caches"
    _confirm(f"{named} and all files of it", nbytes, yes=yes)
    result, lines = [], []
    for path in dict.fromkeys(paths):
        removed = inventory.remove(path)
        result.append({"path": path, "removed": removed.files, "nbytes": removed.nbytes})
        lines.append(f"removed {path}: {readable_size(removed.nbytes)}")
    return Answer({"caches": result}, lines)


def _forget(caches: list[dict[str, Any]], *, yes: bool) -> Answer:
    from fastload.cache.ram.registry import retire

    for cache in caches:
        if cache["kind"] == "samples":
            pids = ", ".join(map(str, cache["users"]))
            named = cache["key"] or cache["name"]
            raise CommandError(f"{named} is a cache in memory: it is freed when process {pids} ends")
    named = ", ".join(f"{_count(cache)} from memory" for cache in caches)
    _confirm(named, sum(cache["nbytes"] for cache in caches), yes=yes)
    nbytes = [retire(cache["name"]) for cache in caches]
    freed = readable_size(sum(nbytes))
    line = f"removed {named}: the processes that use them free {freed} when they read next"
    removed = zip(caches, nbytes, strict=True)
    result = [{"path": cache["name"], "removed": [], "nbytes": nbytes} for cache, nbytes in removed]
    return Answer({"caches": result}, [line])


@answers(app, short_help="Keep decoded files in memory between runs.")
def hold(
    limit_s: Annotated[
        Any,  # float | None
        typer.Option(
            "--for",
            parser=duration,
            metavar="TIME",
            show_default=False,
            help="How long, such as 90s, 30m or 2h; until Ctrl-C by default.",
        ),
    ] = None,
) -> Answer:
    """Hold the files that loaders with cache="ram" decode, so that the next run finds them in memory.

    Without it, they are freed when the last process that reads them ends. It decodes nothing itself, and
    holds what all your processes of this machine and container store, within their limits.
    """
    from fastload.cache.ram.store import hold_store

    def log_start(num_files: int, nbytes: int) -> None:
        end = f"for {limit_s:,.0f} s" if limit_s else "until Ctrl-C"
        log.info("holding decoded files, now %s in %s, %s", f"{num_files:,}", readable_size(nbytes), end)

    result = hold_store(limit_s, log_start)
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
    code = f"train from it with fastload.CachedDataset.from_cache({details['path']!r})"
    if not details["num_skipped"]:
        return f"{code}; a random transform is its second argument"
    return (
        f"{code}, which leaves out the samples that could not be read; CachedDataset(dataset, ...) would "
        "read them from the dataset again and fail"
    )
