"""The commands `fastload images ...`."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from fastload.cli.arguments import place
from fastload.cli.terminal import APP, Answer, answers, is_quiet
from fastload.system.logs import log
from fastload.system.sizes import readable_size

app = typer.Typer(help="Folders of images.", **APP)

_INSTEAD = "copy the folder to this machine, and the result back"
_MAX_NAMED = 10  # files, in the text


@answers(app)
def tile(
    source: Annotated[
        str,
        typer.Argument(
            parser=place("SOURCE", instead=_INSTEAD), metavar="SOURCE", help="A folder; it is only read."
        ),
    ],
    dest: Annotated[
        str, typer.Argument(parser=place("DEST", instead=_INSTEAD), metavar="DEST", help="The new folder.")
    ],
    workers: Annotated[
        int | None, typer.Option(min=0, help="Number of processes; default: one for each core.")
    ] = None,
) -> Answer:
    """Copy SOURCE to DEST, with JPEGs whose crops decode faster.

    JPEGs are rewritten without loss, with restart markers every few blocks: about 1% larger, the same pixels
    in every program, and fastload decodes only the part of them that a crop needs. Progressive ones are
    rewritten if the program jpegtran is installed. All other files are copied. Run the same command again to
    continue after an interruption, or to add new files.
    """
    from fastload.cache.build.processes import choose_workers
    from fastload.cache.progress import BuildProgress
    from fastload.images.tiled_folder import files_to_tile, tile_files

    names = files_to_tile(source, dest)
    num_tiled = nbytes = new_nbytes = 0
    reasons: dict[str, str] = {}
    num_workers = choose_workers(workers, len(names))
    if names and shutil.which("jpegtran") is None:
        log.warning(
            "jpegtran is not installed, so Python rewrites the JPEGs, several times slower: install it first "
            "(Debian's package libjpeg-turbo-progs)"
        )
    with BuildProgress(f"tiling {source}", len(names), shown=not is_quiet()) as progress:
        for file in tile_files(source, dest, names, num_workers):
            progress.advance(file.nbytes)
            if file.is_tiled:
                num_tiled += 1
                nbytes += file.nbytes
                new_nbytes += file.new_nbytes
            elif file.reason is not None:
                reasons[file.name] = file.reason
    growth = f", {new_nbytes / nbytes - 1:+.1%}" if nbytes else ""
    tiled = f"{num_tiled:,} JPEGs with tiles ({readable_size(new_nbytes)}{growth})"
    lines = [f"{dest}: {tiled}, {len(names) - num_tiled:,} files copied"]
    lines += [f"  {name} was copied: {reason}" for name, reason in list(reasons.items())[:_MAX_NAMED]]
    if len(reasons) > _MAX_NAMED:
        lines.append(f"  and {len(reasons) - _MAX_NAMED:,} more JPEGs; --json names all")
    result = {
        "dest": dest,
        "num_files": len(names),
        "num_tiled": num_tiled,
        "bytes_before": nbytes,
        "bytes_now": new_nbytes,
        "not_tiled": reasons,
    }
    return Answer(result, lines)
