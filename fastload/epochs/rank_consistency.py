"""Check, before the first epoch, that the samplers of all ranks split the same dataset in the same way.

If the dataset of one rank is shorter, its epoch ends earlier, and the other ranks wait in an all-reduce until
the launcher or a timeout ends them. The check turns this into an error within seconds. It is not a
collective, because some ranks might not iterate: each rank compares its facts with those of the first rank,
through the store of the process group. A false alarm would be worse than none: where anything is unclear,
nothing is compared.
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import DistributedSampler

from fastload.epochs.loader_state import state_of
from fastload.epochs.node_partition import NodePartitionSampler
from fastload.epochs.sampler_state import integer_or_none, length_or_none, nested_samplers
from fastload.errors import RanksDisagreeError
from fastload.system.logs import log
from fastload.system.ranks import is_worker, process_group, watch_forks
from fastload.system.torch_private import default_store

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_KEPT_ORDERS = (DistributedSampler.__iter__, NodePartitionSampler.__iter__)
_RUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")


@dataclass
class _RankRecord:
    """The loaders that this process has made, as other ranks compare them.

    Attributes:
        num_made: How many loaders were made with the same key, by key.
        facts: The facts of all loaders, each once.
        num_joined: How many processes of this rank have used the store, including this one; None: not asked
            yet.
    """

    num_made: Counter[str] = field(default_factory=Counter)
    facts: list[dict[str, int]] = field(default_factory=list)
    num_joined: int | None = None

    def add(self, facts: dict[str, int]) -> None:
        """Note the facts of a loader."""
        if facts not in self.facts:
            self.facts.append(facts)


_record = _RankRecord()


def note(loader: DataLoader[Any]) -> None:
    """Record a new loader, if its sampler splits the dataset among ranks."""
    watch_forks()
    sampler = _splitting_sampler(loader)
    if sampler is None:
        return
    # Compared are the n-th loaders of two ranks among those with the same classes, `shuffle`, batch size and
    # `drop_last`.
    names = [type(part).__qualname__ for part in (loader.dataset, *nested_samplers(loader))]
    key = repr((names, bool(getattr(sampler, "shuffle", None)), loader.batch_size, loader.drop_last))
    state_of(loader).rank_key = f"{key}/{_record.num_made[key]}"
    _record.num_made[key] += 1
    _record.add(_facts(sampler))


def check(loader: DataLoader[Any]) -> None:
    """Compare this rank's loader with that of the first rank to begin an epoch.

    Raises:
        RanksDisagreeError: They split the dataset in different ways.
    """
    state = state_of(loader)
    key = state.rank_key
    if key is None:
        return
    group, sampler = process_group(), _splitting_sampler(loader)
    if group is None or sampler is None or is_worker():
        return
    if _num_replicas(sampler) != group.get_world_size():
        return  # it splits the dataset among some of the ranks
    facts, rank = _facts(sampler), int(group.get_rank())
    _record.add(facts)
    own = {"rank": f"rank {rank} (host {platform.node()})", "facts": facts, "made": _record.facts}
    _compare(own, _first(group, rank, key, own))
    state.rank_key = None  # comes last: after an error, the next iter() raises it again


def _splitting_sampler(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    """The sampler that splits the loader's dataset among several ranks in a known way."""
    for sampler in nested_samplers(loader):
        if isinstance(sampler, DistributedSampler) and _num_replicas(sampler) > 1:
            return sampler if type(sampler).__iter__ in _KEPT_ORDERS else None
    return None


def _num_replicas(sampler: DistributedSampler[Any]) -> int:
    # A subclass can set its attributes later.
    return integer_or_none(getattr(sampler, "num_replicas", None)) or 1


def _facts(sampler: DistributedSampler[Any]) -> dict[str, int]:
    """The facts about a sampler that must be the same on every rank, by their names in messages.

    Not among them are facts that can differ for a good reason: the batch size and the number of batches
    (faster ranks can get more samples), and the epoch (one rank might have read an epoch before).
    """
    facts: dict[str, Any] = {
        "length of the dataset": length_or_none(getattr(sampler, "dataset", None)),
        "seed of the sampler": getattr(sampler, "seed", None) if getattr(sampler, "shuffle", None) else None,
        "drop_last of the sampler": int(bool(getattr(sampler, "drop_last", False))),
    }
    if isinstance(sampler, NodePartitionSampler):
        facts["num_nodes of the sampler"] = sampler.num_nodes
    return {name: number for name, value in facts.items() if (number := integer_or_none(value)) is not None}


def _first(group: Any, rank: int, key: str, own: dict[str, Any]) -> dict[str, Any]:
    """What the first rank published under this key: one round trip. Our own if the store cannot be used."""
    # torchrun can serve several starts of the workers from one store; their keys must differ.
    run = "/".join([str(group.get_world_size()), *(os.environ.get(name, "") for name in _RUN)])
    try:
        store = default_store()
        if _record.num_joined is None:
            # After a change of the nodes, torchrun can reuse names: a new process continues the count.
            _record.num_joined = int(store.add(f"fastload/joined/{run}/{rank}", 1))
        name = f"fastload/loader/{run}/{_record.num_joined}/{key}"
        first: dict[str, Any] = json.loads(store.compare_set(name, "", json.dumps(own)))
    except Exception as error:  # noqa: BLE001  # other libraries' stores can raise anything
        log.debug("the loaders of the ranks are not compared, because the store cannot be used: %r", error)
        return own
    return first


def _compare(own: dict[str, Any], first: dict[str, Any]) -> None:
    facts, others = own["facts"], first["facts"]
    different = [name for name in facts if name in others and facts[name] != others[name]]
    # Ranks can make loaders in different orders, and one of them more: then one has made a loader with the
    # facts of the other.
    if not different or facts in first["made"] or others in own["made"]:
        return
    name = different[0]
    raise RanksDisagreeError(
        f"the {name} is {facts[name]} on {own['rank']}, but {others[name]} on {first['rank']}. Samples would "
        "be repeated or missing, and training could hang at the end of the shortest epoch. Use the same "
        "dataset and the same sampler arguments on all ranks: look for files missing on a node, and for "
        "code that filters the dataset by rank before the sampler splits it"
    )
