"""The command line: `fastload run | profile | bench | doctor`, and `fastload cache build | info | ...`.

Rules:

1. Commands import their modules when they run, so that `--help` is fast.
2. A new command is a function under `@app.command(epilog=EPILOG)` that works inside `answering(...)`.
3. A call without a command prints the help. This is wrong usage: the help goes to standard error, and the
   exit code is that of wrong usage.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from enum import StrEnum
from typing import Annotated, Any

import typer

from fastload.cli import cache_commands
from fastload.cli.source_argument import parse_error_budget
from fastload.cli.terminal import EPILOG, Answer, CommandError, CommandGroup, ExitCode, answering, table
from fastload.system.sizes import readable_size

_OPTIONS: dict[str, Any] = {
    "invoke_without_command": True,  # our own callback handles this, because releases of click differ
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "epilog": EPILOG,
}
app = typer.Typer(cls=CommandGroup, add_completion=False, help="Fast data loading for PyTorch.", **_OPTIONS)
cache_app = typer.Typer(help="Caches of decoded samples: build them once, train from them.", **_OPTIONS)
app.add_typer(cache_app, name="cache")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
CachePath = Annotated[str, typer.Argument(metavar="PATH", help="A cache: a file, or a directory of shards.")]
CachePlace = Annotated[
    str, typer.Argument(metavar="PATH", help="A cache: a file, a directory of shards, or a URL.")
]


class Codec(StrEnum):
    """How images are written."""

    RAW = "raw"
    JPEG = "jpeg"
    PNG = "png"
    WEBP = "webp"
    SOURCE = "source"


class OnError(StrEnum):
    """How to handle samples that cannot be read."""

    RAISE = "raise"
    SKIP = "skip"


class CacheKind(StrEnum):
    """Where samples are cached."""

    RAM = "ram"


class Rng(StrEnum):
    """How random numbers are seeded."""

    WORKER = "worker"
    SAMPLE = "sample"


class WorkerMethod(StrEnum):
    """What makes batches."""

    PROCESS = "process"
    THREAD = "thread"


class Switch(StrEnum):
    """Whether to do something."""

    ON = "on"
    OFF = "off"


@app.callback()
def _root(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, as FASTLOAD_DEBUG=1 does.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Fast data loading for PyTorch."""
    if version:
        import fastload

        typer.echo(f"fastload {fastload.__version__}")
        raise typer.Exit
    _help_without_command(context)


@cache_app.callback()
def _cache(context: typer.Context) -> None:
    """Caches of decoded samples: build them once, train from them."""
    _help_without_command(context)


def _help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(ExitCode.USAGE)


@cache_app.command(epilog=EPILOG)
def build(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder with a folder of images for each class: a path, or a URL such as "
            "s3://bucket/train; or MODULE:NAME, a dataset or a function without arguments that returns one. "
            "The working directory is searched for MODULE, too.",
        ),
    ],
    dest: Annotated[
        str | None,
        typer.Argument(
            metavar="[DEST]",
            help="The cache: a file, or with --shards a directory; or a URL such as "
            "s3://bucket/caches/train, to which shards are uploaded as they are finished.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", help="Upload the cache to this URL; without DEST, no local cache is kept.", metavar="URL"
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="Scale images of a folder: the shorter side, or HEIGHTxWIDTH.", metavar="PIXELS"),
    ] = None,
    codec: Annotated[
        Codec | None,
        typer.Option(
            help="Format of the stored images; default: raw. jpeg and webp are small, but change pixels; "
            "source stores the files as they are, and each access decodes them."
        ),
    ] = None,
    quality: Annotated[
        int | None, typer.Option(min=1, max=100, help="Quality of jpeg and webp; default: 95.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Number of processes that decode; default: one for each core.")
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of files of the cache; default: 1, with --ray a few for each CPU, for a URL so many "
            "that a file has about 1 GiB.",
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            help="Build shard I of N, from 1 to N, in DEST.partial. Any machine that sees DEST may build any "
            "shard. When all are built, run 'fastload cache join DEST'.",
            metavar="I/N",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Build on a Ray cluster, one task for each shard: 'auto' for the running cluster, 'local' "
            "for the CPUs of this machine, or the address of a cluster. All machines must see SOURCE and "
            "DEST. Needs the extra 'ray'.",
            metavar="ADDRESS",
        ),
    ] = None,
    on_error: Annotated[
        OnError,
        typer.Option(
            help="How to handle a sample that cannot be read: 'raise' ends the build, 'skip' leaves it out "
            "and writes a line with its path and the reason to DEST.errors.jsonl, or to errors.jsonl below "
            "the URL."
        ),
    ] = OnError.RAISE,
    error_budget: Annotated[
        str | None,
        typer.Option(
            help="With --on-error skip: how many samples may be left out, as a number or as a share such as "
            "0.01; default: all of them.",
            metavar="NUMBER",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Decode every sample of SOURCE once, into a cache at DEST.

    DEST appears when it is complete; a cache at a URL is complete when its cache.json appears. If a build
    was interrupted or killed, run the same command again to continue it.
    """
    if quality is not None and codec not in (Codec.JPEG, Codec.WEBP):
        kept = Codec.RAW if codec is None else codec
        raise CommandError(f"--quality is for jpeg and webp, but --codec {kept.value} changes no pixels")
    if shard is not None and ray is not None:
        raise CommandError("--ray builds all shards: omit --shard")
    if workers is not None and ray is not None:
        raise CommandError("--workers is for builds on one machine: with --ray, a task for each CPU decodes")
    if shard is not None and shards is not None:
        raise CommandError("--shard I/N states the number of shards itself: omit --shards")
    chosen_shard = None if shard is None else cache_commands.parse_shard(shard)
    path, url = _destinations(dest, out)
    if url and shard is not None:
        raise CommandError(
            "--shard builds in a directory that all machines see: give a DEST there, join, and upload the "
            "cache with 'fastload cache build SOURCE DEST --out URL'"
        )
    if url and ray is not None:
        raise CommandError(
            "--ray builds in a directory that all machines see: give a DEST there, and upload the cache "
            "with 'fastload cache build SOURCE DEST --out URL'"
        )
    with answering(as_json, quiet=quiet) as answer:
        was_there = os.path.exists(path)
        start = time.monotonic()
        options: dict[str, Any] = {
            "codec": None if codec is None else codec.value,
            "quality": quality,
            "on_error": on_error.value,
            "error_budget": parse_error_budget(error_budget),
            "progress": not quiet,
        }
        try:
            if url:
                manifest, was_built = cache_commands.build_at_url(
                    source, size, path or None, url, num_workers=workers, shards=shards, **options
                )
                _answer_with(
                    answer, cache_commands.facts_at_url(manifest), was_built, time.monotonic() - start
                )
                return
            if chosen_shard is not None:
                built = cache_commands.build_shard(
                    source, size, path, chosen_shard, num_workers=workers, **options
                )
                elapsed_s = time.monotonic() - start
                answer.result = {
                    **cache_commands.shard_facts(path, built),
                    "elapsed_s": round(elapsed_s, 3),
                }
                answer.lines = cache_commands.shard_lines(path, built, elapsed_s)
                if built.num_left_out:
                    answer.exit_code = ExitCode.SKIPPED
                return
            if ray is not None:
                cache = cache_commands.build_on_ray(source, size, path, ray, shards, **options)
            else:
                cache = cache_commands.build(
                    source, size, path, num_workers=workers, shards=shards, **options
                )
        except KeyboardInterrupt as error:
            raise CommandError(
                cache_commands.interrupted_upload(url) if url else cache_commands.interrupted(path),
                ExitCode.INTERRUPTED,
                "KeyboardInterrupt",
            ) from error
        found = {**cache_commands.facts(cache), "num_shapes": cache.num_shapes}
        _answer_with(answer, found, not was_there, time.monotonic() - start)


def _destinations(dest: str | None, out: str | None) -> tuple[str, str]:
    """The absolute path and the URL of `build`; one of them may be empty."""
    if dest is None and out is None:
        raise CommandError("DEST is missing: give a path or a URL")
    if out is not None and not cache_commands.is_url(out):
        raise CommandError(f"--out should be a URL such as s3://bucket/caches/train, but is {out!r}")
    if dest is None:
        return "", out or ""
    if not cache_commands.is_url(dest):
        return cache_commands.absolute("DEST", dest), out or ""
    if out is not None:
        raise CommandError("DEST is a URL, and so is --out: give one of them")
    return "", dest


def _answer_with(answer: Answer, found: dict[str, Any], was_built: bool, elapsed_s: float) -> None:
    """Answer with the facts about a cache that was built, or was there."""
    answer.result = {**found, "was_built": was_built, "elapsed_s": round(elapsed_s, 3)}
    done = f"built in {elapsed_s:,.1f} s" if was_built else "exists already and matches"
    held, skipped = cache_commands.held(found), cache_commands.skipped(found)
    answer.lines = [f"{found['path']}: {done}: {held}", *skipped, cache_commands.training(found)]
    if skipped:
        answer.exit_code = ExitCode.SKIPPED


@cache_app.command(epilog=EPILOG)
def join(
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="The cache whose shards 'build --shard' has built.")
    ],
    error_budget: Annotated[
        str | None,
        typer.Option(
            help="How many samples may be left out, as a number or as a share such as 0.01; default: the "
            "budget of the process that began the build.",
            metavar="NUMBER",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Make the cache at DEST from its shards, when all of them are built.

    If shards are missing, the error names the commands that build them. The reports about skipped samples
    become one report, DEST.errors.jsonl.
    """
    path = cache_commands.local(
        "DEST", dest, "shards at a URL are joined by the build that uploads them, 'fastload cache build'"
    )
    budget = None if error_budget is None else parse_error_budget(error_budget)
    with answering(as_json, quiet=quiet) as answer:
        was_there = os.path.exists(path)
        cache = cache_commands.join(path, budget)
        found = cache_commands.facts(cache)
        answer.result = {**found, "was_joined": not was_there}
        done = "was joined before" if was_there else "joined"
        held, skipped = cache_commands.held(found), cache_commands.skipped(found)
        answer.lines = [f"{path}: {done}: {held}", *skipped, cache_commands.training(found)]
        if skipped:
            answer.exit_code = ExitCode.SKIPPED


@cache_app.command(epilog=EPILOG)
def info(path: CachePlace, as_json: AsJson = False) -> None:
    """Show the contents and the origin of a cache."""
    with answering(as_json) as answer:
        if cache_commands.is_url(path):  # the manifest says all of it, without a download
            found = cache_commands.facts_at_url(cache_commands.manifest_at(path))
        else:
            found = cache_commands.facts(cache_commands.opened(path))
        answer.result = found
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["created_s"]))
        answer.lines = [
            *table(
                [
                    ["path", found["path"]],
                    ["holds", cache_commands.held(found)],
                    ["made", made],
                    *([["made of", ""]] if found["parts"] else []),
                    *([f"  {name}", value] for name, value in (found["parts"] or {}).items()),
                ]
            )
        ]
        skipped = cache_commands.skipped(found)
        if skipped:
            answer.lines += [*skipped, cache_commands.training(found)]


@cache_app.command(epilog=EPILOG)
def verify(path: CachePlace, as_json: AsJson = False) -> None:
    """Read the whole cache and compare every record with its checksum.

    A cache at a URL is verified in its local copy, which is downloaded unless it is there.
    """
    with answering(as_json) as answer:
        cache = cache_commands.opened(path)
        damaged = cache.verify(progress=True)
        answer.result = {
            "path": cache.path,
            "num_samples": cache.num_samples,
            "num_cached": cache.num_cached,
            "num_damaged": len(damaged),
            "damaged": damaged,
        }
        answer.lines = [f"{cache.path}: {cache.num_cached:,} records, none damaged"]
        if damaged:
            answer.exit_code = ExitCode.FAILED
            shown = ", ".join(map(str, damaged[:10])) + (", ..." if len(damaged) > 10 else "")
            answer.lines = [
                f"{cache.path}: {len(damaged):,} of {cache.num_cached:,} records are damaged",
                f"indices of their samples: {shown}. {cache_commands.cure(cache.path)}",
            ]


@cache_app.command(epilog=EPILOG, short_help="List the caches in DIRECTORY, or in memory.")
def ls(
    directory: Annotated[
        str | None,
        typer.Argument(
            metavar="[DIRECTORY]", help="Where to look for caches on disk; its subfolders are not searched."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the caches and unfinished builds in DIRECTORY; without one, your caches in memory.

    Caches in memory are those that your running processes hold and share by SharedMemoryCache.
    """
    with answering(as_json) as answer:
        if directory is None:
            cache_commands.list_memory(answer)
        else:
            cache_commands.list_disk(directory, answer)


@cache_app.command(epilog=EPILOG)
def rm(
    path: CachePath,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a cache or an unfinished build, with its report of errors.

    Files that are not fastload's stay, and so does a cache that is being built. Processes that have the cache
    open can continue to use it.
    """
    with answering(as_json) as answer:
        from fastload.cache.build import inventory

        path = cache_commands.local("PATH", path, "remove files there with your store's own tool")
        nbytes = cache_commands.removable_bytes(path)
        if not yes:
            if not sys.stdin.isatty():
                raise CommandError(
                    f"{path} was not removed: standard input is not a terminal to confirm on; add --yes"
                )
            if not typer.confirm(f"remove {path} and all its files, {readable_size(nbytes)}?", err=True):
                raise CommandError(f"{path} was not removed", ExitCode.FAILED, "Abort")
        removed, nbytes = inventory.remove(path)
        answer.result = {"path": path, "removed": removed, "nbytes": nbytes}
        answer.lines = [f"removed {path}: {readable_size(nbytes)}"]


@app.command(
    short_help="Run a training script with fastload's loader in the place of torch's.",
    context_settings={"allow_interspersed_args": False},
    epilog="The exit code is that of the script.",
)
def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The script, - for standard input, or with -m the module.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="All arguments of the script.")
    ] = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")] = False,
    cache: Annotated[
        CacheKind | None,
        typer.Option(
            help="Decode the images of an ImageFolder once, and keep them in memory. A line says for every "
            "other dataset why it is not cached."
        ),
    ] = None,
    rng: Annotated[
        Rng | None,
        typer.Option(
            help="How random numbers are seeded: 'worker' as in torch (the default), or 'sample', the same "
            "for any number of workers."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Deliver batches on this device, such as cuda or auto; default: as in torch."),
    ] = None,
    worker_method: Annotated[
        WorkerMethod | None, typer.Option(help="What makes batches; default: process, as in torch.")
    ] = None,
    seed_pipelines: Annotated[
        Switch | None,
        typer.Option(
            help="Whether albumentations pipelines draw differently in each worker (on, the default), or as "
            "under torch's loader (off)."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing of fastload's own.")] = False,
) -> Any:
    """Run SCRIPT as python does, with fastload.DataLoader in the place of torch.utils.data.DataLoader.

    The script needs no change. Processes that it starts do the same. Options of fastload come before SCRIPT;
    all words after SCRIPT belong to the script. --rng, --device, --worker-method and --seed-pipelines apply
    to every loader of the script. At the end, a line on standard error says how many loaders were replaced,
    and a second one whether albumentations pipelines were seeded, which changes their draws.
    """
    from fastload.cli.script import run_script
    from fastload.integrations import install

    given = {"rng": rng, "device": device, "worker_method": worker_method}
    defaults: dict[str, Any] = {name: str(value) for name, value in given.items() if value is not None}
    if seed_pipelines is not None:
        defaults["seed_pipelines"] = seed_pipelines is Switch.ON
    install.watch(
        cache=None if cache is None else cache.value,
        defaults=defaults,
        is_verbose=not quiet,
    )
    # CommandGroup.main calls this outside of its own handling of errors, which are the script's here.
    return functools.partial(run_script, script, list(args or ()), as_module=is_module)


@app.command(
    short_help="Run a training script, and say how long it waits for data, and why.",
    context_settings={"allow_interspersed_args": False},
    epilog="The exit code is that of the script.",
)
def profile(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The script, - for standard input, or with -m the module.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="All arguments of the script.")
    ] = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")] = False,
    replay: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="STEPS",
            help="In stretches of this many steps, return batches that are held in memory, to measure how "
            "fast the script is when loading costs nothing. It then trains on these batches again.",
        ),
    ] = 0,
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")
    ] = None,
    trace_path: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE.json", help="Write a trace for Perfetto or chrome://tracing."),
    ] = None,
) -> Any:
    """Run SCRIPT as python does, and report how long its training loops wait for data.

    The script needs no change, and its results stay the same. Every DataLoader is watched, torch's and
    fastload's. At the end, or after Ctrl-C, the report on standard error names the bottleneck and up to three
    changes with the gain that each would bring. Options of fastload come before SCRIPT; all words after
    SCRIPT belong to the script.
    """
    from fastload.cli.profile_command import check, profile_script

    check(json_path, trace_path)
    # CommandGroup.main calls this outside of its own handling of errors, which are the script's here.
    return functools.partial(
        profile_script,
        script,
        list(args or ()),
        as_module=is_module,
        replay=replay,
        json_path=json_path,
        trace_path=trace_path,
    )


@app.command(epilog=EPILOG, short_help="Show what this machine offers to a data loader.")
def doctor(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[SOURCE]",
            help="A folder or a URL with a folder of images for each class, or MODULE:NAME of a dataset: "
            "show which cache fits it, instead of the machine.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what this machine offers to a data loader, and how to look for an error.

    Prints versions, CPUs, memory, how fast each GPU gets data, and the processes that hold memory on GPUs.
    With SOURCE: the bytes and the images a second of each way to cache it. Changes nothing.
    """
    with answering(as_json) as answer:
        if source is not None:
            answer.result, answer.lines = cache_commands.sizing(source)
            return
        from fastload.cli.doctor import examine

        found = examine()
        answer.result, answer.lines = found.as_dict(), found.lines()


@app.command(epilog=EPILOG, short_help="Compare torch's loader and fastload over your own data.")
def bench(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder with a folder of images for each class: a path, or a URL such as "
            "s3://bucket/train; or MODULE:NAME, a dataset or a function without arguments that returns one. "
            "The working directory is searched for MODULE, too.",
        ),
    ],
    transform: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="The random part, which runs at every access and is never cached: an albumentations "
            "pipeline, another callable, or a function without arguments that returns one.",
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Numbers of workers; default: 0, half of the CPUs, all CPUs."),
    ] = None,
    batch_size: Annotated[str | None, typer.Option(metavar="N,N", help="Batch sizes; default: 64.")] = None,
    start_method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="How workers are started: fork, spawn, forkserver; default: the platform's.",
        ),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Caches of fastload: none, ram, lmdb; default: all, and ram only if the whole dataset fits.",
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="PIXELS",
            help="Scale images of a folder, as in 'cache build': HEIGHTxWIDTH; several with commas.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of an epoch, evenly spaced; default: as many as --minutes allows."),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.0, help="About how long the whole benchmark may take.")
    ] = 3.0,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="How often each contender runs, in turn; default: 3.")
    ] = None,
    scratch: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Where LMDB caches are built, which are removed at the end; default: the system's "
            "temporary directory.",
        ),
    ] = None,
    chart: Annotated[
        str | None, typer.Option(metavar="FILE.png", help="Draw a chart; needs the extra 'plot'.")
    ] = None,
    save: Annotated[
        str | None, typer.Option(metavar="FILE.json", help="Write the result, for --baseline.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.json",
            help="Compare with an earlier --save; exit code 1 if a contender is slower. Options that are not "
            "given are those of that run.",
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="The share of its rate that a contender may lose."),
    ] = 0.1,
    relative: Annotated[
        bool,
        typer.Option(
            "--relative",
            help="With --baseline: divide each rate by torch's in the same run, for machines whose speed "
            "changes.",
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Compare torch's loader and fastload over SOURCE, and print the code of the fastest.

    Each contender runs in a process of its own, once in each round. Nothing is trained, and no file is left
    but those of --save and --chart.
    """
    with answering(as_json, quiet=quiet) as answer:
        from fastload.cli import bench_command

        options = bench_command.Options(
            source=source,
            transform=transform,
            workers=workers,
            batch_sizes=batch_size,
            start_methods=start_method,
            caches=cache,
            sizes=size,
            samples=samples,
            minutes=minutes,
            rounds=rounds,
            scratch=scratch,
            chart=chart,
            save=save,
            baseline=baseline,
            tolerance=tolerance,
            is_relative=relative,
            as_json=as_json,
            quiet=quiet,
        )
        bench_command.run(options, answer)


def main() -> None:
    """The `fastload` command."""
    # Not app(), which would set typer's own sys.excepthook, also for the script of `fastload run`.
    typer.main.get_command(app)()
