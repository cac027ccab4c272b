"""Detects random datasets: watches what a few samples draw, and reads two of them again under another seed.

A cache would silently freeze one draw of a random dataset, which makes training worse. All random state is
restored afterwards. Copies of the dataset are read, so one that keeps its finished samples does not change;
what the copies share with it, such as arrays that are scaled in place, is put back.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import random
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from fastload.batch.source import inside_subsets
from fastload.cache.records import decode, encode
from fastload.cache.sources import MappedDataset
from fastload.errors import NondeterministicDatasetError, UnsupportedSampleError
from fastload.images.folder import ImageFolder
from fastload.nested.attributes import attributes
from fastload.nested.spec import flatten
from fastload.nested.tree import first_difference
from fastload.rng.draws import DrawWatch
from fastload.rng.entry_points import seeded_by
from fastload.rng.generators import LIBRARY_GENERATORS
from fastload.rng.rng_scope import RngScope
from fastload.system.logs import log
from fastload.system.notes import add_note
from fastload.system.torchvision_arrays import V1_MODULE, V2_INSTEAD, V2_MODULE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Under these seeds the first uniform draw of `random`, of `numpy.random` and of torch is below 0.02 and above
# 0.98: the result of one coin flip per sample differs, for any probability between these values.
_SEEDS = (114642, 101306)
_CONTAINERS = (dict, list, set, collections.OrderedDict, collections.defaultdict, collections.deque)
_MAX_PARTS = 1_000  # datasets in one list
_MAX_SEEN = 20_000  # objects whose state is put back
_MAX_COPIED_BYTES = 64 << 20  # of arrays; of others, the rows of the samples that are read are put back

_PROBED = 3  # samples that are read
_TRIED = 10  # at most, if some of them cannot be read


def spread_indices(length: int, count: int) -> list[int]:
    """At most `count` indices of a dataset, evenly from the first to the last: classes can be sorted."""
    count = min(length, count)
    return [-(-number * (length - 1) // max(1, count - 1)) for number in range(count)]


def probe(
    dataset: Any, look: Callable[[Any], None] | None = None, *, indices: list[int] | None = None
) -> dict[int, Any]:
    """Read the first, the middle and the last sample; all but the middle one again, and those that draw.

    Other samples take the place of those that cannot be read, because `on_error` can allow these.

    Args:
        dataset: Map-style.
        look: Called with each sample as the dataset returns it; the result has copies.
        indices: Samples that can be read, to be read instead.

    Raises:
        NondeterministicDatasetError: A sample draws random numbers, or reading it twice gave different
            results; names the generators, or the leaf.
        UnsupportedSampleError: A value in a sample cannot be cached.
        Exception: The error of the first sample, if none of ten samples can be read.
    """
    watch = DrawWatch(dataset)
    with RngScope(watch.generators), _put_back(dataset, indices) as changed:
        samples, changes = _read_once(watch, dataset, look, indices)
        # Another copy, so a dataset that keeps its finished samples reads them again. The first copy is gone,
        # with the files that it has opened: some libraries do not open a file twice.
        twin = _twin(dataset)
        _seed(watch, _SEEDS[1])
        drawn: dict[int, list[str]] = {}
        once = spread_indices(len(dataset), _PROBED)[1:-1]
        for index, sample in samples.items():
            if index in once and indices is None and not changes[index]:
                continue
            fresh, again = watch.access(twin, index)
            names = _drawn(changes[index], again)
            path = first_difference(sample, fresh)
            if path is not None:
                why = f"returns a different sample on every access: {path} differs"
                if state := changed():
                    why += f", and reading it changes {state}"
                _reject(dataset, index, why, names)
            if names:
                drawn[index] = names
    # What draws on the first access alone can be what is made or imported for all others.
    if len(drawn) > 1 or (drawn and (len(samples) == 1 or next(iter(samples)) not in drawn)):
        index = max(drawn)
        _reject(dataset, index, "returns a random sample", drawn[index])
    return samples


def _read_once(
    watch: DrawWatch, dataset: Any, look: Callable[[Any], None] | None, indices: list[int] | None
) -> tuple[dict[int, Any], dict[int, dict[str, Any]]]:
    """Samples of a copy of the dataset, and the changes of the generators by each of them."""
    twin = _twin(dataset)
    changes: dict[int, dict[str, Any]] = {}
    _seed(watch, _SEEDS[0])

    def read(index: int) -> Any:
        fresh, changes[index] = watch.access(twin, index)
        if look is not None:
            look(fresh)
        try:
            return decode(encode(fresh))  # as bytes: a dataset can reuse its buffer on the next access
        except UnsupportedSampleError as error:
            if changes[index]:  # else a dataset that is random, too, would raise that as the next error
                _, again = watch.access(twin, index)
                names = _drawn(changes[index], again)
                if names:
                    _reject(dataset, index, "returns a random sample", names)
            add_note(error, f"in sample {index} of the dataset")
            raise

    if indices is not None:
        return {index: read(index) for index in indices}, changes
    return dict(itertools.islice(readable(dataset, read), _PROBED)), changes


def readable(dataset: Any, read: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
    """Indices of samples that can be read, from the whole dataset, each with what `read` returns for it.

    Raises:
        NondeterministicDatasetError: Raised by `read`.
        UnsupportedSampleError: Raised by `read`.
        Exception: The error of the first sample, if none of ten samples can be read.
    """
    indices, errors = _tried(len(dataset)), []
    for index in indices:
        try:
            sample = read(index)
        except (NondeterministicDatasetError, UnsupportedSampleError):
            raise
        except Exception as error:  # noqa: BLE001 - any error of the user's dataset
            log.debug("sample %d cannot be read, so another one is probed: %r", index, error)
            errors.append(error)
            continue
        yield index, sample
    if errors and len(errors) == len(indices):
        listed = ", ".join(map(str, indices))
        add_note(errors[0], f"none of the {len(indices)} samples that were probed can be read: {listed}")
        raise errors[0]


def _tried(length: int) -> list[int]:
    return list(dict.fromkeys(spread_indices(length, _PROBED) + spread_indices(length, _TRIED)))[:_TRIED]


def _drawn(changes: dict[str, Any], again: dict[str, Any]) -> list[str]:
    """What both accesses to a sample drew from; what it seeds each time ends in the same state."""
    return [name for name in again if name in changes and again[name] != changes[name]]


def _reject(dataset: Any, index: int, problem: str, generators: list[str]) -> NoReturn:
    of_user = dataset.dataset if isinstance(dataset, MappedDataset) else dataset
    after, cure = "", "Move the random part out of the dataset, to CachedDataset(dataset, transform)"
    if isinstance(dataset, MappedDataset) and dataset.is_pre_transformed:
        after, cure = " after pre_transform", "Pass random transforms as transform="
    source = f" (drawn from {', '.join(generators)})" if generators else ""
    inner, _ = inside_subsets(of_user)
    module, advice = f"{type(getattr(inner, 'transform', None)).__module__}.", ""
    if module.startswith(V1_MODULE):
        advice = ". Where the dataset returns PIL images without its transform, pass "
        advice += "pre_transform=function, which returns (numpy.asarray(sample[0].convert('RGB')), sample[1])"
        begin = "begin the transform with ToImage()" if module.startswith(V2_MODULE) else V2_INSTEAD
        advice += f", and {begin}"
    raise NondeterministicDatasetError(
        f"{type(of_user).__name__}[{index}]{after} {problem}{source}. A cache would freeze one draw. {cure}, "
        "which runs on every access"
        '; or cache files instead of samples: DataLoader(dataset, cache="ram"), or fastload run --cache ram'
        f"{advice}"
    )


def _seed(watch: DrawWatch, seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    watch.seed = seed


def _twin(dataset: Any) -> Any:
    """A dataset with the attributes of another one, but containers of its own, also in the datasets inside.

    Reading it fills no dict of finished samples in the other one, and opens no file there. None of the
    dataset's code runs; a dataset that cannot be made this way is read itself.
    """
    cls: Any = type(dataset)
    values = getattr(dataset, "__dict__", None)
    # A `__del__` would close files that both use.
    if cls.__new__ is not object.__new__ or hasattr(cls, "__del__") or attributes(dataset) != values:
        return dataset
    twin = object.__new__(cls)
    for name, value in values.items():
        own = copy.copy(value) if type(value) in _CONTAINERS else value
        if isinstance(own, Dataset) or (name == "dataset" and cls in (MappedDataset, Subset)):
            own = _twin(own)
        elif type(own) is list and len(own) <= _MAX_PARTS:
            own = [_twin(part) if isinstance(part, Dataset) else part for part in own]
        vars(twin)[name] = own
    return twin


@contextlib.contextmanager
def _put_back(dataset: Any, indices: list[int] | None) -> Iterator[Callable[[], str]]:
    """Put back the arrays and containers of a dataset after a block in which its copies are read.

    What other objects hold that the dataset refers to stays as it is.

    Args:
        dataset: Map-style.
        indices: The samples that are read; None for those of `readable`.

    Yields:
        A function that names the attributes that have changed.
    """
    rows = _tried(len(dataset)) if indices is None else indices
    states = list(_states(dataset, rows))

    def different() -> Iterator[tuple[str, Any, Any, Any]]:
        for name, value, part, saved in states:
            if part is None:
                now, before = (list(map(id, _flat(each))) for each in (value, saved))
                has_changed = now != before
            else:
                has_changed = first_difference(saved, value[part]) is not None
            if has_changed:
                yield name, value, part, saved

    try:
        yield lambda: ", ".join(dict.fromkeys(f"its {name}" for name, *_ in different() if name))
    finally:
        with torch.no_grad():
            for _, value, part, saved in list(different()):
                if part is not None:
                    value[part] = saved
                    continue
                value.clear()
                (value.extend if isinstance(value, (list, collections.deque)) else value.update)(saved)


def _states(dataset: Any, rows: list[int]) -> Iterator[tuple[str, Any, Any, Any]]:
    """The name of an attribute, a container or array in it, which part of the array, and a copy of both."""
    length, left_bytes = len(dataset), _MAX_COPIED_BYTES
    seen: dict[int, Any] = {}  # keeps what it holds alive, so that ids stay unique
    queue: list[tuple[str, Any]] = [("", dataset)]
    for name, value in queue:  # grows meanwhile
        if id(value) in seen or len(seen) > _MAX_SEEN:
            continue
        seen[id(value)] = value
        parts: Iterable[tuple[str, Any]] = ()
        if type(value) in _CONTAINERS:
            inside = value.values() if isinstance(value, dict) else value
            if len(value) <= _MAX_SEEN:
                yield name, value, None, copy.copy(value)
            elif isinstance(value, list) and len(value) == length:
                inside = [value[row] for row in rows]
            else:
                inside = ()
            parts = ((name, part) for part in inside)
        elif isinstance(value, (np.ndarray, torch.Tensor)):
            part: Any = ... if value.nbytes <= left_bytes else rows
            with contextlib.suppress(UnsupportedSampleError):  # such as of another device
                if (part is ... or (value.ndim and len(value) == length)) and _is_written(value):
                    left_bytes -= value.nbytes if part is ... else 0
                    yield name, value, part, copy.deepcopy(value[part])
        elif isinstance(value, tuple):
            parts = ((name, part) for part in value)
        else:
            parts = attributes(value).items()
            if isinstance(own := getattr(value, "__dict__", None), dict):
                yield "", own, None, dict(own)
        queue += (
            (name, part)
            for name, part in parts
            if type(part) in _CONTAINERS
            or name == "dataset"
            or isinstance(part, (tuple, np.ndarray, torch.Tensor, Dataset))
        )


def _is_written(array: Any) -> bool:
    flatten(array)
    return isinstance(array, torch.Tensor) or array.flags.writeable


def _flat(container: Any) -> Iterable[Any]:
    return itertools.chain(*container.items()) if isinstance(container, dict) else container


def read_unnoticed(dataset: Any, index: int) -> Any:
    """One sample; generators of the libraries and of pipelines stay as they were, and so does the dataset."""
    with (
        _put_back(dataset, [index]),
        RngScope(list(LIBRARY_GENERATORS)),
        seeded_by(DrawWatch(twin := _twin(dataset))),
    ):
        return twin[index]


def reject_random(dataset: Any) -> None:
    """Reject a dataset that returns a different sample on every access; a cache would freeze one draw.

    An `ImageFolder` without a transform is known not to; none of its files is read.

    Raises:
        NondeterministicDatasetError: The first, the middle or the last sample is random. Others take the
            place of samples that cannot be read.
        UnsupportedSampleError: One of these samples cannot be cached.
    """
    if type(dataset) is ImageFolder and dataset.transform is None:  # a subclass can be random
        return
    try:
        probe(dataset)
    except (NondeterministicDatasetError, UnsupportedSampleError):
        raise
    except Exception:  # noqa: BLE001 - none can be read: the build reads them again, and reports the error
        return
