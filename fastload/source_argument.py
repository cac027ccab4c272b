"""What SOURCE on the command line means: a folder of images, or MODULE:NAME of any map-style dataset.

Called by `cli`, in the parent. MODULE is imported as `python -m` would: from the working directory first.
"""

from __future__ import annotations

import importlib
import operator
import os
import sys
from typing import Any

from fastload.errors import CacheError
from fastload.terminal import CommandError


def open_source(source: str, size: str | None) -> Any:
    """The dataset that SOURCE names.

    Raises:
        CommandError: It names none.
    """
    if os.path.isdir(source):
        from fastload.images.folder import ImageFolder

        return ImageFolder(source, _parse_size(size))
    module, colon, name = source.partition(":")
    if not colon or not module or not name:
        raise CommandError(f"SOURCE should be a folder of images or MODULE:NAME, but {source!r} is neither")
    if size is not None:
        raise CommandError("--size is for folders of images; a dataset of your own scales its samples itself")
    dataset = _import(module, name)
    if isinstance(dataset, type) or not _is_dataset(dataset):
        if not callable(dataset):
            raise CommandError(
                f"{source} is of type {type(dataset).__name__}: neither a dataset nor a function"
            )
        dataset = dataset()
    if not _is_dataset(dataset):
        raise CommandError(
            f"{source} gives an object of type {type(dataset).__name__}; "
            "a map-style dataset has __len__ and __getitem__"
        )
    return dataset


def _parse_size(size: str | None) -> int | tuple[int, int] | None:
    if size is None:
        return None
    sides = size.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise CommandError(f"--size should be like 256 or 224x320 (height x width), but got {size!r}")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _import(module: str, name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, what it needs is not
        raise CommandError(f"there is no module {error.name!r} here, nor among what is installed") from error
    except AttributeError as error:
        if module not in sys.modules:
            raise  # from the module's own code
        raise CommandError(f"module {module!r} has no {name!r}") from error


def _is_dataset(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def refuse_random(dataset: Any) -> None:
    """Refuse a dataset that gives another sample at each access; a cache would freeze one draw for ever."""
    from fastload.cache.guard import probe

    last = len(dataset) - 1
    for index in sorted({0, last // 2, last}) if last >= 0 else ():
        try:
            probe(dataset, [index], rechecked=[index])
        except CacheError:
            raise
        except Exception:  # noqa: BLE001 - the build meets this sample again, and says where it is
            continue
