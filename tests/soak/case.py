"""One case of the soak: its settings, which follow from one integer and make one line of text."""

from __future__ import annotations

import ast
import dataclasses
import random
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.soak.samples import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN = ("plain", "bulk")
LMDB = ("lmdb", "from_cache")
CACHED = ("ram", "keyed ram", "subset of ram", *LMDB)
FAULTS = ("dies", "stops")  # modes in which a worker dies or stops


def _one_of(default: Any, weights: dict[Any, int]) -> Any:
    """A setting: its value in the simplest case, and all values with the weights by which they are drawn."""
    return dataclasses.field(default=default, metadata=weights)


def _rarely(percent: int) -> Any:
    return _one_of(False, {True: percent, False: 100 - percent})


@dataclass(frozen=True)
class Case:
    """The settings of one case; the defaults make the simplest case."""

    seed: int
    mode: str = _one_of(
        "reads",
        {"reads": 30, "breaks": 14, "interleaves": 6, "resumes": 9, "threads": 10, "forks": 9, "dies": 12}
        | {"stops": 7},
    )
    # Samples and their dataset.
    kind: str = _one_of("labelled", dict.fromkeys(KINDS, 1))
    # All samples have "one" shape, the shape changes "by batch", or with "each" sample.
    shapes: str = _one_of("one", {"one": 2, "by batch": 3, "each": 2})
    num_samples: int = _one_of(12, {0: 1, 1: 3, 2: 2, 7: 3, 13: 4, 20: 4, 24: 4, 31: 4, 40: 3, 64: 3, 100: 3})
    source: str = _one_of(
        "plain",
        {"plain": 14, "bulk": 4, "stream": 8, "ram": 12, "keyed ram": 6, "subset of ram": 6, "lmdb": 4}
        | {"from_cache": 3},
    )
    is_filled: bool = _rarely(30)  # CachedDataset.fill() runs before the first epoch
    max_memory: str = _one_of("auto", {"auto": 4, "half": 1})  # of a cache in RAM; for half of the samples
    transform: str = _one_of("none", {name: 1 for kind in KINDS.values() for name in kind.transforms})
    raises: bool = _rarely(15)  # some samples raise ValueError
    delay_ms: int = _one_of(0, {0: 4, 1: 2, 4: 1})  # added to every third sample
    is_sharded: bool = _one_of(True, {True: 7, False: 3})  # each worker reads a share of a stream
    # The loader.
    batch_size: int | None = _one_of(4, {None: 2, 1: 2, 2: 1, 3: 3, 4: 3, 5: 2, 7: 2, 16: 2, 150: 1})
    order: str = _one_of(
        "in order",
        {"in order": 8, "shuffle": 4, "shuffle by a generator": 4, "buckets": 6, "with replacement": 5}
        | {"distributed": 3},
    )
    drop_last: bool = _rarely(20)
    num_workers: int = _one_of(0, {0: 3, 1: 4, 2: 6, 3: 3})
    # spawn takes seconds
    method: str = _one_of("fork", {"fork": 60, "thread": 22, "forkserver": 25, "spawn": 3})
    prefetch_factor: int = _one_of(2, {1: 2, 2: 4, 3: 1, 5: 1})
    is_persistent: bool = _rarely(40)
    max_prefetch_memory: str = _one_of("auto", {"auto": 4, "1B": 2, "64KB": 2, "1MB": 1})
    channels_last: bool = _rarely(25)
    seeding: str = _one_of("worker", {"worker": 2, "sample": 1})
    collate: str = _one_of("default", {"default": 6, "list": 2, "arrays": 1, "keeps": 2})
    in_order: bool = _one_of(True, {True: 93, False: 7})
    is_pinned: bool = _rarely(15)
    timeout_s: float = _one_of(0, {0: 5, 30: 1, 0.2: 3})  # 0.2 is for a worker that stops
    # The consumer.
    epochs: int = _one_of(1, {1: 2, 2: 2, 3: 1})
    garbage: str = _one_of("usual", {"usual": 6, "off": 1, "eager": 1})  # how the garbage collector runs

    @property
    def is_cached(self) -> bool:
        """Whether a CachedDataset reads the samples."""
        return self.source in CACHED

    @property
    def is_stream(self) -> bool:
        """Whether the dataset is iterable-style."""
        return self.source == "stream"

    def settings(self, other: Case | None = None) -> str:
        """The settings that differ from another case, or from the defaults, in the form of `--with`."""
        others = vars(Case(self.seed) if other is None else other)
        different = {name: value for name, value in vars(self).items() if value != others[name]}
        return " ".join(f"{name}={shlex.quote(str(value))}" for name, value in different.items())

    def __str__(self) -> str:
        return f"case {self.seed}: {self.settings() or 'the defaults'}"

    def changed(self, assignments: list[str]) -> Case:
        """The case with other settings, each given as `name=value`."""
        changes: dict[str, Any] = {}
        for assignment in assignments:
            name, _, value = assignment.partition("=")
            if name not in vars(self):
                raise ValueError(f"a case has no setting {name!r}; it has {', '.join(sorted(vars(self)))}")
            try:
                changes[name] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                changes[name] = value  # a word without quotation marks
        return dataclasses.replace(self, **changes)


def draw(seed: int) -> Case:
    """The case of a seed: always the same one, until this file or `samples` changes."""
    rng = random.Random(seed)
    drawn = {
        field.name: rng.choices(list(field.metadata), list(field.metadata.values()))[0]
        for field in dataclasses.fields(Case)[1:]
    }
    drawn["transform"] = rng.choice(KINDS[drawn["kind"]].transforms)
    return settled(Case(seed, **drawn))


def settled(case: Case) -> Case:
    """The nearest case whose settings go together."""
    for applies, changes in _RULES:
        if applies(case):
            case = dataclasses.replace(case, **(changes(case) if callable(changes) else changes))
    return case


def _shapes(case: Case) -> dict[str, Any]:
    """Samples of one batch have one shape, unless they are not stacked."""
    stays_together = case.order in ("in order", "buckets") and case.batch_size is not None
    may_differ = case.collate == "list" or case.batch_size in (None, 1)
    shapes = case.shapes if KINDS[case.kind].has_shapes else "one"
    if shapes == "by batch" and (not stays_together or case.source in ("stream", "subset of ram")):
        shapes = "each" if may_differ else "one"
    elif shapes == "each" and not may_differ:
        shapes = "by batch" if stays_together and case.source in ("plain", "ram") else "one"
    return {"shapes": shapes}


# What does not go together, and what is changed for it; a later rule sees what earlier ones have changed.
_RULES: list[tuple[Callable[[Case], Any], dict[str, Any] | Callable[[Case], dict[str, Any]]]] = [
    # Modes.
    (lambda c: c.mode in FAULTS, lambda c: {"num_workers": max(1, c.num_workers)}),
    (lambda c: c.mode in FAULTS and c.method == "thread", {"method": "fork"}),
    (lambda c: c.mode != "stops" and c.timeout_s == 0.2, {"timeout_s": 0}),
    # This sampler draws in mid-epoch; and two loaders would both draw from the default generator.
    (lambda c: (c.mode, c.order) == ("interleaves", "with replacement"), {"order": "shuffle by a generator"}),
    (lambda c: (c.mode, c.order) == ("threads", "shuffle"), {"order": "shuffle by a generator"}),
    # seeding="sample" cannot set the generators for two threads; and a pipeline is not safe in them.
    (lambda c: (c.mode, c.kind) == ("threads", "draws"), {"kind": "nest", "transform": "none"}),
    (lambda c: (c.mode, c.kind) == ("threads", "plain colour"), {"transform": "none"}),
    # Samples.
    (lambda c: c.source not in PLAIN, {"raises": False}),
    (lambda c: not c.is_cached, {"is_filled": False, "max_memory": "auto"}),
    # A pipeline takes keywords, which a cache gives it.
    (lambda c: not c.is_cached and c.kind == "plain colour", {"transform": "none"}),
    (lambda c: c.is_stream, {"order": "in order", "seeding": "worker"}),
    (lambda c: c.is_stream and c.method == "thread", {"method": "fork"}),
    (lambda c: c.is_stream and c.kind == "draws", {"kind": "nest", "transform": "none"}),
    (lambda c: c.kind == "draws", {"seeding": "sample"}),
    (lambda c: c.kind == "draws" and c.source == "bulk", {"source": "plain"}),
    (lambda c: c.source == "bulk", {"seeding": "worker"}),
    # torch's random samplers refuse an empty dataset.
    (lambda c: not c.num_samples, {"order": "in order", "max_memory": "auto"}),
    (lambda c: KINDS[c.kind].is_big, lambda c: {"num_samples": min(c.num_samples, 13)}),
    # Batches.
    (lambda c: KINDS[c.kind].is_big and c.batch_size, lambda c: {"batch_size": min(c.batch_size or 0, 5)}),
    (lambda c: c.batch_size is None and c.order == "buckets", {"order": "in order"}),
    (lambda c: c.batch_size is None or c.order == "buckets", {"drop_last": False}),
    (lambda c: c.batch_size is None and c.collate != "list", {"collate": "default"}),
    # Worker and consumer share a batch that the collate function keeps.
    (lambda c: c.collate == "keeps" and c.mode == "forks", {"collate": "default"}),
    (lambda c: c.collate == "arrays" and c.kind != "labelled", {"collate": "default"}),
    (lambda c: True, _shapes),
    # The loader.
    (
        lambda c: not c.num_workers,
        {"method": "fork", "prefetch_factor": 2, "is_persistent": False, "timeout_s": 0},
    ),
    # A stream's copies end at different times, so how their batches come is not known.
    # An epoch out of order is not resumed in the middle.
    (lambda c: not c.num_workers or c.is_stream or c.mode == "resumes", {"in_order": True}),
    # Each spawned worker takes two seconds to start.
    (
        lambda c: c.num_workers and c.method == "spawn",
        lambda c: {"num_workers": min(c.num_workers, 2), "epochs": c.epochs if c.is_persistent else 1},
    ),
]
