"""The SOURCE argument: a folder of images on this machine or at a URL, or MODULE:NAME of a map-style dataset.

MODULE is imported as by `python -m`: from the working directory first.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
import os
import sys
from typing import TYPE_CHECKING, Any

from fastload.cli.terminal import CommandError, ExitCode
from fastload.system.humanize import did_you_mean
from fastload.system.notes import add_note
from fastload.system.paths import is_url, local_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def open_source(source: str, size: int | tuple[int, int] | None = None) -> Any:
    """The dataset that SOURCE names.

    Raises:
        CommandError: SOURCE names no dataset.
        FileNotFoundError: The folder has no images.
    """
    if is_folder(source):
        from fastload.images.folder import ImageFolder

        try:
            return ImageFolder(source, size=size)
        except (ImportError, ValueError) as error:
            raise CommandError(str(error)) from error
    module, name = _parse_names(source)
    if size is not None:
        raise CommandError("--size is for folders of images; your own dataset must scale its samples itself")
    with users_code(source):
        value = dataset = _import(module, name)
        if _makes_dataset(value):
            if not callable(value):
                raise CommandError(
                    f"{source} should be a dataset or a function, but is of type {type(value).__name__}"
                )
            dataset = value()
    if not _is_dataset(dataset):
        raise CommandError(
            f"{source} should return a map-style dataset, with __len__ and __getitem__, but returned an "
            f"object of type {type(dataset).__name__}"
        )
    return dataset


def is_folder(source: str) -> bool:
    """Whether SOURCE is a folder of images, on this machine or at a URL."""
    return is_url(source) or os.path.isdir(local_path(source))


def open_transform(name: str) -> Any:
    """The transform that MODULE:NAME names, or that the function of this name returns.

    Raises:
        CommandError: There is no such transform.
    """
    from fastload.cache.transform import check_callable

    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in f"{module}.{attribute}".split(".")):
        raise CommandError(f"--transform should be MODULE:NAME, but got {name!r}")
    with users_code(name):
        value = _import(module, attribute)
        if _makes_transform(value):
            value = value()
    try:
        check_callable("--transform", value)
    except TypeError as error:
        raise CommandError(str(error)) from error
    return value


def setup_code(source: str, size: int | tuple[int, int] | None, transform: str | None) -> list[str]:
    """The lines of Python that make the variables `dataset` and `transform`."""
    if is_folder(source):
        scaled = "" if size is None else f", size={size}"
        root = source if is_url(source) else os.path.abspath(local_path(source))
        lines = ["import fastload", f"dataset = fastload.ImageFolder({root!r}{scaled})"]
    else:
        lines = _code("dataset", source, _makes_dataset)
    return lines if transform is None else [*lines, *_code("transform", transform, _makes_transform)]


def _code(variable: str, names: str, is_called: Callable[[Any], bool]) -> list[str]:
    module, _, attribute = names.partition(":")
    imported = f"from {module} import {attribute.partition('.')[0]}"
    value = f"{attribute}()" if is_called(_import(module, attribute)) else attribute
    return [imported] if value == variable else [imported, f"{variable} = {value}"]


def _makes_dataset(value: Any) -> bool:
    return isinstance(value, type) or not _is_dataset(value)


def _makes_transform(value: Any) -> bool:
    return inspect.isfunction(value) and not inspect.signature(value).parameters


@contextlib.contextmanager
def users_code(name: str) -> Iterator[None]:
    """Run code that an argument names; if it exits the process, this is an error of the command."""
    try:
        yield
    except SystemExit as error:
        raise CommandError(
            f"the code of {name} ended the process with exit code {error.code!r}: put the actions of a "
            'script under if __name__ == "__main__"',
            ExitCode.FAILED,
        ) from error


# --- MODULE:NAME -----------------------------------------------------------------------------------------


def _parse_names(source: str) -> tuple[str, str]:
    module, _, name = source.partition(":")
    if module.endswith(".py") or not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
        raise CommandError(
            f"SOURCE should be a folder of images, or MODULE:NAME such as my_data:train_set for a name in "
            f"my_data.py, but {source!r} is neither"
        )
    return module, name


def _import(module: str, name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise CommandError(
                f"there is no module {error.name!r} in the working directory or among the installed packages"
            ) from error
        if isinstance(error, AttributeError) and module in sys.modules:
            names = [each for each in vars(sys.modules[module]) if not each.startswith("_")]
            raise CommandError(f"module {module!r} has no {name!r}{did_you_mean(name, names)}") from error
        add_note(error, f"while module {module!r} was imported; fastload --debug ... shows where")
        raise


def _is_dataset(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return False  # probably a path
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")
