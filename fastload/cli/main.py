"""The command line: `fastload run | profile | bench | doctor`, `fastload cache ...`.

Rules:

1. Commands import their modules when they run, so `--help` is fast.
2. A command is a function under `answers(app)` that parses nothing itself: it calls one function of a lower
   layer, and returns an `Answer`.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

import typer

from fastload.cli import bench_command, cache_commands
from fastload.cli.arguments import Output, new_cache_file
from fastload.cli.script import become_python
from fastload.cli.source_argument import code_of, open_source
from fastload.cli.terminal import APP, EXIT_CODES, Answer, answers
from fastload.errors import FastloadError
from fastload.version import __version__

app = typer.Typer(
    help="Fast data loading for PyTorch.", epilog=EXIT_CODES, invoke_without_command=True, **APP
)
app.add_typer(cache_commands.app, name="cache")
answers(app, short_help="Compare torch's loader and fastload over your own data.")(bench_command.bench)


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", "-v", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"fastload {__version__}")
        raise typer.Exit


# --- commands that run a script --------------------------------------------------------------------------


def _checked_cache(cache: str) -> str:
    from fastload.readers.request import DISK, check_cache

    try:
        place = check_cache(cache)
        if place is None or not place.startswith(DISK):
            return cache
        path = new_cache_file(place.removeprefix(DISK))
        if os.path.lexists(path):
            from fastload.cache.decoded_files import open_files

            open_files(path)
    except (FastloadError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    return DISK + path  # absolute: the script may change the working directory


def _checked_device(device: str) -> str:
    if not re.fullmatch(r"cuda|cuda:\d+|cpu|auto", device):
        raise typer.BadParameter(f"it should be cuda, cuda:N, cpu or auto, but is {device!r}")
    if device not in ("cpu", "auto"):
        from fastload.device.devices import why_unavailable

        if (reason := why_unavailable(None)) is not None:
            raise typer.BadParameter(f"{device} is not available: {reason}")
    return device


_RUNS_A_SCRIPT: dict[str, Any] = {
    "context_settings": {"allow_interspersed_args": False},
    "epilog": "\b\nExit codes:\n    2  wrong usage\n  all others are those of the script",
}
Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="The script, - for standard input, or with -m the module.")
]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="All arguments of the script.")]
IsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")]


@app.command(short_help="Run a training script with fastload's loader instead of torch's.", **_RUNS_A_SCRIPT)
def run(
    script: Script,
    args: Arguments = None,
    is_module: IsModule = False,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="ram|ram:SIZE|lmdb:PATH",
            parser=_checked_cache,
            help="Remember the pixels of all files that the script's loaders decode, in memory; 'ram:32G' "
            "takes at most so much, and 'lmdb:PATH' remembers them on disk, in the file PATH, whose "
            "folder must exist.",
        ),
    ] = None,
    seeding: Annotated[
        Literal["worker", "sample", "torch"] | None,
        typer.Option(
            help="How random numbers are seeded: 'worker' as in torch, and albumentations and MONAI in each "
            "worker (the default); 'sample', the same for any number of workers; or 'torch', exactly as in "
            "torch, whose workers repeat each other's draws of albumentations and MONAI.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            parser=_checked_device,
            metavar="DEVICE",
            help="Deliver batches on this device, such as cuda or auto; default: as in torch.",
        ),
    ] = None,
    worker_type: Annotated[
        Literal["process", "thread"] | None,
        typer.Option(help="Type of the workers; default: process, as in torch."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Suppress fastload's output.")] = False,
) -> None:
    """Run SCRIPT under python, with fastload.DataLoader instead of torch.utils.data.DataLoader.

    The script needs no change. Processes that it starts do the same. Options of fastload come before SCRIPT;
    everything after SCRIPT belongs to the script. --seeding, --device and --worker-type apply to every
    loader of the script. At the end of a script that used a loader, lines on standard error say how many
    loaders were replaced, what caches found and why the rest was decoded, and whether albumentations
    pipelines were seeded, which changes the random numbers that they use. Of several ranks, the first one
    of each machine writes them, and counts its own loaders alone.
    """
    from fastload.readers.request import CACHE_VARIABLE

    if cache is not None:  # for fastload's own loaders, too
        os.environ[CACHE_VARIABLE] = cache
    given = {"seeding": seeding, "device": device, "worker_type": worker_type}
    defaults = {name: value for name, value in given.items() if value is not None}
    words = [*["-m"] * is_module, script, *(args or ())]
    become_python(words, "fastload.integrations.run:begin", defaults=defaults, is_quiet=quiet)


@app.command(
    short_help="Run a training script, and say how long it waits for data, and why.", **_RUNS_A_SCRIPT
)
def profile(
    script: Script,
    args: Arguments = None,
    is_module: IsModule = False,
    output: Output = None,
) -> None:
    """Run SCRIPT under python, and report how long its training loops wait for data.

    The script needs no change, and its results stay the same. Every DataLoader is watched, torch's and
    fastload's. At the end, or after Ctrl-C, the report on standard error names the bottleneck and at most
    four changes, each with its gain; of a script that imports torch and uses no DataLoader, one line says
    so. Of several ranks, the first one of each machine is watched. Options of fastload come before SCRIPT;
    everything after SCRIPT belongs to the script.
    """
    words = [*["-m"] * is_module, script, *(args or ())]
    output = output and os.path.abspath(output)
    become_python(words, "fastload.cli.script:begin_profile", output=output)


@answers(app, short_help="Show what this machine offers a data loader.")
def doctor(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="A folder or a URL with one subfolder of images per class, or MODULE:NAME of a dataset: "
            "show which cache fits it, instead of the machine.",
        ),
    ] = None,
) -> Answer:
    """Show what this machine offers a data loader.

    Prints versions, CPUs, memory, and how fast each GPU gets data. With SOURCE: how many bytes it takes,
    whether they fit into RAM and on the disk, and the line of code to use; estimated from a few samples.
    Changes nothing.
    """
    if source is None:
        from fastload.training.machine_report import machine_report

        return Answer(*machine_report())
    from fastload.cli.source_report import source_report

    return Answer(*source_report(open_source(source), code_of(source)))


def main() -> None:
    """The `fastload` command."""
    app()
