"""The position of a loader: it is advanced with each batch, saved as a dict of plain types, and loaded again.

The dict holds only types that JSON and `torch.load(weights_only=True)` support, if the user's own parts
(states of samplers and datasets) do too. Reading a state runs no code from it. Every value is checked before
anything is changed, because a state may come from a damaged file or from somebody else.
"""

from __future__ import annotations

import base64
import binascii
import marshal
import pickle
import re
import zlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fastload.batch.iterable_state import ENDED, NOT_BEGUN, IterableState
from fastload.epochs.order import UNKNOWN, Order
from fastload.epochs.sampler_state import DEFAULT
from fastload.errors import ResumeError

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = 3

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
    "rank",
    "order",
}
_ITERATOR_KINDS = (None, "local", "workers", "again")
_INT64 = 1 << 63
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass
class Position:
    """Where a loader is: the beginning of an epoch, and the batches that the caller has received since.

    Attributes:
        epoch: The number that set_epoch() gave, or else the previous number plus one.
        iterator_kind: The iterator that torch began the epoch with, which decides on the order of torch's
            draws: `"local"` (no workers), `"workers"`, or `"again"` (persistent workers); None: no epoch has
            begun. Saved as "beginning".
        generators: States of the generators before anything was drawn, by place (see `sampler_state`).
        samplers: States of the samplers, as `sampler_state.samplers_of` returns them, pickled by this
            process.
        base_seed: The seed from which torch seeds its workers.
        sample_seed: The seed from which `rng="sample"` seeds each sample.
        num_received: How many batches of the epoch the caller has received.
        checksum: How many lists of indices the checksum covers, and the checksum.
        is_finished: Whether the caller has seen the end of the epoch.
        obstacle: Why the epoch cannot be resumed in the middle; None if it can.
        dataset_states: For an iterable dataset, and for a map-style dataset with a `state_dict()`: the state
            of each worker's copy after its last batch that the caller received.
        next_worker: The worker whose batch is due next.
        rank: The rank that saved the state; None if unknown.
        order: The facts about the order that are the same on every rank.
    """

    epoch: int
    iterator_kind: str | None = None
    generators: dict[str, bytes] = field(default_factory=dict)
    samplers: dict[str, bytes] = field(default_factory=dict)
    base_seed: int = 0
    sample_seed: int = 0
    num_received: int = 0
    checksum: tuple[int, int] = (0, 0)
    is_finished: bool = False
    obstacle: str | None = None
    dataset_states: list[IterableState] | None = None
    next_worker: int = 0
    rank: int | None = None
    order: Order = UNKNOWN

    def advance(self, index: Any, worker: int = 0, dataset_state: IterableState | None = None) -> None:
        """Count a batch that the caller receives.

        Args:
            index: Its index, or list of indices, from the sampler.
            worker: The worker that made it.
            dataset_state: The state of the worker's copy of the dataset after it; None keeps the one before.
        """
        self.num_received += 1
        self.checksum = self.num_received, _checksum_with(index, self.checksum[1])
        if self.dataset_states is not None and dataset_state is not None:
            self.dataset_states[worker] = dataset_state
            self.next_worker = (worker + 1) % len(self.dataset_states)

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
            "_num_yielded": self.num_received,  # torchdata and Accelerate use the names of these three
            "_sampler_iter_yielded": self.num_received,
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
            "order": asdict(self.order),
        }

    @classmethod
    def parse(cls, state: Any) -> Position:
        """Read a dict of `to_plain`, also after a round trip through JSON.

        Raises:
            ResumeError: This is not such a dict, or a value in it is not valid, or two values contradict each
                other.
        """
        version = state.get("version") if isinstance(state, dict) else None
        if type(version) is int and version != VERSION:
            raise ResumeError(
                f"the state has version {_shown(version)}, but this release reads version {VERSION}: load it "
                "with the release of fastload that saved it, or start without a state"
            )
        missing = sorted(_KEYS - set(state)) if isinstance(state, dict) else sorted(_KEYS)
        if missing:
            raise ResumeError(f"this is not a state of a fastload.DataLoader: it lacks {', '.join(missing)}")
        if type(state["version"]) is not int:
            raise _wrong("version", f"the int {VERSION}", state["version"])
        found = cls(
            epoch=_integer("epoch", state["epoch"], -_INT64, _INT64),
            num_received=_integer("_num_yielded", state["_num_yielded"], 0, _INT64),
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
            rank=_optional_integer("rank", state["rank"], 0, _INT64),
            order=_order(state["order"]),
        )
        found._check_consistency()
        return found

    def _check_consistency(self) -> None:
        """Raise a ResumeError if two values cannot have been saved together."""
        if self.iterator_kind is None:
            for key, is_set, value in (
                ("_num_yielded", self.num_received > 0, self.num_received),
                ("_iterator_finished", self.is_finished, True),
                ("index_checksum", self.checksum != (0, 0), self.checksum),
                ("base_seed", self.base_seed != 0, self.base_seed),
                ("obstacle", self.obstacle is not None, self.obstacle),
                ("dataset_states", self.dataset_states is not None, self.dataset_states),
            ):
                if is_set:
                    raise _contradiction("'beginning' says that no epoch has begun", key, value)
        if self.is_within_epoch and DEFAULT not in self.generators:
            where = "the epoch has begun and not ended, which needs the state of torch's default generator"
            raise _contradiction(where, "generators", sorted(self.generators))
        if not self.is_within_epoch and DEFAULT in self.generators:
            where = "the state stands between two epochs, which has no state of torch's default generator"
            raise _contradiction(where, "generators", sorted(self.generators))
        if self.num_received > self.checksum[0]:
            where = f"the indices of {self.checksum[0]} batches were counted"
            raise _contradiction(where, "_num_yielded", self.num_received)
        if self.rank is not None and self.order.num_ranks is not None and self.rank >= self.order.num_ranks:
            raise _contradiction(f"the order is that of {self.order.num_ranks} ranks", "rank", self.rank)
        self._check_copies()

    def _check_copies(self) -> None:
        copies = self.dataset_states or []
        num_copies = len(copies) or 1
        if self.next_worker >= num_copies:
            where = f"'dataset_states' has {num_copies} workers"
            raise _contradiction(where, "next_worker", self.next_worker)
        where = f"{self.num_received} batches were delivered"
        for number, copy in enumerate(copies[: self.num_received]):  # batches are dealt round robin
            if copy is NOT_BEGUN:
                raise _contradiction(where, f"dataset_states[{number}]", "not begun")
        is_counted = not any(copy.has_state or copy is ENDED for copy in copies)
        num_read = sum(copy.num_batches for copy in copies)
        if copies and is_counted and num_read < self.num_received:
            raise _contradiction(where, "dataset_states", f"{num_read} batches read")

    def is_of_other_rank(self, rank: int | None, order: Order, *, needs_batch_size: bool) -> bool:
        """Check that this state is valid for a loader of this rank and order, and compare the ranks.

        Args:
            rank: The loader's, as `rank_and_order` finds it.
            order: The loader's.
            needs_batch_size: Whether batches can only be skipped with the same batch size.

        Returns:
            Whether another rank saved the state.

        Raises:
            ResumeError: The state is valid neither for this loader nor for this rank.
        """
        theirs = self.order
        num_received = self.num_received if self.is_within_epoch else 0
        is_other = self.rank is not None and rank is not None and self.rank != rank
        if num_received:
            if needs_batch_size:
                self._compare("batch_size", theirs.batch_size, order.batch_size)
            self._compare("number of ranks", theirs.num_ranks, order.num_ranks)
        if not is_other:
            return False
        if num_received:
            self._compare("length of the dataset", theirs.num_samples, order.num_samples)
            self._compare("kind of sampler", theirs.sampler, order.sampler)
        if theirs.num_ranks is None and order.num_ranks is None and _differ(theirs.seed, order.seed):
            raise ResumeError(
                f"rank {self.rank} saved the state, and its sampler draws from a generator with the seed "
                f"{theirs.seed}, but that of rank {rank} has the seed {order.seed}: seed the generators of "
                "all ranks alike, use a DistributedSampler, or save and load a state for each rank"
            )
        if num_received and order.num_ranks is not None:
            self._compare("seed of the sampler", theirs.seed, order.seed)
        return True

    def _compare(self, name: str, theirs: Any, ours: Any) -> None:
        if _differ(theirs, ours):
            raise ResumeError(
                f"this epoch cannot be resumed after {self.num_received} batches: the state was saved with "
                f"{name} {theirs}, but this loader has {name} {ours}: give it {theirs}, or load a state that "
                "was saved between two epochs"
            )


def _differ(theirs: Any, ours: Any) -> bool:
    return theirs is not None and ours is not None and theirs != ours


def _contradiction(where: str, key: str, value: Any) -> ResumeError:
    return ResumeError(
        f"the state of a fastload.DataLoader contradicts itself: {where}, but {key!r} is {_shown(value)}. "
        "Load another checkpoint, or start without a state"
    )


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


def _order(value: Any) -> Order:
    names = set(Order.__annotations__)
    if not isinstance(value, dict) or set(value) != names:
        raise _wrong("order", f"a dict with the keys {sorted(names)}", value)
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


def _checksum_with(index: Any, checksum: int) -> int:
    """The checksum after one more index or list of indices; the same in every process."""
    try:
        # Version 2 writes the same bytes for equal values, however many references they have.
        return zlib.crc32(marshal.dumps(index, 2), checksum)
    except ValueError:  # the index contains types that are not built-in
        pass
    try:
        numbers = np.asarray(index, np.int64)
    except (TypeError, ValueError, OverflowError):  # keys of another kind
        return zlib.crc32(_text(index).encode("utf-8", "surrogatepass"), checksum)
    return zlib.crc32(numbers.tobytes(), checksum)


def _text(index: Any) -> str:
    """The repr of a key without memory addresses, which differ between processes."""
    try:
        return _ADDRESS.sub("", repr(index))
    except Exception:  # noqa: BLE001  # the index may be of a class of the user's
        return type(index).__name__
