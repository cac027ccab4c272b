"""What is known of a loader in the consumer's process: its name, its settings and its steps."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import IterableDataset

from fastload.profiling.stages import is_own_code
from fastload.readers.request import requested_cache

if TYPE_CHECKING:
    from types import FrameType

    from fastload.profiling.counter import Counter

MAX_STEPS = 200_000  # per loader: about 30 MB
_GENERAL_NAMES = frozenset(("self", "loader", "dataloader", "data_loader", "base_dataloader", "iterable"))


class Step(NamedTuple):
    """One call of `__next__` that returned a batch.

    Attributes:
        epoch: The number of the epoch within the profile, from 0.
        start_ns: When the consumer asked for the batch.
        end_ns: When it got the batch.
        cpu_ns: CPU time of the consumer's process until then.
    """

    epoch: int
    start_ns: int
    end_ns: int
    cpu_ns: int


@dataclass
class LoaderRecord:
    """What is recorded of one loader in the consumer's process.

    Attributes:
        number: Its number among the recorded loaders.
        name: The variable that holds it.
        settings: See `settings_of`.
        epochs: Of each loop: when `iter()` was called, and when it asked for a batch after the last one; 0 if
            it was left early or continues.
        steps: The last `MAX_STEPS` batches that the loops got.
        num_steps: How many they got in all.
        counter: Counts the files that this process decodes for it; None where it has a cache.
    """

    number: int
    name: str
    settings: dict[str, Any]
    epochs: list[list[int]] = field(default_factory=list)
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    num_steps: int = 0
    counter: Counter | None = None


def settings_of(loader: Any) -> dict[str, Any]:
    """The settings of torch's loader or fastload's, and the class and the length of its dataset."""
    dataset, is_ours = loader.dataset, hasattr(loader, "worker_type")
    num_samples = None
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream:
        with contextlib.suppress(Exception):  # whatever it raises, the loop might never ask for it
            num_samples = len(dataset)
    is_cached = is_ours and requested_cache(loader.cache) is not None
    return {
        "dataset": type(dataset).__name__,
        "num_samples": num_samples,
        "is_stream": is_stream,
        "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        "num_workers": loader.num_workers,
        "worker_type": str(loader.worker_type) if is_ours else "process",
        "prefetch_factor": loader.prefetch_factor or 0,
        "persistent_workers": loader.persistent_workers,
        "device": str(loader.device) if is_ours and loader.device is not None else None,
        "has_cache": is_cached or type(dataset).__name__ == "CachedDataset",
    }


def _attributes(value: Any) -> dict[str, Any]:
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


def name_of(loader: Any, frame: FrameType | None) -> str:
    """The variable or attribute that holds the loader in the calling user code; else its class.

    Names in frameworks' functions, and generic names, are the last choice.
    """
    general = ""
    while frame is not None:
        if is_own_code(frame.f_code.co_filename):
            attributes = _attributes(frame.f_locals.get("self"))
            for name, value in {**frame.f_globals, **attributes, **frame.f_locals}.items():
                # A framework's loader, such as Accelerate's or timm's, iterates over this one.
                wrapped = _attributes(value).values() if hasattr(type(value), "__iter__") else ()
                is_loader = any(each is loader for each in (value, *wrapped))
                if is_loader and not name.startswith("_"):
                    if name not in _GENERAL_NAMES:
                        return name
                    general = general or name
        frame = frame.f_back
    return general if general not in ("", "self") else type(loader).__name__
