"""copies_for_threads(): pipelines are copied, what leads to them is copied shallowly, all else is shared."""

from __future__ import annotations

import collections
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Subset

from fastload import CachedDataset
from fastload.rng.pipelines import find_pipelines
from fastload.workers.threads import copies_for_threads
from tests.rng.draws_zoo import Pictures
from tests.rng.pipelines_zoo import crop


def copy_for_thread(dataset: Any) -> Any:
    ((copied, _),) = copies_for_threads(dataset, None, 1, with_generators=True)
    return copied


class Held:
    """Images and whatever is random."""

    def __init__(self, value: Any) -> None:
        self.images = np.zeros((4, 8, 8, 3), np.uint8)
        self.value = value

    def apply(self, image: Any) -> Any:
        return image


class Slotted:
    __slots__ = ("empty", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    value: Any


class Listed(list[Any]):
    name = "a list with a name"


HOLDERS: dict[str, Any] = {
    "attribute": Held,
    "slot": Slotted,
    "frozen": Frozen,
    "named tuple": lambda p: Held(Pair(1, p)),
    "defaultdict": lambda p: Held(collections.defaultdict(list, {"a": p})),
    "deque": lambda p: Held(collections.deque([p], 4)),
    "list with attributes": lambda p: Held(Listed([p])),
    "partial": lambda p: Held(functools.partial(print, p, sep=p)),
    "method": lambda p: Held(Held(p).apply),
    "nested": lambda p: Held([{"a": (Held(Slotted(p)),)}]),
    "subset": lambda p: Subset(Held(p), [0]),
    "cached": lambda p: CachedDataset(Pictures(3), transform=p),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_the_copy_holds_another_pipeline(name: str) -> None:
    """However it is held, the copy's pipeline is another object of the same kind."""
    pipeline = crop()
    dataset = HOLDERS[name](pipeline)

    copied = copy_for_thread(dataset)

    assert type(copied) is type(dataset)
    (found,) = find_pipelines(copied)
    assert found is not pipeline
    assert repr(found) == repr(pipeline)
    assert find_pipelines(dataset) == [pipeline]


def test_images_are_shared() -> None:
    """Nothing that is not random takes memory twice; a cache stays the same cache."""
    dataset = CachedDataset(Held(crop()).images, transform=crop())

    copied = copy_for_thread(dataset)

    assert copied is not dataset
    assert copied.dataset is dataset.dataset
    assert copied.cache is dataset.cache


def test_a_dataset_without_pipelines_is_not_copied() -> None:
    """There is nothing to keep apart."""
    dataset = Held(None)

    assert copy_for_thread(dataset) is dataset


def test_one_pipeline_of_two_holders_stays_one() -> None:
    """Datasets that share a pipeline have copies that share its copy, and none keeps the original."""
    pipeline = crop()
    dataset = ConcatDataset(
        [Held(pipeline).images, Subset(Held(pipeline), [0]), Subset(Held([pipeline]), [0])]
    )

    _, second, third = copy_for_thread(dataset).datasets

    assert second.dataset.value is third.dataset.value[0]
    assert second.dataset.value is not pipeline


def test_a_circle_is_copied_once() -> None:
    """A dataset that holds itself has a copy that holds itself."""
    dataset = Held(crop())
    dataset.images = {"owner": dataset}

    copied = copy_for_thread(dataset)

    assert copied.images["owner"] is copied
    assert copied.value is not dataset.value


def _by_closure(pipeline: Any) -> Any:
    return Held(lambda image: pipeline(image=image))


def _by_class(pipeline: Any) -> Any:
    return type("Owner", (Held,), {"transform": pipeline})(None)


@pytest.mark.parametrize("hold", [_by_closure, _by_class, lambda p: Held({p})])
def test_what_cannot_be_replaced_is_refused(hold: Any) -> None:
    """A pipeline of a function, a class or a set is one for all threads: the error says where it is."""
    with pytest.raises(ValueError, match=r"(?s)held by .*attribute of the dataset"):
        copy_for_thread(hold(crop()))
