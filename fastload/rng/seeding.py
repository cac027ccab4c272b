"""Seeds workers: random, numpy and torch with torch's own values, and what albumentations and MONAI draw.

The libraries get exactly torch's values, so seeding them twice changes nothing. `get_worker_info` says which
worker the caller is, also in worker threads, where torch's function of this name returns None.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import get_worker_info as torch_worker_info

from fastload.augmentation.libraries import LIBRARIES
from fastload.rng.entry_points import Pair, RandomStreams, current_streams, identity_of, set_worker_streams
from fastload.system.checks import as_int
from fastload.system.torch_private import generate_state

_WORD_BITS = 32  # the word size of numpy's SeedSequence


# --- the worker -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerInfo:
    """A worker of a loader, as `get_worker_info` returns it.

    Attributes:
        id: 0 to num_workers - 1.
        num_workers: The number of workers.
        seed: The worker's own seed, as in torch: the base seed plus the id.
        dataset: The worker's copy of the dataset.
        method: Whether the worker is a process or a thread.
    """

    id: int
    num_workers: int
    seed: int
    dataset: Any
    method: Literal["process", "thread"]


class _Here(threading.local):
    info: WorkerInfo | None = None


_here = _Here()
# A process that a worker thread forks is not that worker. Windows does not fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: work_as(None))


def get_worker_info() -> WorkerInfo | None:
    """The worker that calls this, a process or thread; None elsewhere.

    In a process, the values are those of `torch.utils.data.get_worker_info()`.
    """
    if _here.info is not None:
        return _here.info
    info = torch_worker_info()
    if info is None:
        return None
    return WorkerInfo(info.id, info.num_workers, info.seed, info.dataset, "process")


def work_as(info: WorkerInfo | None) -> None:
    """Let `get_worker_info` return ``info`` to this thread from now on."""
    _here.info = info


# --- the libraries ---------------------------------------------------------------------------------------


def seed_libraries(base_seed: int, worker_id: int) -> int:
    """Seed random, torch and numpy exactly as torch's own worker does.

    Args:
        base_seed: The seed that the loader drew when the iterator was made.
        worker_id: 0 to num_workers - 1.

    Returns:
        The worker's seed, ``base_seed + worker_id``.
    """
    seed = base_seed + worker_id
    random.seed(seed)
    # For each kind of device, torch keeps the text of the stack: that of a forked worker takes milliseconds.
    limit = getattr(sys, "tracebacklimit", None)
    sys.tracebacklimit = 1
    try:
        torch.manual_seed(seed)
    finally:
        if limit is None:
            del sys.tracebacklimit
        else:
            sys.tracebacklimit = limit
    np.random.seed(generate_state(base_seed, worker_id))
    return seed


def seed_everything(seed: int) -> torch.Generator:
    """Seed random, numpy and torch in this process; return a generator for the loader.

    ``loader = DataLoader(dataset, shuffle=True, generator=seed_everything(1))`` draws its order and its
    workers' seeds from its own random stream, which dropout and other loaders do not change.

    Args:
        seed: From 0 to 2**63 - 1; numpy gets its low 32 bits.

    Raises:
        TypeError: The seed is not an int.
        ValueError: The seed is out of range.
    """
    number = as_int("seed", seed)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"seed should be from 0 to 2**63 - 1, but got {number}")
    random.seed(number)
    np.random.seed(number % (1 << _WORD_BITS))
    torch.manual_seed(number)
    return torch.Generator().manual_seed(number)


# --- the pipelines ---------------------------------------------------------------------------------------


class WorkerStreams(RandomStreams):
    """The random streams of one worker, for `seeding="worker"`.

    Each pipeline has its own stream, named by the order of first calls, and by the user's seed of Compose, if
    any. Transforms with a RandomState (MONAI's) share one stream.

    Args:
        seed: The worker's seed.
        role: What the worker is. The consumer's own process, `"local"`, leaves transforms with a RandomState
            alone, because the user's seeds reach them there. A pipeline that seeds itself (AlbumentationsX)
            does so except in a thread, which is no worker to it.
    """

    def __init__(self, seed: int, role: Literal["process", "thread", "local"]) -> None:
        super().__init__()
        self._seed = seed
        self._role = role
        self.locks = role == "thread"
        # By the id of the pipeline's identity: a look-up takes a sixth of that of a WeakKeyDictionary.
        self._pairs: dict[int, tuple[weakref.ref[Any], Pair]] = {}
        self._num_pipelines = 0
        self._state: np.random.RandomState | None = None
        if role != "local":  # it takes as long as a small epoch
            sequence = np.random.SeedSequence([*_words(seed), 0])
            self._state = np.random.RandomState(np.random.MT19937(sequence))

    def pair(self, pipeline: Any) -> Pair | None:
        """The generators of a pipeline; None if it seeds itself."""
        identity = identity_of(pipeline)
        entry = self._pairs.get(id(identity))
        if entry is not None and entry[0]() is identity:
            return entry[1]
        if self._role != "thread" and any(library.seeds_itself(pipeline) for library in LIBRARIES):
            return None
        pair = _generators(self._seed, self._num_pipelines, vars(pipeline).get("seed"))
        forget = functools.partial(self._pairs.pop, id(identity))
        self._pairs[id(identity)] = weakref.ref(identity, lambda _: forget(None)), pair
        self._num_pipelines += 1
        return pair

    def state(self, randomizable: Any) -> np.random.RandomState | None:
        """The RandomState that all transforms share; None in the consumer's own process."""
        return self._state


def local_streams(base_seed: int) -> WorkerStreams | None:
    """The streams of a loader without workers: those of worker 0.

    torch seeds nothing in the consumer's process, because the generators there belong to the user. Pipelines
    have their own generators, which the user's seeds do not reach.

    Returns:
        None where transforms already have streams: in a worker, and in a dataset being read for a loader.
    """
    return WorkerStreams(base_seed, "local") if current_streams() is None else None


def _generators(seed: int, ordinal: int, user_seed: Any) -> Pair:
    words = [*_words(seed), ordinal]
    if isinstance(user_seed, (int, np.integer)):  # the types that albumentations accepts as a seed
        # The 1 distinguishes seed=0 from no seed: SeedSequence ignores trailing zeros.
        words += [1, *_words(int(user_seed))]
    for_numpy, for_python = np.random.SeedSequence(words).spawn(2)
    state = for_python.generate_state(4, np.uint32).tobytes()
    return np.random.default_rng(for_numpy), random.Random(int.from_bytes(state, "little"))


def _words(seed: int) -> list[int]:
    """The low and the high 32-bit word; torch's seeds are 64 bits wide."""
    mask = (1 << _WORD_BITS) - 1
    return [seed & mask, (seed >> _WORD_BITS) & mask]


# --- worker_init_fn --------------------------------------------------------------------------------------


def seed_worker(worker_id: int) -> None:
    """Seed random, numpy, torch, and what albumentations and MONAI draw: a ``worker_init_fn``.

    fastload's loader does all this itself.

    Example:
        ``DataLoader(dataset, num_workers=4, worker_init_fn=seed_worker)``, with torch's or fastload's loader.

    Raises:
        RuntimeError: The caller is not a loader's worker.
    """
    info = get_worker_info()
    if info is None:
        raise RuntimeError(
            "seed_worker seeds the worker process that calls it, but this is not a worker: pass it to "
            "the loader, as DataLoader(..., num_workers=2, worker_init_fn=fastload.seed_worker)"
        )
    seed = info.seed
    if info.method == "process":  # threads share the libraries' generators with all other threads
        seed = seed_libraries(torch.initial_seed() - worker_id, worker_id)
    set_worker_streams(WorkerStreams(seed, info.method), is_thread=info.method == "thread")
