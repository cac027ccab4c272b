"""A pipeline that refuses the cache's own memory, or may hide it, is given copies from then on."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from typing import Any

import albumentations as A
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastload.cache.dataset import CachedDataset
from fastload.cache.transform import TransformCaller
from tests.cache.zoo import BareImages, FloatImages
from tests.kit.batches import assert_same_samples


@pytest.fixture
def all_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every transform is given the cache's own memory first."""
    monkeypatch.setattr("fastload.cache.transform.keeps_read_only", lambda transform: True)


def divide_in_place(p: float = 1) -> Any:
    """A transform of albumentations' own that NumPy refuses on read-only memory."""
    return A.Normalize(normalization="min_max_per_channel", p=p)


def test_a_refusal_is_answered_and_remembered() -> None:
    """A pipeline that refuses read-only memory is called again with a copy, and then given copies at once."""
    caller = TransformCaller(divide_in_place())
    fetched: list[int] = []

    def fetch(index: int) -> Any:
        fetched.append(index)
        image = FloatImages().sample(index)
        image.flags.writeable = False
        return image

    assert not caller.needs_copies
    for _ in range(4):
        caller(fetch, 0)

    assert len(fetched) == 5
    assert caller.needs_copies


def test_a_late_refusal_is_met() -> None:
    """A pipeline that refuses only now and then gives in every call what it gives on plain arrays."""
    dataset = FloatImages(40)
    ds = CachedDataset(dataset, A.Compose([divide_in_place(p=0.1)], seed=1))
    divide = divide_in_place()
    found = [ds[index] for index in range(40)]
    divided = [divide(image=dataset.sample(index))["image"] for index in range(40)]
    is_divided = [np.array_equal(one, other) for one, other in zip(found, divided, strict=True)]

    assert 0 < sum(is_divided) < 20
    for index, is_done in enumerate(is_divided):
        assert_same_samples(found[index], divided[index] if is_done else dataset.sample(index))


Link = st.sampled_from(["cause", "context", "suppressed"])


class Wrapper:
    """As MONAI's transforms: an error in a part is raised again, from or after the error that it met.

    Args:
        links: How each wrapper, the innermost first, is tied to the error before it.
    """

    def __init__(self, links: list[str]) -> None:
        self.links = links
        self.num_calls = 0

    def __call__(self, image: Any) -> Any:
        self.num_calls += 1
        error: Exception
        try:
            image += 1
        except ValueError as refusal:
            error = refusal
        else:
            return image
        for link in self.links:
            outer = RuntimeError(f"applying transform {self}")
            if link == "cause":
                outer.__cause__ = error
            else:
                outer.__context__ = error
                outer.__suppress_context__ = link == "suppressed"
            error = outer
        raise error


@pytest.mark.usefixtures("all_known")
@pytest.mark.parametrize("links", [["cause"], ["context"], ["cause", "context", "cause"], ["context"] * 3])
def test_a_refusal_is_found_behind_other_errors(links: list[str]) -> None:
    """An error that was raised from a refusal, or while one was handled, is a refusal."""
    dataset = BareImages(4)
    ds = CachedDataset(dataset, Wrapper(links))

    assert_same_samples(ds[2], dataset.sample(2) + 1)


@pytest.mark.usefixtures("all_known")
@pytest.mark.parametrize("links", [["suppressed"], ["suppressed", "cause"], ["cause"] * 1000])
def test_an_error_that_hides_a_refusal_passes_through(links: list[str]) -> None:
    """`raise ... from None` is a deliberate error, and the search along a chain has an end."""
    transform = Wrapper(links)
    ds = CachedDataset(BareImages(4), transform)

    with pytest.raises(RuntimeError, match="applying transform"):
        ds[2]

    assert transform.num_calls == 1


@pytest.mark.usefixtures("all_known")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(Link, max_size=12))
def test_a_refusal_is_found_exactly_where_python_shows_it(links: list[str]) -> None:
    """An error counts as a refusal if a traceback would show the refusal among the errors that led to it."""
    image = BareImages(1).sample(0)
    image.flags.writeable = False
    with pytest.raises((RuntimeError, ValueError)) as caught:
        Wrapper(links)(image)
    is_shown = "read-only" in "".join(traceback.format_exception(caught.value))
    ds = CachedDataset(BareImages(1), Wrapper(links))

    with contextlib.nullcontext() if is_shown else pytest.raises(RuntimeError, match="applying transform"):
        assert_same_samples(ds[0], BareImages(1).sample(0) + 1)


@dataclasses.dataclass
class Holder:
    """An object that a search through containers does not enter."""

    array: Any


def first_pixel(image: Any) -> Any:
    return image.view(np.dtype([("red", "u1"), ("green", "u1"), ("blue", "u1")]))[0, 0, 0]


@pytest.mark.usefixtures("all_known")
@pytest.mark.parametrize(
    ("hide", "reveal"),
    [
        (Holder, lambda output: output.array),
        (lambda image: {"a": [Holder(image[2:])]}, lambda output: output["a"][0].array),
        (lambda image: np.array([image, None], object), lambda output: output[0]),
        (memoryview, np.asarray),
        (first_pixel, np.asarray),
    ],
)
def test_no_object_hides_cached_memory(hide: Any, reveal: Any) -> None:
    """An array within an object that a transform returns is private, too."""
    dataset = BareImages(4)
    ds = CachedDataset(dataset, hide)
    for index in range(4):
        array = reveal(ds[index])
        array[...] = 0

        assert_same_samples(ds.view(index), dataset.sample(index))
