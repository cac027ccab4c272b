"""The position of a loader: it is advanced with each batch, saved as a dict of plain types, and loaded again.

The dict holds only types that JSON and `torch.load(weights_only=True)` support, if the user's own parts
(states of samplers and datasets) do too. Reading a state runs no code from it. Every value is checked before
anything is changed, because a state can come from a damaged file or an untrusted source.
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

from fastload.batch.dataset_state import ENDED, NOT_BEGUN, DatasetState
from fastload.epochs.sampler_state import DEFAULT, Order
from fastload.errors import ResumeError
from fastload.system.checks import TEXT, instance_of, integer, one_of, optional
from fastload.system.notes import short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VERSION = 3
_INT64 = 1 << 63
_CURE = "Load a different checkpoint, or start without a state"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass
class Position:
    """Where a loader is: the beginning of an epoch, and the batches that the caller has received since.

    Attributes:
        epoch: The number that set_epoch() gave, or else the previous number plus one.
        iterator_kind: The iterator that torch began the epoch with, which determines the order of torch's
            draws: `"local"` (no workers), `"workers"`, or `"again"` (persistent workers); None: no epoch has
            begun.
        generators: States of the generators before anything was drawn, by place (see `order`).
        samplers: States of the samplers, as `Sources.sampler_states` returns them, pickled by this
            process.
        base_seed: The seed from which torch seeds its workers.
        sample_seed: The seed from which `seeding="sample"` seeds each sample.
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
    dataset_states: list[DatasetState] | None = None
    next_worker: int = 0
    rank: int | None = None
    order: Order = Order()  # noqa: RUF009

    def advance(self, index: Any, worker: int = 0, dataset_state: DatasetState | None = None) -> None:
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
        values: dict[str, Any] = {}
        for key, read in _READ.items():
            try:
                values[key] = read(state[key])
            except Exception as error:
                raise ResumeError(
                    "this is not a state of a fastload.DataLoader of this release, or it is damaged: "
                    f"{key!r}: {error!r}. {_CURE}"
                ) from error
        del values["version"]
        num_received, is_finished = values.pop("_num_yielded"), values.pop("_iterator_finished")
        found = cls(num_received=num_received, is_finished=is_finished, **values)
        for is_wrong, fact in found._contradictions():
            if is_wrong:
                raise ResumeError(f"the state of a fastload.DataLoader contradicts itself: {fact}. {_CURE}")
        return found

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """Combinations that no loader saves, and whether they occur here."""
        num_received, num_ranks, copies = self.num_received, self.order.num_ranks, self.dataset_states or []
        beginning = num_received, self.is_finished, self.checksum, self.base_seed, self.obstacle, copies
        has_begun = beginning != (0, False, (0, 0), 0, None, [])
        yield self.iterator_kind is None and has_begun, "an epoch has begun, but 'iterator_kind' is None"
        # Between two epochs, a state has none of torch's default generator, which belongs to the user.
        is_within, has_default = self.is_within_epoch, DEFAULT in self.generators
        where = "within" if is_within else "between"
        yield (
            is_within is not has_default,
            f"it is {where} epochs, but 'generators' {list(self.generators)}",
        )
        counted = f"'_num_yielded' is {num_received}, but 'checksum' counts {self.checksum[0]}"
        yield num_received > self.checksum[0], counted
        is_beyond = self.rank is not None and num_ranks is not None and not 0 <= self.rank < num_ranks
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
            Whether a different rank saved the state.

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


_count = integer(0, _INT64)
_epoch = integer(-_INT64, _INT64)


def _samplers(value: Any) -> dict[str, bytes]:
    return {
        place: pickle.dumps(_epoch(part) if place.endswith(".epoch") else part)
        for place, part in value.items()
    }


def _dataset_states(value: Any) -> list[DatasetState] | None:
    if value is None:
        return None
    if not value:
        raise ValueError("it should have a dict for each worker")
    return [_dataset_state(part) for part in value]


def _dataset_state(value: Any) -> DatasetState:
    for mark in (NOT_BEGUN, ENDED):
        if value["progress"] == mark.progress:
            return mark
    if value["progress"] != "begun" or value.keys().isdisjoint(("state", "iterator", "num_batches")):
        raise ValueError(f"{short_repr(value)} should say how far the dataset was read")
    data, iterator = (pickle.dumps(value[name]) if name in value else b"" for name in ("state", "iterator"))
    return DatasetState("begun", data, iterator=iterator, num_batches=_count(value.get("num_batches", 0)))


def _order(value: Any) -> Order:
    kinds = {name: str if name == "sampler" else int for name in _FACTS}
    return Order(**{name: optional(instance_of(kind))(value[name]) for name, kind in kinds.items()})


# Reads the value of each key of a saved position, or raises an error.
_READ: dict[str, Callable[[Any], Any]] = {
    "version": one_of(VERSION),
    "epoch": _epoch,
    "_num_yielded": _count,
    "_iterator_finished": one_of(False, True),
    "iterator_kind": one_of(None, "local", "workers", "again"),
    "base_seed": _count,
    "sample_seed": integer(0, 2 * _INT64),
    "checksum": lambda value: (_count(value[0]), integer(0, 1 << 32)(value[1])),
    "generators": lambda value: {
        place: base64.b64decode(text, validate=True) for place, text in value.items()
    },
    "samplers": _samplers,
    "obstacle": optional(TEXT),
    "dataset_states": _dataset_states,
    "next_worker": _count,
    "rank": optional(instance_of(int)),
    "order": _order,
}


def _plain_dataset_state(state: DatasetState) -> dict[str, Any]:
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
    except (TypeError, ValueError, OverflowError):  # keys of a different kind
        pass
    try:
        text = _ADDRESS.sub("", repr(index))  # memory addresses differ between processes
    except Exception:  # noqa: BLE001  # the index can be of a user's class
        text = type(index).__name__
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), checksum)
