"""The saved form of an `EpochCursor`: a dict of plain types, which is checked when it is loaded.

JSON and `torch.load(weights_only=True)` support all types in the dict, if they support the user's own parts
(states of samplers and datasets). Reading a state runs no code from it. Every value is checked before
anything is changed, because a state can come from a damaged file or an untrusted source.
"""

from __future__ import annotations

import base64
import dataclasses
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastload.batch.dataset_state import ENDED, NOT_BEGUN, DatasetState
from fastload.epochs.cursor import EpochCursor
from fastload.epochs.sampler_state import DEFAULT, ShardingFacts
from fastload.errors import ResumeError
from fastload.system.checks import TEXT, instance_of, integer, one_of, optional
from fastload.system.notes import short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VERSION = 6
_INT64 = 1 << 63
_CURE = "Load another checkpoint, or start without a state"
# The keys that differ from their fields; torchdata and Accelerate use the names of the first two.
_FIELDS = {"_num_yielded": "num_received", "_iterator_finished": "is_finished", "order": "sharding"}
# Fields that are saved as they are, under their names.
_PLAIN = ("epoch", "iterator_kind", "base_seed", "sample_seed", "why_unresumable", "next_worker", "rank")


def to_dict(cursor: EpochCursor) -> dict[str, Any]:
    """A dict for the user; it shares no mutable objects with the cursor."""
    states = cursor.dataset_states
    return {name: getattr(cursor, name) for name in _PLAIN} | {
        "version": VERSION,
        "_num_yielded": cursor.num_received,
        "_sampler_iter_yielded": cursor.num_received,  # Accelerate changes it together with the one above
        "_iterator_finished": cursor.is_finished,
        "checksum": list(cursor.checksum),
        "checks_some": cursor.checks_some,
        "generators": {place: base64.b64encode(s).decode() for place, s in cursor.generators.items()},
        "samplers": {place: pickle.loads(state) for place, state in cursor.samplers.items()},
        "dataset_states": None if states is None else [_plain_dataset_state(state) for state in states],
        "order": dataclasses.asdict(cursor.sharding),
    }


def from_dict(state: Any) -> EpochCursor:
    """The cursor of a dict of `to_dict`, also after a round trip through JSON.

    Raises:
        ResumeError: This is not such a dict, or a value in it is not valid, or two values contradict each
            other.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        what = "a dict without 'version'" if isinstance(state, Mapping) else short_repr(state)
        raise ResumeError(
            f"this is not a state of a fastload.DataLoader, but {what}: pass what "
            "loader.state_dict() returned"
        )
    values: dict[str, Any] = {}
    for key, read in _READ.items():
        try:
            values[_FIELDS.get(key, key)] = read(state[key])
        except Exception as error:
            raise ResumeError(
                "this is not a state of a fastload.DataLoader of this release, or it is damaged: "
                f"{key!r}: {error!r}. {_CURE}"
            ) from error
    del values["version"]
    cursor = EpochCursor(**values)
    for is_wrong, fact in _contradictions(cursor):
        if is_wrong:
            raise ResumeError(f"the state of a fastload.DataLoader contradicts itself: {fact}. {_CURE}")
    return cursor


def _contradictions(cursor: EpochCursor) -> Iterator[tuple[bool, str]]:
    """Combinations that no loader saves, and whether they occur here."""
    num_received, copies = cursor.num_received, cursor.dataset_states or []
    rank, num_ranks = cursor.rank, cursor.sharding.num_ranks
    is_finished, reason = cursor.is_finished, cursor.why_unresumable
    beginning = num_received, is_finished, cursor.checksum, cursor.base_seed, reason, copies
    has_begun = beginning != (0, False, (0, 0), 0, None, [])
    yield cursor.iterator_kind is None and has_begun, "an epoch has begun, but 'iterator_kind' is None"
    # Between two epochs, a state has none of torch's default generator, which belongs to the user.
    is_within, has_default = cursor.is_within_epoch, DEFAULT in cursor.generators
    where, places = "within" if is_within else "between", list(cursor.generators)
    yield is_within is not has_default, f"it is {where} epochs, but 'generators' {places}"
    counted = f"'_num_yielded' is {num_received}, but 'checksum' counts {cursor.checksum[0]}"
    yield num_received > cursor.checksum[0], counted
    is_beyond = rank is not None and num_ranks is not None and not 0 <= rank < num_ranks
    yield is_beyond, f"'rank' is {rank} of {num_ranks}"
    next_worker = cursor.next_worker
    yield next_worker >= max(1, len(copies)), f"'next_worker' is {next_worker} of {len(copies)}"
    # Batches come from the copies in turn, unless they come as they are ready.
    is_idle = reason is None and any(copy is NOT_BEGUN for copy in copies[:num_received])
    is_counted = bool(copies) and not any(copy.has_state or copy is ENDED for copy in copies)
    is_short = is_counted and sum(copy.num_batches for copy in copies) < num_received
    yield is_idle or is_short, f"'dataset_states' have read fewer batches than {num_received}"


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


def _plain_dataset_state(state: DatasetState) -> dict[str, Any]:
    plain: dict[str, Any] = {"progress": state.progress}
    if state.data:
        plain["state"] = state.load()
    if state.iterator:
        plain["iterator"] = state.load_iterator()
    if state.progress == "begun" and not state.has_state:
        plain["num_batches"] = state.num_batches
    return plain


def _sharding(value: Any) -> ShardingFacts:
    names = [field.name for field in dataclasses.fields(ShardingFacts)]
    return ShardingFacts(
        **{name: optional(instance_of(str if name == "sampler" else int))(value[name]) for name in names}
    )


# Reads the value of each key of a saved cursor, or raises an error.
_READ: dict[str, Callable[[Any], Any]] = {
    "version": one_of(VERSION),
    "epoch": _epoch,
    "_num_yielded": _count,
    "_iterator_finished": one_of(False, True),
    "iterator_kind": one_of(None, "local", "workers", "again"),
    "base_seed": _count,
    "sample_seed": integer(0, 2 * _INT64),
    "checksum": lambda value: (_count(value[0]), integer(0, 1 << 32)(value[1])),
    "checks_some": one_of(False, True),
    "generators": lambda value: {
        place: base64.b64decode(text, validate=True) for place, text in value.items()
    },
    "samplers": _samplers,
    "why_unresumable": optional(TEXT),
    "dataset_states": _dataset_states,
    "next_worker": _count,
    "rank": optional(instance_of(int)),
    "order": _sharding,
}
