"""Subclasses with iterators of their own: those that wrap ours are counted, others are warned of."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

import fastload
from tests.resume.loaders import LENGTH, labels, seeded
from tests.resume.zoo import Numbers

if TYPE_CHECKING:
    from collections.abc import Iterator


class Generator(fastload.DataLoader):
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class GeneratorThatSavesFirst(fastload.DataLoader):
    """Keeps the state of the beginning of each epoch."""

    def __iter__(self) -> Iterator[Any]:
        self.beginning = self.state_dict()
        yield from super().__iter__()


class GeneratorOfAHelper(fastload.DataLoader):
    def _batches(self) -> Iterator[Any]:
        yield from super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        return self._batches()


class Map(fastload.DataLoader):
    def __iter__(self) -> Iterator[Any]:
        return map(torch.clone, super().__iter__())


class Wrapper:
    """An iterator around another, as PyTorch Geometric's loaders have it."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


class Inner(fastload.DataLoader):
    def _get_iterator(self) -> Any:
        return Wrapper(super()._get_iterator())


class InnerGenerator(fastload.DataLoader):
    def _get_iterator(self) -> Any:
        yield from super()._get_iterator()


class Early(fastload.DataLoader):
    """Makes its one iterator at once, as some loaders do to keep their workers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.__dict__["early"] = super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.early)


LAZY = [Generator, GeneratorThatSavesFirst, GeneratorOfAHelper, InnerGenerator]
WRAPPERS = [*LAZY, Map, Inner]


class TorchsOwn(fastload.DataLoader):
    """As LitData's loaders."""

    def _get_iterator(self) -> Any:
        return _SingleProcessDataLoaderIter(self)


class TorchsOwnAtOnce(fastload.DataLoader):
    def __iter__(self) -> Any:
        return _SingleProcessDataLoaderIter(self)


class Loop(fastload.DataLoader):
    def __iter__(self) -> Iterator[Any]:
        for indices in self.batch_sampler:
            yield self.collate_fn([self.dataset[index] for index in indices])


class InnerOfAnotherLoader(fastload.DataLoader):
    def _get_iterator(self) -> Any:
        return fastload.DataLoader(self.dataset, self.batch_size)._get_iterator()


OTHERS = [TorchsOwn, TorchsOwnAtOnce, Loop, InnerOfAnotherLoader]
UNKNOWN = "the state of this {} is that of the beginning of an epoch"


def make(kind: type[Any], **options: Any) -> Any:
    return kind(Numbers(LENGTH), 4, shuffle=True, generator=seeded(), **options)


@pytest.mark.parametrize("kind", [*WRAPPERS, Early])
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

    assert kind in (Early, GeneratorThatSavesFirst) or not caplog.records


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("kind", LAZY)
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


@pytest.mark.parametrize("kind", OTHERS)
def test_the_position_of_other_iterators_is_a_warning(
    kind: type[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each loader; the state is that of the beginning of an epoch."""
    loader = make(kind)
    iterator = iter(loader)
    next(iterator)
    states = [loader.state_dict()]
    list(iterator)
    states.append(loader.state_dict())

    assert [record.getMessage().count(UNKNOWN.format(kind.__name__)) for record in caplog.records] == [1]
    assert [found["_num_yielded"] for found in states] == [0, 0]


@pytest.mark.parametrize("base", [TorchsOwn, Loop])
def test_a_state_of_its_own_is_no_warning(base: type[Any], caplog: pytest.LogCaptureFixture) -> None:
    """A subclass that defines state_dict() may take the rest from ours."""

    class WithState(base):  # type: ignore[misc]
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "mine": 1}

    loader = make(WithState)
    next(iter(loader))

    assert loader.state_dict()["mine"] == 1
    assert not caplog.records


def test_what_is_sent_to_a_generator_reaches_it() -> None:
    """The iterator of a subclass behaves as its own generator does: close() and throw() end it inside."""
    ends: list[str] = []

    class Ending(fastload.DataLoader):
        def __iter__(self) -> Any:
            try:
                yield from super().__iter__()
            except BaseException as error:
                ends.append(type(error).__name__)
                raise

    closed, thrown = iter(make(Ending)), iter(make(Ending))
    next(closed), next(thrown)  # type: ignore[call-overload]
    closed.close()
    with pytest.raises(ZeroDivisionError):
        thrown.throw(ZeroDivisionError)

    assert ends == ["GeneratorExit", "ZeroDivisionError"]
