"""The saved form of a loader's state: a dict of plain types, and the checks when it is loaded again.

The dict holds only types that JSON and `torch.load(weights_only=True)` support, if the user's own parts
(states of samplers and datasets) do too. Reading a state runs no code from it. Every value is checked before
anything is changed, because a state may come from a damaged file or from somebody else.
"""

from __future__ import annotations

import base64
import binascii
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastload.batch.iterable_state import ENDED, NOT_BEGUN, IterableState
from fastload.epochs.order import Order
from fastload.epochs.sampler_state import DEFAULT
from fastload.errors import ResumeError

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = 3
_READABLE = (2, 3)  # version 2 says neither its rank nor its order

T = TypeVar("T")

_KEYS = {
    "version",
    "epoch",
    "_num_yielded",
    "_iterator_finished",
    "beginning",
    "base_seed",
    "sample_seed",
    "index_checksum",
    "generators",
    "samplers",
    "obstacle",
    "dataset_states",
    "next_worker",
}
_KEYS_OF_3 = {"rank", "order"}
_ITERATOR_KINDS = (None, "local", "workers", "again")
_INT64 = 1 << 63


@dataclass
class SavedState:
    """The position of a loader.

    Attributes:
        epoch: The number of the epoch that has begun, or that comes next.
        num_yielded: How many of its batches the caller has received.
        is_finished: Whether the caller has seen its end.
        iterator_kind: Saved as "beginning"; None before the first epoch. See `epoch.Epoch`.
        base_seed: The seed from which torch seeds its workers.
        sample_seed: The seed from which `rng="sample"` seeds each sample.
        checksum: How many lists of indices the checksum covers, and the checksum.
        generators: States of generators, by place.
        samplers: States of samplers, as `sampler_state.samplers_of` returns them: pickled by this process.
        obstacle: Why the epoch cannot be resumed in the middle; None if it can.
        dataset_states: For an iterable dataset, and for a map-style dataset with a `state_dict()`: the state
            of each worker's copy.
        next_worker: The worker whose batch is due next.
        rank: The rank that saved the state; None if unknown.
        order: The facts about the order that are the same on every rank; None in version 2.
    """

    epoch: int
    num_yielded: int
    is_finished: bool
    iterator_kind: str | None
    base_seed: int
    sample_seed: int
    checksum: tuple[int, int]
    generators: dict[str, bytes]
    samplers: dict[str, bytes]
    obstacle: str | None
    dataset_states: list[IterableState] | None
    next_worker: int
    rank: int | None = None
    order: Order | None = None

    @property
    def is_within_epoch(self) -> bool:
        """Whether an epoch has begun, and the caller has not seen its end."""
        return self.iterator_kind is not None and not self.is_finished

    def to_plain(self) -> dict[str, Any]:
        """A dict for the user; it shares no mutable objects with this one."""
        states = self.dataset_states
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "_num_yielded": self.num_yielded,  # torchdata and Accelerate use the names of these three
            "_sampler_iter_yielded": self.num_yielded,
            "_iterator_finished": self.is_finished,
            "beginning": self.iterator_kind,
            "base_seed": self.base_seed,
            "sample_seed": self.sample_seed,
            "index_checksum": list(self.checksum),
            "generators": {
                place: base64.b64encode(state).decode("ascii") for place, state in self.generators.items()
            },
            "samplers": {place: pickle.loads(state) for place, state in self.samplers.items()},
            "obstacle": self.obstacle,
            "dataset_states": None if states is None else [_plain_dataset_state(state) for state in states],
            "next_worker": self.next_worker,
            "rank": self.rank,
            "order": None if self.order is None else self.order.to_plain(),
        }

    @classmethod
    def parse(cls, state: Any) -> SavedState:
        """Read a dict of `to_plain`, also after a round trip through JSON.

        Raises:
            ResumeError: This is not such a dict, or a value in it is not valid.
        """
        version = state.get("version") if isinstance(state, dict) else None
        if type(version) is int and version not in _READABLE:
            raise ResumeError(
                f"the state has version {_shown(version)}, but this release reads version "
                f"{' and '.join(map(str, _READABLE))}"
            )
        needed = _KEYS | _KEYS_OF_3 if version == VERSION else _KEYS
        missing = sorted(needed - set(state)) if isinstance(state, dict) else sorted(needed)
        if missing:
            raise ResumeError(f"this is not a state of a fastload.DataLoader: it lacks {', '.join(missing)}")
        if type(state["version"]) is not int:
            raise _wrong("version", f"the int {VERSION}", state["version"])
        found = cls(
            epoch=_integer("epoch", state["epoch"], -_INT64, _INT64),
            num_yielded=_integer("_num_yielded", state["_num_yielded"], 0, _INT64),
            is_finished=_checked(
                "_iterator_finished", state["_iterator_finished"], lambda v: type(v) is bool, "a bool"
            ),
            iterator_kind=_checked(
                "beginning",
                state["beginning"],
                lambda v: (v is None or type(v) is str) and v in _ITERATOR_KINDS,
                f"one of {_ITERATOR_KINDS}",
            ),
            base_seed=_integer("base_seed", state["base_seed"], 0, _INT64),
            sample_seed=_integer("sample_seed", state["sample_seed"], 0, 2 * _INT64),
            checksum=_checksum(state["index_checksum"]),
            generators=_generators(state["generators"]),
            samplers=_samplers(state["samplers"]),
            obstacle=_checked(
                "obstacle", state["obstacle"], lambda v: v is None or type(v) is str, "None or a str"
            ),
            dataset_states=_dataset_states(state["dataset_states"]),
            next_worker=_integer("next_worker", state["next_worker"], 0, _INT64),
        )
        if version == VERSION:
            found.rank = _optional_integer("rank", state["rank"], 0, _INT64)
            found.order = _order(state["order"])
        num_copies = 1 if found.dataset_states is None else len(found.dataset_states)
        if found.next_worker >= num_copies:
            raise _wrong(
                "next_worker", f"below {num_copies}, the number of dataset_states", found.next_worker
            )
        if found.is_within_epoch and DEFAULT not in found.generators:
            raise _wrong("generators", f"a dict with the key {DEFAULT!r}", sorted(found.generators))
        return found


def _wrong(key: str, expected: str, value: Any) -> ResumeError:
    return ResumeError(
        f"the state of a fastload.DataLoader is damaged: {key!r} should be {expected}, but got "
        f"{_shown(value)}. Load another checkpoint, or start without a state"
    )


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.100}"
    except Exception:  # noqa: BLE001  # repr fails for ints of thousands of digits and for some objects
        return f"a value of type {type(value).__name__} that cannot be shown"


def _checked(key: str, value: Any, is_right: Callable[[Any], bool], expected: str) -> Any:
    if not is_right(value):
        raise _wrong(key, expected, value)
    return value


def _integer(key: str, value: Any, start: int, stop: int) -> int:
    """Check that a value is an int (not a bool) from ``start`` to below ``stop``."""
    if type(value) is not int or not start <= value < stop:
        raise _wrong(key, f"an int from {start} to {stop - 1}", value)
    return value


def _optional_integer(key: str, value: Any, start: int, stop: int) -> int | None:
    return None if value is None else _integer(key, value, start, stop)


def _order(value: Any) -> Order | None:
    if value is None:
        return None
    names = set(Order.__annotations__)
    if not isinstance(value, dict) or set(value) != names:
        raise _wrong("order", f"None or a dict with the keys {sorted(names)}", value)
    return Order(
        num_samples=_optional_integer("order['num_samples']", value["num_samples"], 0, _INT64),
        batch_size=_optional_integer("order['batch_size']", value["batch_size"], -_INT64, _INT64),
        sampler=_checked(
            "order['sampler']", value["sampler"], lambda v: v is None or type(v) is str, "None or a str"
        ),
        seed=_optional_integer("order['seed']", value["seed"], -2 * _INT64, 2 * _INT64),
        num_ranks=_optional_integer("order['num_ranks']", value["num_ranks"], 0, _INT64),
    )


def _checksum(value: Any) -> tuple[int, int]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise _wrong("index_checksum", "a list of two ints", value)
    return (
        _integer("index_checksum[0]", value[0], 0, _INT64),
        _integer("index_checksum[1]", value[1], 0, 1 << 32),
    )


def _named(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(type(name) is str for name in value):
        raise _wrong(key, "a dict whose keys are str", value)
    return value


def _generators(value: Any) -> dict[str, bytes]:
    found = {}
    for place, text in _named("generators", value).items():
        try:
            found[place] = base64.b64decode(text, validate=True) if type(text) is str else b""
        except (binascii.Error, ValueError):  # ValueError: a character outside ASCII
            found[place] = b""
        if not found[place]:
            raise _wrong(f"generators[{place!r}]", "the base64 text of a generator's state", text)
    return found


def _samplers(value: Any) -> dict[str, bytes]:
    found = {}
    for place, state in _named("samplers", value).items():
        key = f"samplers[{place!r}]"
        if place.endswith(".epoch"):
            _integer(key, state, -_INT64, _INT64)
        found[place] = _copied(key, pickle.dumps, state)
    return found


def _dataset_states(value: Any) -> list[IterableState] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not value:
        raise _wrong("dataset_states", "None or a list of dicts, one for each worker", value)
    return [_dataset_state(f"dataset_states[{number}]", state) for number, state in enumerate(value)]


def _dataset_state(key: str, value: Any) -> IterableState:
    progress = value.get("progress") if isinstance(value, dict) else None
    if type(progress) is str:
        if progress == "begun" and not value.keys().isdisjoint(("state", "iterator", "num_batches")):
            parts = {
                name: _copied(key, pickle.dumps, value[place])
                for name, place in (("data", "state"), ("iterator", "iterator"))
                if place in value
            }
            num_batches = _integer(f"{key}['num_batches']", value.get("num_batches", 0), 0, _INT64)
            data, iterator = parts.get("data", b""), parts.get("iterator", b"")
            return IterableState("begun", data, iterator=iterator, num_batches=num_batches)
        for mark in (NOT_BEGUN, ENDED):
            if progress == mark.progress:
                return mark
    raise _wrong(
        key,
        "a dict whose 'progress' is 'not begun', 'ended', or 'begun' together with a 'state', an 'iterator' "
        "or 'num_batches'",
        value,
    )


def _copied(key: str, make: Callable[[Any], T], value: Any) -> T:
    """A copy of a part of the state that comes from user code."""
    try:
        return make(value)
    except Exception as error:
        raise ResumeError(
            f"the state of a fastload.DataLoader holds something in {key!r} that cannot be copied: {error!r}"
        ) from error


def _plain_dataset_state(state: IterableState) -> dict[str, Any]:
    plain: dict[str, Any] = {"progress": state.progress}
    if state.data:
        plain["state"] = state.load()
    if state.iterator:
        plain["iterator"] = state.load_iterator()
    if state.progress == "begun" and not state.has_state:
        plain["num_batches"] = state.num_batches
    return plain
