"""Before a loader's first epoch: check that the samplers of all ranks split one dataset in one way.

If the dataset of one rank is shorter, its epoch ends earlier, and the other ranks wait in an all-reduce until
the launcher or a timeout ends them. The check turns this into an error within seconds. It is no collective,
because some ranks may not iterate: each rank compares its facts with those of the rank that came first,
through the store of the process group. A wrong alarm would be worse than none. Rules:

1. Only torch's DistributedSampler is checked, its subclasses that keep its order, NodePartitionSampler, and
   Lightning's samplers; only if they split the dataset among all ranks of the default process group.
2. The n-th loader of one rank is compared with the n-th of the other one, among loaders with the same
   classes, `shuffle`, batch size and `drop_last`.
3. Their difference is an error only if neither rank has made a loader with the facts of the other one. Ranks
   may therefore make loaders in another order, or make more of them.
4. Facts that may differ for a good reason are not compared: the batch size and the number of batches (faster
   ranks may get more samples), and the epoch (one rank may have read an epoch before).
5. If the store cannot be used, there is no check.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch.utils.data import DistributedSampler

from fastload.epochs.node_partition import NodePartitionSampler
from fastload.epochs.order import integer_or_none, length_or_none, nested_samplers
from fastload.errors import RanksDisagreeError
from fastload.system.logs import log
from fastload.system.process_group import is_worker, process_group, store_of, watch_forks

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_KEPT_ORDERS = (DistributedSampler.__iter__, NodePartitionSampler.__iter__)
_MAX_MADE = 500  # facts of other loaders that a rank publishes; a rank with more of them raises no alarm

_LENGTH = "length of the dataset"
_SEED = "seed of the sampler"
_ADVICE = {
    _LENGTH: (
        "The ranks may get different numbers of batches, and training would then hang at the end of the "
        "shortest epoch. Give every rank the same dataset: look for files that are missing on a node, and "
        "for code that splits or filters the dataset by rank before the sampler does"
    ),
    _SEED: (
        "Some samples would come twice in an epoch and others never. Give the samplers of all ranks the same "
        "seed"
    ),
}
_OTHER_ADVICE = "The ranks would not split the dataset into equal parts. Give all ranks the same value"


class _Ledger:
    """The loaders that this process made.

    Attributes:
        keys: The key under which a loader will be compared, without the parts that name the run.
        counts: How many loaders were made with the same key before.
        made: Digests of the facts of all loaders.
        num_joined: How many processes of this rank have used the store, with this one; None: not asked yet.
    """

    def __init__(self) -> None:
        self.keys: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.counts: Counter[str] = Counter()
        self.made: dict[str, None] = {}
        self.num_joined: int | None = None


_ledger = _Ledger()


def note(loader: DataLoader[Any]) -> None:
    """Record a loader that was just made, if its sampler splits the dataset among ranks."""
    watch_forks()
    sampler = _splitting_sampler(loader)
    if sampler is None:
        return
    key = _digest(
        [
            type(loader.dataset).__qualname__,
            [type(one).__qualname__ for one in nested_samplers(loader)],
            bool(getattr(sampler, "shuffle", None)),
            repr(loader.batch_size),
            loader.drop_last,
        ]
    )
    _ledger.keys[loader] = f"{key}/{_ledger.counts[key]}"
    _ledger.counts[key] += 1
    _ledger.made[_digest(_facts(sampler))] = None


def check(loader: DataLoader[Any]) -> None:
    """Compare this rank's loader with that of the rank that began its first epoch first.

    Raises:
        RanksDisagreeError: Both split the dataset in different ways.
    """
    key = _ledger.keys.get(loader)
    if key is None:
        return
    group, sampler = process_group(), _splitting_sampler(loader)
    if group is None or sampler is None or is_worker():
        return
    if _num_replicas(sampler) != group.get_world_size():
        return
    facts = _facts(sampler)
    _ledger.made[_digest(facts)] = None
    rank = int(group.get_rank())
    ours = {
        "rank": rank,
        "host": platform.node(),
        "facts": facts,
        "made": list(_ledger.made) if len(_ledger.made) <= _MAX_MADE else None,
    }
    first = _first(group, rank, key, ours)
    if first is not None:
        _compare(ours, first)
    del _ledger.keys[loader]  # comes last: after an error, the next iter() raises it again


def _splitting_sampler(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    """The sampler that splits the loader's dataset among several ranks in a known way."""
    for sampler in nested_samplers(loader):
        if isinstance(sampler, DistributedSampler) and _num_replicas(sampler) > 1:
            return sampler if _keeps_order(sampler) or _is_lightning_s(sampler) else None
    return None


def _num_replicas(sampler: DistributedSampler[Any]) -> int:
    return (
        integer_or_none(getattr(sampler, "num_replicas", None)) or 1
    )  # a subclass may set its attributes later


def _keeps_order(sampler: DistributedSampler[Any]) -> bool:
    return type(sampler).__iter__ in _KEPT_ORDERS


def _is_lightning_s(sampler: DistributedSampler[Any]) -> bool:
    return type(sampler).__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def _facts(sampler: DistributedSampler[Any]) -> dict[str, int]:
    """The facts about a sampler that must be the same on every rank, by their names in messages."""
    found: dict[str, Any] = {_LENGTH: length_or_none(getattr(sampler, "dataset", None))}
    if _keeps_order(sampler):
        found[_SEED] = getattr(sampler, "seed", None) if getattr(sampler, "shuffle", None) else None
        found["drop_last of the sampler"] = int(bool(getattr(sampler, "drop_last", False)))
    if isinstance(sampler, NodePartitionSampler):
        found["num_nodes of the sampler"] = sampler.num_nodes
        found["epochs_per_deal of the sampler"] = sampler.epochs_per_deal
    return {name: number for name, value in found.items() if (number := integer_or_none(value)) is not None}


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=12).hexdigest()


# --- the store -------------------------------------------------------------------------------------------


def _first(group: Any, rank: int, key: str, ours: dict[str, Any]) -> dict[str, Any] | None:
    """What the first rank published under this key: one round trip. None if the store cannot be used."""
    # torchrun may serve several starts of the workers from one store; their keys must differ.
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    run = _digest([group.get_world_size(), *(os.environ.get(name) for name in names)])
    try:
        store = store_of(group)
        if _ledger.num_joined is None:
            # After a change of the nodes, torchrun may give the same names: a new process counts on.
            _ledger.num_joined = int(store.add(f"fastload/joined/{run}/{rank}", 1))
        name = f"fastload/loader/{run}/{_ledger.num_joined}/{key}"
        found = json.loads(store.compare_set(name, "", json.dumps(ours)))
    except Exception as error:  # noqa: BLE001  # other libraries' stores may raise anything; training goes on
        log.debug("the loaders of the ranks are not compared, because the store cannot be used: %r", error)
        return None
    return found if isinstance(found, dict) else None


def _compare(ours: dict[str, Any], first: dict[str, Any]) -> None:
    mine, theirs = ours["facts"], first["facts"]
    different = [name for name in mine if name in theirs and mine[name] != theirs[name]]
    if not different or ours["made"] is None or first["made"] is None:
        return
    if _digest(mine) in first["made"] or _digest(theirs) in ours["made"]:
        return  # the ranks made their loaders in another order
    name = different[0]
    raise RanksDisagreeError(
        f"the {name} is {mine[name]} on rank {ours['rank']} (host {ours['host']}), but {theirs[name]} on "
        f"rank {first['rank']} (host {first['host']}). {_ADVICE.get(name, _OTHER_ADVICE)}"
    )
