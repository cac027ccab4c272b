"""Open the SOURCE argument of the command line: a folder of images, or MODULE:NAME of a map-style dataset.

The folder is a path, or a URL that fsspec reads.

MODULE is imported as by `python -m`: from the working directory first.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.cli.terminal import CommandError, ExitCode
from fastload.errors import add_note
from fastload.system.refusals import reading_refused

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_LISTED = 9


def open_source(source: str, size: str | None) -> Any:
    """The dataset that SOURCE names.

    Raises:
        CommandError: SOURCE names no dataset.
    """
    if is_folder(source):
        return _open_folder(source, _parse_size(size))
    module, name = _parse_names(source)
    if size is not None:
        raise CommandError("--size is for folders of images; your own dataset must scale its samples itself")
    found = _import(module, name)
    dataset = found
    if isinstance(found, type) or not _is_dataset(found):
        if not callable(found):
            raise CommandError(
                f"{source} should be a dataset or a function, but is of type {type(found).__name__}"
            )
        _check_needs_nothing(source, found)
        dataset = found()
    if not _is_dataset(dataset):
        raise CommandError(
            f"{source} should return a map-style dataset, with __len__ and __getitem__, but returned an "
            f"object of type {type(dataset).__name__}"
        )
    return dataset


def is_folder(source: str) -> bool:
    """Whether SOURCE is a folder of images, on this machine or at a URL."""
    from fastload.files.remote import is_url

    return is_url(source) or os.path.isdir(source)


def open_transform(name: str) -> Any:
    """The transform that MODULE:NAME names, or that the function of this name returns.

    Raises:
        CommandError: There is no such transform.
    """
    from fastload.cache.transform import check_callable

    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in f"{module}.{attribute}".split(".")):
        raise CommandError(f"--transform should be MODULE:NAME, but got {name!r}")
    try:
        found = _import(module, attribute)
        if _makes_transform(found):
            found = found()
    except SystemExit as error:
        raise code_ended(name, error) from error
    try:
        check_callable("--transform", found)
    except TypeError as error:
        raise CommandError(str(error)) from error
    return found


def source_code(source: str, size: str | None) -> list[str]:
    """The lines of Python that make the dataset of SOURCE, which `open_source` opens, as `dataset`."""
    from fastload.files.remote import is_url

    if is_folder(source):
        sides = _parse_size(size)
        scaled = "" if sides is None else f", size={sides}"
        root = source if is_url(source) else os.path.abspath(source)
        return ["import fastload", f"dataset = fastload.ImageFolder({root!r}{scaled})"]
    found = _import(*_parse_names(source))
    return _code("dataset", source, is_called=isinstance(found, type) or not _is_dataset(found))


def transform_code(name: str) -> list[str]:
    """The lines of Python that make the transform which `open_transform` opens, as `transform`."""
    module, _, attribute = name.partition(":")
    return _code("transform", name, is_called=_makes_transform(_import(module, attribute)))


def _code(variable: str, names: str, *, is_called: bool) -> list[str]:
    module, _, attribute = names.partition(":")
    imported = f"from {module} import {attribute.partition('.')[0]}"
    value = f"{attribute}()" if is_called else attribute
    return [imported] if value == variable else [imported, f"{variable} = {value}"]


def _makes_transform(found: Any) -> bool:
    return inspect.isfunction(found) and not inspect.signature(found).parameters


def code_ended(source: str, error: SystemExit) -> CommandError:
    """The error of a command whose process the user's code wanted to end."""
    return CommandError(
        f"the code of {source} ended the process with exit code {error.code!r}: put the actions of a "
        'script under if __name__ == "__main__"',
        ExitCode.FAILED,
        "SystemExit",
    )


# --- folders ---------------------------------------------------------------------------------------------


def _open_folder(root: str, size: int | tuple[int, int] | None) -> Any:
    from fastload.images.folder import ImageFolder

    try:
        return ImageFolder(root, size)
    except FileNotFoundError as error:
        raise CommandError(_why_no_folder(root)) from error
    except (ImportError, ValueError) as error:  # of the URL's protocol
        raise CommandError(str(error)) from error


def _why_no_folder(root: str) -> str:
    import numpy as np

    from fastload.images.folder import IMAGE_EXTENSIONS, ImageFolder

    layout = f"SOURCE should have a folder of images for each class, such as {os.path.join(root, 'cat')}"
    try:
        folder = ImageFolder(root, allow_empty=True)
    except FileNotFoundError:
        return f"there is no folder in {root}: {layout}"
    if not len(folder):
        return f"the folders in {root} have no images: {layout}; images end in {_listed(IMAGE_EXTENSIONS)}"
    counts = np.bincount(folder.targets, minlength=len(folder.classes))
    empty = [os.path.join(root, folder.classes[label]) for label in np.flatnonzero(counts == 0)]
    return (
        f"there is no image in {_listed(empty)}: remove folders that are not classes, or give MODULE:NAME "
        "of a fastload.ImageFolder(..., allow_empty=True)"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_LISTED]) + (", ..." if len(names) > _MOST_LISTED else "")


def _parse_size(size: str | None) -> int | tuple[int, int] | None:
    if size is None:
        return None
    sides = size.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise CommandError(f"--size should be like 256 or 224x320 (height x width), but got {size!r}")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


# --- MODULE:NAME -----------------------------------------------------------------------------------------


def _parse_names(source: str) -> tuple[str, str]:
    module, _, name = source.partition(":")
    is_file = module.endswith(".py") and os.path.isfile(module)
    if is_file or not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
        raise CommandError(
            f"SOURCE should be a folder of images or MODULE:NAME, but {source!r} is neither: {_why(source)}"
        )
    return module, name


def _why(source: str) -> str:
    module, colon, name = source.partition(":")
    if module.endswith(".py"):
        stem = os.path.splitext(os.path.basename(module))[0]
        return f"for a Python file give its module and a name in it, such as {stem}:{name or 'NAME'}"
    try:
        os.stat(source)
    except PermissionError as error:
        return reading_refused(error)
    except OSError:
        return "write MODULE and NAME as in `import`" if colon else "there is no folder of that name"
    return "it is a file"


def _import(module: str, name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            add_note(
                error, _while_importing(module)
            )  # the module exists, but a module that it imports does not
            raise
        raise CommandError(
            f"there is no module {error.name!r} in the working directory or among the installed packages"
        ) from error
    except AttributeError as error:
        if module in sys.modules:
            raise CommandError(f"module {module!r} has no {name!r}") from error
        add_note(error, _while_importing(module))
        raise
    except Exception as error:
        add_note(error, _while_importing(module))
        raise


def _while_importing(module: str) -> str:
    return f"while module {module!r} was imported; fastload --debug ... shows where"


def _check_needs_nothing(source: str, maker: Any) -> None:
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):  # some functions in C have no signature: calling it will show
        return
    try:
        signature.bind()
    except TypeError as error:
        raise CommandError(
            f"{source} needs arguments {signature}: give the name of a dataset, or of a function without "
            "arguments that returns one"
        ) from error


def _is_dataset(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return False  # probably a path
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


@dataclass(frozen=True)
class SourceElsewhere:
    """Opens SOURCE on another machine, in the working directory of the command; pickles as a handle.

    Attributes:
        source: The user's SOURCE.
        size: The user's `--size`; None if not given.
        directory: The working directory of the command.
    """

    source: str
    size: str | None
    directory: str

    def __call__(self) -> Any:
        """The dataset.

        Raises:
            CommandError: SOURCE names no dataset, or the working directory does not exist on this machine.
        """
        try:
            os.chdir(self.directory)
        except OSError as error:
            raise CommandError(
                f"the working directory of the command is not on this machine: {reading_refused(error)}: run "
                "the command in a directory that all machines share"
            ) from error
        return open_source(self.source, self.size)


# --- --error-budget --------------------------------------------------------------------------------------


def parse_error_budget(budget: str | None) -> int | float:
    """The number of samples that may be left out, or their share; all of them if the option is missing.

    Raises:
        CommandError: The text is neither a number of samples nor a share.
    """
    if budget is None:
        return 1.0
    if budget.isdecimal():
        return int(budget)
    try:
        share = float(budget)
    except ValueError:
        share = 0.0
    if 0 < share <= 1:
        return share
    raise CommandError(
        "--error-budget should be a number of samples such as 20 or a share of them such as 0.01, "
        f"but got {budget!r}"
    )
