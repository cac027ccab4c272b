"""The SOURCE argument: a folder of images on this machine or at a URL, or MODULE:NAME of a map-style dataset.

MODULE is imported as by `python -m`: from the working directory first.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import os
import sys
from typing import Any

from fastload.cli.terminal import CommandError
from fastload.system.humanize import did_you_mean
from fastload.system.notes import add_note
from fastload.system.paths import is_url, local_path


def is_folder(source: str) -> bool:
    """Whether SOURCE is a folder of images, on this machine or at a URL."""
    return is_url(source) or os.path.isdir(local_path(source))


def code_of(source: str, size: int | tuple[int, int] | None = None) -> str:
    """Python that stands for the dataset: an expression for a folder, else the name of a variable."""
    if not is_folder(source):
        return "dataset"
    return f"fastload.ImageFolder({source!r}{'' if size is None else f', size={size}'})"


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
    expected = "SOURCE should be a folder of images, or MODULE:NAME such as my_data:train_set"
    dataset = _named(source, f"{expected}, but {source!r} is neither")
    if size is not None:
        raise CommandError("--size is for folders of images: your own dataset scales its samples itself")
    if callable(dataset) and (isinstance(dataset, type) or not _is_dataset(dataset)):
        try:
            inspect.signature(dataset).bind()
        except (TypeError, ValueError) as error:  # the second: a class in C does not say what it takes
            raise CommandError(
                f"{source} should be called without arguments, but {error}: name a dataset, or a function "
                "that makes one"
            ) from error
        dataset = dataset()
    if not _is_dataset(dataset):
        raise CommandError(
            f"{source} should be a map-style dataset, with __len__ and __getitem__, or a function that "
            f"returns one, but it gives an object of type {type(dataset).__name__}"
        )
    return dataset


def open_transform(name: str) -> Any:
    """The transform that MODULE:NAME names, or that the function of this name returns.

    Raises:
        CommandError: There is no such transform.
    """
    from fastload.cache.transform import check_callable

    value = _named(name, f"--transform should be MODULE:NAME, but is {name!r}")
    if inspect.isfunction(value) and not inspect.signature(value).parameters:
        value = value()
    try:
        check_callable("--transform", value)
    except TypeError as error:
        raise CommandError(str(error)) from error
    return value


def _named(text: str, complaint: str) -> Any:
    """The object that MODULE:NAME names; the complaint is for a text of another form."""
    module, _, name = text.partition(":")
    if module.endswith(".py") or not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
        raise CommandError(complaint)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            where = "in the working directory or among the installed packages"
            raise CommandError(f"there is no module {error.name!r} {where}") from error
        if isinstance(error, AttributeError) and module in sys.modules:
            names = [each for each in vars(sys.modules[module]) if not each.startswith("_")]
            raise CommandError(f"module {module!r} has no {name!r}{did_you_mean(name, names)}") from error
        add_note(error, f"while module {module!r} was imported; FASTLOAD_DEBUG=1 shows where")
        raise


def _is_dataset(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return False  # probably a path
    from torch.utils.data import IterableDataset  # whose __getitem__ is there, and fails

    return all(hasattr(value, name) for name in ("__len__", "__getitem__")) and not isinstance(
        value, IterableDataset
    )
