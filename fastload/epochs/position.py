"""The position of a loader: it is advanced with each batch, saved as a dict of plain types, and loaded again.

The dict holds only types that JSON and `torch.load(weights_only=True)` support, if the user's own parts
(states of samplers and datasets) do too. Reading a state runs no code from it. Every value is checked before
anything is changed, because a state may come from a damaged file or from somebody else.
"""

from __future__ import annotations

import base64
import marshal
import pickle
import re
import zlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.batch.iterable_state import ENDED, NOT_BEGUN, IterableState
from fastload.epochs.order import UNKNOWN, Order
from fastload.epochs.sampler_state import DEFAULT
from fastload.errors import ResumeError, short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VERSION = 3
_INT64 = 1 << 63
_CURE = "Load another checkpoint, or start without a state"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass
class Position:
    """Where a loader is: the beginning of an epoch, and the batches that the caller has received since.

    Attributes:
        epoch: The number that set_epoch() gave, or else the previous number plus one.
        iterator_kind: The iterator that torch began the epoch with, which decides on the order of torch's
            draws: `"local"` (no workers), `"workers"`, or `"again"` (persistent workers); None: no epoch has
            begun.
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
        plain = vars(self) | {
            "version": VERSION,
            "_num_yielded": self.num_received,  # torchdata and Accelerate use the names of these three
            "_sampler_iter_yielded": self.num_received,
            "_iterator_finished": self.is_finished,
            "checksum": list(self.checksum),
            "generators": {place: base64.b64encode(s).decode() for place, s in self.generators.items()},
            "samplers": {place: pickle.loads(state) for place, state in self.samplers.items()},
            "dataset_states": None if states is None else [_plain_dataset_state(state) for state in states],
            "order": asdict(self.order),
        }
        del plain["num_received"], plain["is_finished"]
        return plain

    @classmethod
    def parse(cls, state: Any) -> Position:
        """Read a dict of `to_plain`, also after a round trip through JSON.

        Raises:
            ResumeError: This is not such a dict, or a value in it is not valid, or two values contradict each
                other.
        """
        for key, (expected, is_right) in _SCHEMA.items():
            if not isinstance(state, dict) or key not in state:
                raise ResumeError(f"this is not a state of a fastload.DataLoader: it lacks {key!r}")
            if not is_right(state[key]):
                raise ResumeError(
                    f"the state of a fastload.DataLoader is damaged, or of another release: {key!r} should "
                    f"be {expected}, but got {short_repr(state[key])}. {_CURE}"
                )
        values = {key: state[key] for key in _SCHEMA if not key.startswith("_") and key != "version"}
        states = state["dataset_states"]
        try:
            values["samplers"] = {place: pickle.dumps(part) for place, part in state["samplers"].items()}
            values["dataset_states"] = None if states is None else [_dataset_state(part) for part in states]
        except Exception as error:
            raise ResumeError(
                f"the state of a fastload.DataLoader holds something that cannot be copied: {error!r}"
            ) from error
        values["generators"] = {place: base64.b64decode(text) for place, text in state["generators"].items()}
        values |= {"checksum": tuple(state["checksum"]), "order": Order(**state["order"])}
        found = cls(num_received=state["_num_yielded"], is_finished=state["_iterator_finished"], **values)
        for is_wrong, fact in found._contradictions():
            if is_wrong:
                raise ResumeError(f"the state of a fastload.DataLoader contradicts itself: {fact}. {_CURE}")
        return found

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """What no loader saves together, and whether it is so here."""
        num_received, num_ranks, copies = self.num_received, self.order.num_ranks, self.dataset_states or []
        beginning = num_received, self.is_finished, self.checksum, self.base_seed, self.obstacle, copies
        has_begun = beginning != (0, False, (0, 0), 0, None, [])
        yield self.iterator_kind is None and has_begun, "an epoch has begun, but 'iterator_kind' is None"
        # Between two epochs, a state has none of torch's default generator, which belongs to the user.
        is_within, has_default = self.is_within_epoch, DEFAULT in self.generators
        where = "within" if is_within else "between"
        yield (
            is_within is not has_default,
            f"it is {where} epochs, but 'generators' {sorted(self.generators)}",
        )
        counted = f"'_num_yielded' is {num_received}, but 'checksum' counts {self.checksum[0]}"
        yield num_received > self.checksum[0], counted
        is_beyond = None not in (self.rank, num_ranks) and self.rank >= num_ranks  # type: ignore[operator]
        yield is_beyond, f"'rank' is {self.rank} of {num_ranks}"
        yield self.next_worker >= max(1, len(copies)), f"'next_worker' is {self.next_worker} of {len(copies)}"
        # Batches come from the copies in turn.
        is_idle = any(copy is NOT_BEGUN for copy in copies[:num_received])
        is_counted = bool(copies) and not any(copy.has_state or copy is ENDED for copy in copies)
        is_short = is_counted and sum(copy.num_batches for copy in copies) < num_received
        yield is_idle or is_short, f"'dataset_states' have read fewer batches than {num_received}"

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
        is_other = None not in (self.rank, rank) and self.rank != rank
        is_split = order.num_ranks is not None
        skips = self.is_within_epoch and self.num_received > 0
        compared = {
            "batch_size": skips and needs_batch_size,
            "num_ranks": skips,
            "num_samples": skips and is_other,
            "sampler": skips and is_other,
            "seed": is_other and (skips if is_split else self.order.num_ranks is None),
        }
        for name, is_compared in compared.items():
            theirs, ours = getattr(self.order, name), getattr(order, name)
            if is_compared and None not in (theirs, ours) and theirs != ours:
                raise ResumeError(
                    f"the state was saved by a loader with {_FACTS[name]} {theirs}, after "
                    f"{self.num_received} batches, but this loader has {ours}: give it {theirs}, or load a "
                    "state that was saved between two epochs, or one for each rank"
                )
        return is_other


_FACTS = {
    "batch_size": "batch_size",
    "num_ranks": "number of ranks",
    "num_samples": "length of the dataset",
    "sampler": "kind of sampler",
    "seed": "seed of the sampler",
}


def _integer(start: int, stop: int) -> tuple[str, Callable[[Any], bool]]:
    return f"an int from {start} to {stop - 1}", lambda value: type(value) is int and start <= value < stop


def _is_none_or(kind: type, value: Any) -> bool:
    return value is None or type(value) is kind


def _is_checksum(value: Any) -> bool:
    is_pair = isinstance(value, (list, tuple)) and [type(part) for part in value] == [int, int]
    return is_pair and 0 <= value[0] < _INT64 and 0 <= value[1] < 1 << 32


def _is_base64(text: Any) -> bool:
    try:
        return type(text) is str and bool(base64.b64decode(text, validate=True))
    except ValueError:
        return False


def _is_dict(value: Any, is_right: Callable[[str, Any], bool]) -> bool:
    return isinstance(value, dict) and all(
        type(name) is str and is_right(name, part) for name, part in value.items()
    )


def _is_fact(name: str, value: Any) -> bool:
    return name in _FACTS and _is_none_or(str if name == "sampler" else int, value)


def _is_dataset_state(value: Any) -> bool:
    progress = value.get("progress") if isinstance(value, dict) else None
    if type(progress) is not str or progress != "begun":
        return type(progress) is str and progress in (NOT_BEGUN.progress, ENDED.progress)
    num_batches = value.get("num_batches", 0)
    is_known = not value.keys().isdisjoint(("state", "iterator", "num_batches"))
    return is_known and type(num_batches) is int and 0 <= num_batches < _INT64


# For each key of a saved position: what its value should be, and a function that checks it.
_SCHEMA: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "version": (f"the int {VERSION}", lambda value: type(value) is int and value == VERSION),
    "epoch": _integer(-_INT64, _INT64),
    "_num_yielded": _integer(0, _INT64),
    "_iterator_finished": ("a bool", lambda value: type(value) is bool),
    "iterator_kind": (
        '"local", "workers", "again" or None',
        lambda value: _is_none_or(str, value) and value in (None, "local", "workers", "again"),
    ),
    "base_seed": _integer(0, _INT64),
    "sample_seed": _integer(0, 2 * _INT64),
    "checksum": ("a list of two ints", _is_checksum),
    "generators": (
        "a dict of base64 text by place",
        lambda value: _is_dict(value, lambda _, text: _is_base64(text)),
    ),
    "samplers": (
        "a dict by place, with an int for each epoch",
        lambda value: _is_dict(value, lambda place, part: not place.endswith(".epoch") or type(part) is int),
    ),
    "obstacle": ("None or a str", lambda value: _is_none_or(str, value)),
    "dataset_states": (
        "None, or a list with a dict for each worker",
        lambda value: (
            value is None
            or (isinstance(value, (list, tuple)) and bool(value) and all(map(_is_dataset_state, value)))
        ),
    ),
    "next_worker": _integer(0, _INT64),
    "rank": ("None or an int of at least 0", lambda value: _is_none_or(int, value) and (value or 0) >= 0),
    "order": (
        f"a dict with the keys {', '.join(_FACTS)}",
        lambda value: _is_dict(value, _is_fact) and len(value) == len(_FACTS),
    ),
}


def _dataset_state(value: dict[str, Any]) -> IterableState:
    for mark in (NOT_BEGUN, ENDED):
        if value["progress"] == mark.progress:
            return mark
    data, iterator = (pickle.dumps(value[name]) if name in value else b"" for name in ("state", "iterator"))
    return IterableState("begun", data, iterator=iterator, num_batches=value.get("num_batches", 0))


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
        return zlib.crc32(np.asarray(index, np.int64).tobytes(), checksum)
    except (TypeError, ValueError, OverflowError):  # keys of another kind
        text = _ADDRESS.sub("", repr(index))  # memory addresses differ between processes
        return zlib.crc32(text.encode("utf-8", "surrogatepass"), checksum)
