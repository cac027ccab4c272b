"""Arguments and options that several commands share, and the functions that parse them.

A parser raises typer.BadParameter; typer adds which argument it is about.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

import typer

from fastload.system.paths import cache_path


def cache_file(text: str) -> str:
    """The path of a cache, which becomes absolute."""
    try:
        path = cache_path(text, "it")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not text:
        raise typer.BadParameter("it is empty: pass a path")
    return path


def new_cache_file(text: str) -> str:
    """The path at which a cache is created, in a directory that exists."""
    path = cache_file(text)
    try:
        path.encode()  # LMDB makes no other files
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{path!a} is not valid UTF-8: use a different path") from None
    if not os.path.isdir(directory := os.path.dirname(path)):
        raise typer.BadParameter(f"{directory} is no directory: make it first, or use a different path")
    return path


def output_file(text: str) -> str:
    """The file that a command writes at the end, checked before hours are spent."""
    written = text if os.path.exists(text) else os.path.dirname(os.path.abspath(text))
    if not text or os.path.isdir(text) or not os.access(written, os.W_OK):
        raise typer.BadParameter(f"it should be a file in a directory that can be written, not {text!r}")
    return text


def image_size(text: str) -> int | tuple[int, int]:
    """The shorter side of images, or both sides."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", text.lower()):
        raise typer.BadParameter(f"it should be like 256 or 224x320 (height x width), but is {text!r}")
    first, *second = map(int, text.lower().split("x"))
    return (first, second[0]) if second else first


Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A folder with one subfolder of images per class: a path, or a URL such as s3://bucket/train; "
        "or MODULE:NAME, a dataset or a function without arguments that returns one. The working directory "
        "is searched for MODULE, too.",
    ),
]
Size = Annotated[
    Any,  # int | tuple[int, int] | None: typer would take a tuple for several words
    typer.Option(
        parser=image_size,
        metavar="PIXELS",
        help="Scale images of a folder: the shorter side, or HEIGHTxWIDTH.",
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output", "-o", parser=output_file, metavar="FILE.json", help="Write the whole result as JSON."
    ),
]
