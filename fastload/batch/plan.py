"""The settings of one iterator, from the loader's arguments: what its workers of every kind get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.system.budget import parse_prefetch_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import BaseContext


@dataclass(kw_only=True)
class Plan:
    """How the batches of one iterator are made, and by whom; made once, in `iter(loader)`.

    Attributes:
        dataset: The dataset to read.
        is_iterable: Whether it is iterable-style.
        auto_collation: Whether batches are lists of samples that are collated.
        collate_fn: As in torch's loader.
        drop_last: Whether an iterable dataset's last batch is left out if it is short.
        channels_last: Whether batches of images are `(B, C, H, W)` with channels-last strides.
        on_error: `"raise"`, `"replace"`, or a function; see `failures`.
        replacements: Indices that can replace an unreadable sample; empty: the indices of the same batch.
        batch_transform: Called with each batch; its result is the batch.
        seeds_pipelines: Whether transforms of albumentations and MONAI get random streams.
        seeds_samples: Whether each sample is seeded (``seeding="sample"``).
        file_cache: A `FileCache`, which remembers the files that are decoded; None: nothing does.
        needs_keys: Whether what makes a batch draws by its key.
        worker_init_fn: As in torch's loader.
        base_seed: The seed drawn when the iterator was made.
        num_workers: The number of workers of the loader.
        kept_bytes: How much freed memory each worker process keeps; None: it asks the system itself.
        worker_type: The loader's: a name, or an object with options of such a type.
        context: The multiprocessing context that starts worker processes; it stays in this process.
        prefetch_factor: How many batches each worker can be ahead.
        max_prefetch_memory: As the loader's argument; see `max_bytes`.
        num_restarts: How many dead workers can be replaced; their unfinished batches are made again.
        is_persistent: Whether the workers serve more than one epoch.
        in_order: Whether the caller takes the replies of one worker after the other, and not of any.
    """

    dataset: Any
    is_iterable: bool
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    channels_last: bool
    on_error: Any
    replacements: Sequence[Any]
    batch_transform: Callable[[Any], Any] | None
    seeds_pipelines: bool
    seeds_samples: bool
    file_cache: Any
    needs_keys: bool
    worker_init_fn: Callable[[int], Any] | None
    base_seed: int
    num_workers: int
    worker_type: object
    context: BaseContext | None
    prefetch_factor: int
    max_prefetch_memory: int | float | str
    num_restarts: int
    is_persistent: bool
    in_order: bool
    kept_bytes: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "context": None}

    @property
    def max_bytes(self) -> int:
        """Upper bound on the memory for batches; a share is that of the memory that is free now."""
        return parse_prefetch_memory(self.max_prefetch_memory)

    # A `PickledPlan` has these, too.

    def load(self) -> Plan:
        """This object itself: under fork nothing was pickled."""
        return self

    def close(self) -> None:
        """Do nothing, as there is nothing to free."""
