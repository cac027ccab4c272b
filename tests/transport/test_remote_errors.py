"""Errors from workers: fastload's arrive as themselves, all others as torch's loader sends them."""

from __future__ import annotations

from typing import Any

import pytest

import fastload
from fastload import errors
from tests.kit import datasets

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.FastloadError)
]
WORKERS = [
    pytest.param({"multiprocessing_context": "fork"}, id="fork"),
    pytest.param({"multiprocessing_context": "forkserver"}, id="forkserver", marks=pytest.mark.slow),
    pytest.param({"worker_type": "thread"}, id="thread"),
]


def made(kind: type[errors.FastloadError]) -> Any:
    """An error of this class with an attribute, a user's note, and the arguments of its constructor."""
    arguments = ("a.jpg", "cut") if kind is errors.ImageReadError else ("it says why",)
    error = kind(*arguments)
    error.tries = 3  # type: ignore[attr-defined]
    error.add_note("a note of the user's")
    return error


def raising(index: int) -> Any:
    """Sample i raises an error of the i-th class."""
    raise made(KINDS[index])


def assert_alike(error: Any, expected: Any) -> None:
    """The same class, text and attributes; fastload's own notes are left out."""
    attributes = [{**vars(one), "__notes__": one.__notes__[:1]} for one in (error, expected)]
    assert (type(error), str(error), error.args) == (type(expected), str(expected), expected.args)
    assert attributes[0] == attributes[1]


@pytest.mark.parametrize("options", WORKERS)
def test_errors_of_fastload_arrive_as_themselves(options: dict[str, Any]) -> None:
    """Of each class, with the text, the attributes and the notes that they have without workers."""
    iterator = iter(fastload.DataLoader(datasets.Made(raising, len(KINDS)), 1, num_workers=1, **options))
    for kind in KINDS:
        with pytest.raises(kind) as caught:
            next(iterator)

        assert_alike(caught.value, made(kind))


class DamagedClass(errors.CacheCorruptError):
    """An error of the user's that cannot be made again from what pickle has."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line}")


def raises_it(index: int) -> Any:
    raise DamagedClass("a.bin", 7)


def test_a_subclass_that_cannot_be_pickled_arrives_as_torch_has_it() -> None:
    """As a RuntimeError with the text."""
    with pytest.raises(RuntimeError, match=r"Caught DamagedClass(.|\n)*DamagedClass: a\.bin:7"):
        list(fastload.DataLoader(datasets.Made(raises_it), 1, num_workers=1))


def test_an_error_of_fastload_says_where_the_user_called_it() -> None:
    """In a note, because its text is that without workers."""
    dataset = datasets.Made(lambda _: fastload.read_image("/nowhere/1.jpg"))
    with pytest.raises(errors.ImageReadError, match="No such file") as caught:
        list(fastload.DataLoader(dataset, 1, num_workers=1))

    assert str(caught.value) == "cannot read the image '/nowhere/1.jpg': No such file or directory"
    note = caught.value.__notes__[0]
    assert note.startswith("fastload: raised in DataLoader worker process 0:\n")
    assert 'fastload.read_image("/nowhere/1.jpg")' in note
