"""Before a loader's first epoch: check that the samplers of all ranks split the same dataset in the same way.

If the dataset of one rank is shorter, its epoch ends earlier, and the other ranks wait in an all-reduce until
the launcher or a timeout ends them. The check turns this into an error within seconds. It is not a
collective, because some ranks might not iterate: each rank compares its facts with those of the first rank,
through the store of the process group. A false alarm would be worse than none. Rules:

1. Only torch's DistributedSampler is checked, its subclasses that keep its order, and NodePartitionSampler;
   only if they split the dataset among all ranks of the default process group.
2. The n-th loaders of two ranks are compared, among loaders with the same classes, `shuffle`, batch size and
   `drop_last`.
3. A difference is an error only if neither rank has made a loader with the other's facts. So ranks can make
   loaders in a different order, or make more of them.
4. Facts that can differ for a good reason are not compared: the batch size and the number of batches (faster
   ranks can get more samples), and the epoch (one rank might have read an epoch before).
5. If the store cannot be used, there is no check.
"""

from __future__ import annotations

import json
import os
import platform
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch.utils.data import DistributedSampler

from fastload.epochs.node_partition import NodePartitionSampler
from fastload.epochs.sampler_state import integer_or_none, length_or_none, nested_samplers
from fastload.errors import RanksDisagreeError
from fastload.system.logs import log
from fastload.system.ranks import is_worker, process_group, store_of, watch_forks

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_KEPT_ORDERS = (DistributedSampler.__iter__, NodePartitionSampler.__iter__)
_RUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")


class _Ledger:
    """The loaders that this process made.

    Attributes:
        keys: The key under which a loader will be compared, without the parts that name the run.
        counts: How many loaders were made with the same key before.
        made: The facts of all loaders.
        num_joined: How many processes of this rank have used the store, including this one; None: not asked
            yet.
    """

    def __init__(self) -> None:
        self.keys: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.counts: Counter[str] = Counter()
        self.made: list[dict[str, int]] = []
        self.num_joined: int | None = None

    def add(self, facts: dict[str, int]) -> None:
        """Note the facts of a loader."""
        if facts not in self.made:
            self.made.append(facts)


_ledger = _Ledger()


def note(loader: DataLoader[Any]) -> None:
    """Record a new loader, if its sampler splits the dataset among ranks."""
    watch_forks()
    sampler = _splitting_sampler(loader)
    if sampler is None:
        return
    names = [type(one).__qualname__ for one in (loader.dataset, *nested_samplers(loader))]
    key = repr((names, bool(getattr(sampler, "shuffle", None)), loader.batch_size, loader.drop_last))
    _ledger.keys[loader] = f"{key}/{_ledger.counts[key]}"
    _ledger.counts[key] += 1
    _ledger.add(_facts(sampler))


def check(loader: DataLoader[Any]) -> None:
    """Compare this rank's loader with that of the first rank to begin an epoch.

    Raises:
        RanksDisagreeError: They split the dataset in different ways.
    """
    key = _ledger.keys.get(loader)
    if key is None:
        return
    group, sampler = process_group(), _splitting_sampler(loader)
    if group is None or sampler is None or is_worker():
        return
    if _num_replicas(sampler) != group.get_world_size():
        return
    facts, rank = _facts(sampler), int(group.get_rank())
    _ledger.add(facts)
    ours = {"rank": f"rank {rank} (host {platform.node()})", "facts": facts, "made": _ledger.made}
    _compare(ours, _first(group, rank, key, ours))
    del _ledger.keys[loader]  # comes last: after an error, the next iter() raises it again


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
    """The facts about a sampler that must be the same on every rank, by their names in messages."""
    found: dict[str, Any] = {
        "length of the dataset": length_or_none(getattr(sampler, "dataset", None)),
        "seed of the sampler": getattr(sampler, "seed", None) if getattr(sampler, "shuffle", None) else None,
        "drop_last of the sampler": int(bool(getattr(sampler, "drop_last", False))),
    }
    if isinstance(sampler, NodePartitionSampler):
        found["num_nodes of the sampler"] = sampler.num_nodes
    return {name: number for name, value in found.items() if (number := integer_or_none(value)) is not None}


def _first(group: Any, rank: int, key: str, ours: dict[str, Any]) -> dict[str, Any]:
    """What the first rank published under this key: one round trip. Ours if the store cannot be used."""
    # torchrun can serve several starts of the workers from one store; their keys must differ.
    run = "/".join([str(group.get_world_size()), *(os.environ.get(name, "") for name in _RUN)])
    try:
        store = store_of(group)
        if _ledger.num_joined is None:
            # After a change of the nodes, torchrun can reuse names: a new process continues the count.
            _ledger.num_joined = int(store.add(f"fastload/joined/{run}/{rank}", 1))
        name = f"fastload/loader/{run}/{_ledger.num_joined}/{key}"
        found: dict[str, Any] = json.loads(store.compare_set(name, "", json.dumps(ours)))
    except Exception as error:  # noqa: BLE001  # other libraries' stores can raise anything
        log.debug("the loaders of the ranks are not compared, because the store cannot be used: %r", error)
        return ours
    return found


def _compare(ours: dict[str, Any], first: dict[str, Any]) -> None:
    mine, theirs = ours["facts"], first["facts"]
    different = [name for name in mine if name in theirs and mine[name] != theirs[name]]
    if not different or mine in first["made"] or theirs in ours["made"]:
        return  # the same, or the ranks made their loaders in a different order
    name = different[0]
    raise RanksDisagreeError(
        f"the {name} is {mine[name]} on {ours['rank']}, but {theirs[name]} on {first['rank']}. Samples would "
        "be repeated or missing, and training could hang at the end of the shortest epoch. Use the same "
        "dataset and the same sampler arguments on all ranks: look for files missing on a node, and for "
        "code that filters the dataset by rank before the sampler splits it"
    )
