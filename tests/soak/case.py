"""One case of the soak: its settings, which follow from one integer and make one line of text."""

from __future__ import annotations

import ast
import dataclasses
import random
import shlex
from dataclasses import dataclass
from typing import Any

from tests.soak.samples import KINDS

PLAIN = ("plain", "bulk", "subset")
STREAMS = ("stream", "stateful stream")
LMDB = ("lmdb", "png lmdb", "shards", "tiers", "from_cache", "from_cache in ram")
CACHED = ("ram", "keyed ram", "subset of ram", *LMDB)

# In these modes a sample is also read outside of a loader, or in two threads: rng="sample" cannot set the
# generators there.
_OWN_GENERATORS = ("reads samples", "torch reads", "two threads", "side by side")
SIGNALS = ("kill", "terminate", "segfault")  # modes in which a worker dies


@dataclass(frozen=True)
class Case:
    """The settings of one case; the defaults make the simplest case."""

    seed: int
    mode: str = "plain"
    # Samples and their dataset.
    kind: str = "labelled"
    shapes: str = "one"  # all samples have "one" shape, the shape changes "by batch", or with "each" sample
    num_samples: int = 12
    source: str = "plain"
    is_filled: bool = False  # CachedDataset.fill() runs before the first epoch
    max_memory: str = "auto"  # of a cache in RAM; "half" is room for half of the samples
    transform: str = "none"
    raises: bool = False  # some samples raise ValueError
    delay_ms: int = 0  # added to every third sample
    is_sharded: bool = True  # each worker reads a share of a stream
    # The loader.
    batch_size: int | None = 4
    order: str = "in order"
    drop_last: bool = False
    num_workers: int = 0
    method: str = "fork"
    prefetch_factor: int = 2
    is_persistent: bool = False
    prefetch_memory: int | str = "auto"
    channels_last: bool = False
    rng: str = "worker"
    collate: str = "default"
    in_order: bool = True
    is_pinned: bool = False
    device: str | None = None
    timeout_s: float = 0
    # The consumer.
    epochs: int = 1
    handles_sigterm: bool = False
    is_transformed: bool = False  # by a batch_transform that returns what it gets
    garbage: str = "usual"  # the garbage collector runs as "usual", is "off", or "eager"

    @property
    def is_cached(self) -> bool:
        """Whether a CachedDataset reads the samples."""
        return self.source in CACHED

    @property
    def is_stream(self) -> bool:
        """Whether the dataset is iterable-style."""
        return self.source in STREAMS

    def settings(self, other: Case | None = None) -> str:
        """The settings that differ from another case, or from the defaults, in the form of `--with`."""
        other = Case(self.seed) if other is None else other
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return " ".join(
            f"{name}={shlex.quote(str(value))}"
            for name, value in values.items()
            if value != getattr(other, name)
        )

    def __str__(self) -> str:
        return f"case {self.seed}: {self.settings() or 'the defaults'}"

    def changed(self, assignments: list[str]) -> Case:
        """The case with other settings, each given as `name=value`.

        Raises:
            ValueError: There is no such setting.
        """
        names = {field.name for field in dataclasses.fields(self)}
        changes: dict[str, Any] = {}
        for assignment in assignments:
            name, _, value = assignment.partition("=")
            if name not in names:
                raise ValueError(f"a case has no setting {name!r}; it has {', '.join(sorted(names))}")
            try:
                changes[name] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                changes[name] = value  # a word without quotation marks
        return dataclasses.replace(self, **changes)


# The weights of the values. Spawned workers take seconds to start, so their weight is low.
MODES = {
    "plain": 8,
    "holds": 10,
    "writes": 10,
    "breaks": 8,
    "interleaves": 6,
    "resumes": 8,
    "closes": 6,
    "reads samples": 6,
    "torch reads": 3,
    "interrupts": 4,
    "hands over": 4,
    "moves between threads": 4,
    "two threads": 3,
    "side by side": 5,
    "forks": 8,
    "kill": 6,
    "terminate": 3,
    "segfault": 3,
    "stop": 4,
    "times out": 3,
    "neighbour": 4,
}
SOURCES = {
    "plain": 12,
    "bulk": 4,
    "subset": 4,
    "stream": 4,
    "stateful stream": 4,
    "ram": 10,
    "keyed ram": 6,
    "subset of ram": 4,
    "lmdb": 4,
    "png lmdb": 3,
    "shards": 2,
    "tiers": 4,
    "from_cache": 3,
    "from_cache in ram": 3,
}
METHODS = {"fork": 60, "thread": 22, "forkserver": 25, "spawn": 3}
ORDERS = {
    "in order": 8,
    "shuffle": 4,
    "shuffle by a generator": 4,
    "subset sampler": 2,
    "with replacement": 2,
    "weighted": 2,
    "distributed": 2,
    "buckets": 4,
    "odd batches": 2,
}


def draw(seed: int) -> Case:
    """The case of a seed: always the same one, until this file or `samples` changes."""
    rng = random.Random(seed)

    def pick(weights: dict[Any, int]) -> Any:
        return rng.choices(list(weights), list(weights.values()))[0]

    kind = rng.choice(list(KINDS))
    case = Case(
        seed,
        mode=pick(MODES),
        kind=kind,
        shapes=pick({"one": 2, "by batch": 3, "each": 2}),
        num_samples=pick({0: 1, 1: 3, 2: 2, 7: 3, 13: 4, 20: 4, 24: 4, 31: 4, 40: 3, 64: 3, 100: 3}),
        source=pick(SOURCES),
        is_filled=rng.random() < 0.3,
        max_memory=pick({"auto": 4, "half": 1}),
        transform=rng.choice(KINDS[kind].transforms),
        raises=rng.random() < 0.15,
        delay_ms=pick({0: 4, 1: 2, 4: 1}),
        is_sharded=rng.random() < 0.7,
        batch_size=pick({None: 2, 1: 2, 2: 1, 3: 3, 4: 3, 5: 2, 7: 2, 16: 2, 150: 1}),
        order=pick(ORDERS),
        drop_last=rng.random() < 0.2,
        num_workers=pick({0: 3, 1: 4, 2: 6, 3: 3}),
        method=pick(METHODS),
        prefetch_factor=pick({1: 2, 2: 4, 3: 1, 5: 1}),
        is_persistent=rng.random() < 0.4,
        prefetch_memory=pick({"auto": 4, 1: 2, "64KB": 2, "1MB": 1}),
        channels_last=rng.random() < 0.25,
        rng=pick({"worker": 2, "sample": 1}),
        collate=pick({"default": 6, "list": 2, "arrays": 1, "keeps": 2}),
        in_order=rng.random() < 0.93,
        is_pinned=rng.random() < 0.15,
        device=pick({None: 6, "cpu": 1}),
        timeout_s=pick({0: 5, 30: 1}),
        epochs=pick({1: 2, 2: 2, 3: 1}),
        handles_sigterm=rng.random() < 0.3,
        garbage=pick({"usual": 6, "off": 1, "eager": 1}),
        is_transformed=rng.random() < 0.2,
    )
    return settled(case)


def settled(case: Case) -> Case:
    """The nearest case whose settings go together."""
    for settle in (_settle_mode, _settle_samples, _settle_batches, _settle_loader, _settle_cost):
        case = dataclasses.replace(case, **settle(case))
    return case


def _settle_mode(case: Case) -> dict[str, Any]:
    mode, changes = case.mode, dict[str, Any]()
    if not case.in_order:  # torch's own thread pins them, and asks for an accelerator
        changes |= {"is_pinned": False}
    if mode == "two threads":  # torch's iterators with workers are not safe in two threads
        changes |= {"num_workers": 0}
    if mode in (*SIGNALS, "stop", "times out"):
        changes |= {"num_workers": max(1, case.num_workers), "in_order": True}
        if case.method == "thread":
            changes |= {"method": "fork"}
    if mode == "times out":
        changes |= {"timeout_s": 0.2}
    if mode in ("resumes", "closes", "interrupts", "forks", "torch reads"):
        changes |= {"in_order": True}  # the iterator for in_order=False is torch's, which cannot do this
    if mode == "resumes" and case.source == "stream":
        changes |= {"source": "stateful stream"}
    if mode == "interleaves" and case.order == "with replacement":  # this sampler draws in mid-epoch
        changes |= {"order": "shuffle by a generator"}
    if mode == "side by side" and case.order == "shuffle":  # both would draw from the default generator
        changes |= {"order": "shuffle by a generator"}
    if mode in ("interrupts", "torch reads"):
        changes |= {"raises": False}
    if mode == "interrupts" and case.is_stream:  # what raises inside the user's generator ends it
        changes |= {"num_workers": max(1, case.num_workers)}
    if mode == "torch reads" and case.method == "thread":
        changes |= {"method": "fork"}
    if mode in ("reads samples", "two threads") and case.is_stream:
        changes |= {"source": "plain"}
    if mode in _OWN_GENERATORS and case.kind == "draws":
        changes |= {"kind": "scalars", "transform": "none"}
    if mode == "side by side" and case.kind == "plain colour":  # a pipeline is not safe in two threads
        changes |= {"transform": "none"}
    if mode == "neighbour":
        changes |= {"source": "keyed ram"}
    if mode != "terminate":
        changes |= {"handles_sigterm": False}
    return changes


def _settle_samples(case: Case) -> dict[str, Any]:
    changes = dict[str, Any]()
    kind, source = case.kind, case.source
    if source in CACHED and not KINDS[kind].is_cacheable:
        changes |= {"kind": (kind := "nest"), "transform": "none"}
    if source not in PLAIN:
        changes |= {"raises": False}
    if source not in CACHED:
        changes |= {"is_filled": False, "max_memory": "auto"}
    if case.is_stream:
        changes |= {"order": "in order", "rng": "worker"}
        if case.method == "thread":
            changes |= {"method": "fork"}
        if kind == "draws":
            changes |= {"kind": "texts", "transform": "none"}
    elif kind == "draws":
        changes |= {"rng": "sample", "source": "plain" if source == "bulk" else source}
    elif source == "bulk":
        changes |= {"rng": "worker"}
    if not case.num_samples:  # torch's random samplers refuse an empty dataset
        changes |= {"order": "in order", "max_memory": "auto"}
    if KINDS[kind].is_big:
        changes |= {"num_samples": min(case.num_samples, 13)}
    return changes


def _settle_batches(case: Case) -> dict[str, Any]:
    changes = dict[str, Any]()
    order, collate, batch_size = case.order, case.collate, case.batch_size
    if case.kind == "record":
        changes |= {"collate": (collate := "list")}
    if KINDS[case.kind].is_big and batch_size is not None:
        changes |= {"batch_size": (batch_size := min(batch_size, 5))}
    if batch_size is None:
        changes |= {"drop_last": False}
        if order in ("buckets", "odd batches"):
            changes |= {"order": (order := "in order")}
        if collate != "list":
            changes |= {"collate": (collate := "default")}
    if order in ("buckets", "odd batches"):
        changes |= {"drop_last": False}
    if collate == "keeps" and case.mode in ("writes", "forks"):  # worker and consumer share the batch
        changes |= {"collate": (collate := "default")}
    if collate == "arrays" and case.kind != "labelled":
        changes |= {"collate": (collate := "default")}
    stays_together = order in ("in order", "buckets", "odd batches") and batch_size is not None
    may_differ = collate == "list" or batch_size in (None, 1)
    if not KINDS[case.kind].has_shapes:
        changes |= {"shapes": "one"}
    elif case.shapes == "by batch" and (not stays_together or case.is_stream or "subset" in case.source):
        changes |= {"shapes": "each" if may_differ else "one"}
    elif case.shapes == "each" and not may_differ:
        changes |= {"shapes": "by batch" if stays_together and case.source in ("plain", "ram") else "one"}
    return changes


def _settle_loader(case: Case) -> dict[str, Any]:
    changes = dict[str, Any]()
    if case.num_workers == 0:
        changes |= {"method": "fork", "prefetch_factor": 2, "is_persistent": False, "timeout_s": 0}
    if case.num_workers == 0 or case.method == "thread" or case.is_stream:
        changes |= {"in_order": True}
    return changes


def _settle_cost(case: Case) -> dict[str, Any]:
    if case.num_workers and case.method == "spawn":  # each worker takes two seconds to start
        epochs = case.epochs if case.is_persistent else 1
        return {"num_workers": min(case.num_workers, 2), "epochs": epochs}
    return {}
