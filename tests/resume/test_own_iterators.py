"""Subclasses with iterators of their own, which wrap ours, are counted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fastload
from tests.resume.loaders import LENGTH, labels, seeded
from tests.resume.zoo import Numbers


class Generator(fastload.DataLoader):
    def __iter__(self) -> Any:
        yield from super().__iter__()


class InnerGenerator(fastload.DataLoader):
    def _get_iterator(self) -> Any:
        yield from super()._get_iterator()


class Inner(fastload.DataLoader):
    """Wraps the iterator, as PyTorch Geometric's loaders do."""

    def _get_iterator(self) -> Any:
        return map(torch.clone, super()._get_iterator())


class Early(fastload.DataLoader):
    """Makes its one iterator at once, as some loaders do to keep their workers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.__dict__["early"] = super().__iter__()

    def __iter__(self) -> Any:
        return itertools.islice(self.early, len(self))


def make(kind: type[Any], **options: Any) -> Any:
    return kind(Numbers(LENGTH), 4, shuffle=True, generator=seeded(), **options)


@pytest.mark.parametrize("kind", [Generator, InnerGenerator, Inner, Early])
def test_wrapped_iterators_are_counted_and_resume(kind: type[Any], caplog: pytest.LogCaptureFixture) -> None:
    """At each of several stops and at the end, batches and state are those of a plain loader, unwarned."""
    loaders = make(fastload.DataLoader), make(kind)
    for num_batches in (4, 4, None) if kind is not Early else (3,):  # it never sees the end
        plain, wrapping = ((labels(itertools.islice(one, num_batches)), one.state_dict()) for one in loaders)
        assert wrapping == plain
        loaders = make(fastload.DataLoader), make(kind)
        if num_batches is not None and kind is not Early:
            for loader in loaders:
                loader.load_state_dict(plain[1])

    assert not caplog.records


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("kind", [Generator, InnerGenerator])
def test_a_generator_that_has_not_begun_changes_no_state(kind: type[Any], *, is_loaded: bool) -> None:
    """Frameworks call iter() to find out whether they may, and drop the iterator."""
    loader = make(kind)
    if is_loaded:
        before = make(fastload.DataLoader)
        next(iter(before))
        loader.load_state_dict(before.state_dict())
    state = loader.state_dict()

    iter(loader)
    iterator = iter(loader)

    assert loader.state_dict() == state
    next(iterator)
    assert loader.state_dict()["_num_yielded"] == 1 + is_loaded
