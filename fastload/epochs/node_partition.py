"""NodePartitionSampler: each node trains on its own part of the dataset.

Every rank computes its indices from its arguments and the epoch alone; the ranks do not communicate. Rules:

1. A permutation of all indices depends on the seed; node k gets every num_nodes-th index of it, starting with
   the k-th, for the whole run.
2. In each epoch, each node shuffles its part. The order depends on (seed, epoch, node). The node's ranks take
   indices in turn.
3. Every rank gets as many indices as from torch's DistributedSampler. To this end, a node repeats indices of
   its own part, or drops the last indices of its shuffled part.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from fastload.system.cached_property import cached_property
from fastload.system.checks import as_int
from fastload.system.ranks import ranks_of_host

if TYPE_CHECKING:
    from collections.abc import Iterator


class NodePartitionSampler(DistributedSampler[int]):
    """A `DistributedSampler` with which each node caches only its own part of the dataset.

    The dataset is partitioned into one part per node, of equal size (plus or minus one sample). The ranks of
    a node read only its part, throughout the run, in a new order in each epoch. The parts depend on the seed,
    without communication. Over all ranks, each epoch has every sample at least once, and no sample twice
    except for the padding that makes all ranks equally long. With `drop_last`, up to ``num_replicas - 1``
    samples are left out instead, different ones in each epoch.

    A cache keeps the samples that it has stored: to give a node another part, make a new `CachedDataset`,
    and a sampler with another seed.

    As with torch's sampler, call `loader.set_epoch(epoch)` before each epoch, with the same number on every
    rank.

    Args:
        dataset: As for torch's sampler; its length is read once.
        num_replicas: The number of ranks; default: of the process group.
        rank: This rank; default: of the process group. The ranks of a node are consecutive:
            ``rank = node * ranks_per_node + local_rank``.
        shuffle: False: a fixed order: node k has the indices k, k + num_nodes, .... All ranks together then
            read the dataset from its beginning to its end, and `drop_last` always drops its last samples.
        seed: The same on every rank.
        drop_last: Drop samples, instead of repeating some, to make all ranks equally long.
        num_nodes: The number of nodes; default: the number of ranks divided by LOCAL_WORLD_SIZE, which
            torchrun sets (or the variables of mpirun).

    Attributes:
        epoch: The epoch of the last `set_epoch`; 0 at first.
        num_samples: How many indices each rank gets in an epoch; also the length of the sampler.
        num_nodes, ranks_per_node, node, local_rank: The place of this rank.

    Raises:
        RuntimeError: `num_nodes` is missing, and the environment does not have it.
        TypeError: A number is not an integer.
        ValueError: The nodes have different numbers of ranks, there are fewer samples than nodes, an argument
            is out of range, or there is no process group, which a missing number would come from.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        num_nodes: int | None = None,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, as_int("seed", seed), drop_last)
        self.num_nodes = _num_nodes(num_nodes, self.num_replicas)
        self.ranks_per_node = self.num_replicas // self.num_nodes
        self.node, self.local_rank = divmod(self.rank, self.ranks_per_node)
        self._length = len(dataset)
        if self.num_samples and self._length < self.num_nodes:
            raise ValueError(
                f"the dataset has {self._length} samples, fewer than the {self.num_nodes} nodes, so some "
                "nodes would have none: use torch's DistributedSampler, or drop_last=True"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "part"}

    @cached_property
    def part(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The indices of this node's part: `(N,)` int64, read-only, unordered."""
        if self.shuffle:
            everything = _permutation(self._length, "part", self.seed)
        else:
            everything = np.arange(self._length, dtype=np.int64)
        part = everything[self.node :: self.num_nodes].copy()
        part.flags.writeable = False
        return part

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; call it on every rank with the same number.

        Raises:
            TypeError: The number is not an integer.
        """
        self.epoch = as_int("epoch", epoch)

    def __iter__(self) -> Iterator[int]:
        """This rank's indices of the epoch, as Python ints."""
        part = self.part
        positions = np.arange(self.local_rank, self.num_samples * self.ranks_per_node, self.ranks_per_node)
        if not self.num_samples:
            return iter(())
        positions %= len(part)  # the padding begins again at the start of the part
        if self.shuffle:
            shuffled = _permutation(len(part), "epoch", self.seed, self.epoch, self.node)
            positions = shuffled[positions]
        return iter(part[positions].tolist())

    def __len__(self) -> int:
        """How many indices each rank gets in an epoch."""
        return self.num_samples


def _permutation(length: int, *key: object) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A permutation that depends only on the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    # torch's generator on the CPU, like that of DistributedSampler: NumPy can change its permutations.
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    permutation: np.ndarray[Any, np.dtype[np.int64]] = torch.randperm(length, generator=generator).numpy()
    return permutation


def _num_nodes(given: int | None, num_replicas: int) -> int:
    """The number of nodes; see `NodePartitionSampler`."""
    per_node = 1 if num_replicas == 1 else ranks_of_host() or 0
    if given is None and not per_node:
        raise RuntimeError(
            "num_nodes is unknown: the environment has no LOCAL_WORLD_SIZE. Start the script with torchrun, "
            "or give num_nodes"
        )
    num_nodes = -(-num_replicas // per_node) if given is None else as_int("num_nodes", given)
    if num_nodes < 1 or num_replicas % num_nodes or (given is None and num_nodes * per_node != num_replicas):
        raise ValueError(
            f"every node needs the same number of ranks, but got {num_replicas} ranks on {num_nodes} nodes"
            + (f", of which this one has {per_node}" if given is None else "")
            + ": change num_nodes, or start every node with the same --nproc-per-node"
        )
    return num_nodes
