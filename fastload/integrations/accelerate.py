"""`prepare` of Hugging Face Accelerate for fastload's loaders, without `fastload.patch_torch()`.

Accelerate prepares the loader, and this file then replaces the torch loader inside the prepared one with
fastload's. Everything else is Accelerate's: the shares of the ranks, dispatching, synchronizing generators,
the gradient state, and moving batches to the device.

Importing this file imports Accelerate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import accelerate.data_loader
import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler

from fastload.epochs.resume import progress_of, sample_seed_of
from fastload.integrations.prepared import check_loader, device_of, loader_in_place_of

if TYPE_CHECKING:
    from accelerate import Accelerator

    import fastload.loader

__all__ = ["prepare", "skip_first_batches"]

_CALLER = "fastload.integrations.accelerate.prepare()"


def __dir__() -> list[str]:
    return __all__


def prepare(accelerator: Accelerator, loader: fastload.loader.DataLoader) -> Any:
    """Like ``accelerator.prepare(loader)``, but the result keeps fastload's own arguments.

    The batches are those of Accelerate with torch's loader, for its settings `split_batches`, `even_batches`,
    `dispatch_batches`, `use_seedable_sampler` and `use_stateful_dataloader`. The result can also be passed to
    ``accelerator.prepare``, together with the model; Accelerate then leaves it unchanged.

    Args:
        accelerator: The `accelerate.Accelerator`.
        loader: An unprepared loader. It stays unchanged; do not iterate over it.

    Returns:
        Accelerate's `DataLoaderShard` or `DataLoaderDispatcher` around a fastload loader. It also has the
        methods of fastload's loader: ``set_epoch()`` reaches the loader and the datasets of its workers,
        ``state_dict()`` counts the batches that the caller received, and ``stats()`` has their figures.

    Raises:
        TypeError: ``loader`` is not a `fastload.DataLoader`.
        ValueError: A state was loaded into the loader before; or the loader's ``device`` is not the
            accelerator's; or Accelerate cannot split its batches.
        NotImplementedError: Accelerate wraps loaders for TPUs (XLA).
    """
    if getattr(loader, "_is_accelerate_prepared", False):
        return accelerator.prepare_data_loader(loader)
    check_loader(loader, _CALLER)
    if accelerator.distributed_type == accelerate.DistributedType.XLA:
        raise NotImplementedError(f"{_CALLER} does not support TPUs (XLA): use accelerator.prepare()")
    if accelerator.device_placement:
        device_of(loader.device, accelerator.device)  # raises before Accelerate keeps a loader
    config = accelerator.dataloader_config
    is_stateful = config.use_stateful_dataloader
    # torchdata's loader would start its workers now, and fastload's loader has a state in any case.
    config.use_stateful_dataloader = False
    try:
        prepared: Any = accelerator.prepare_data_loader(loader)
    finally:
        config.use_stateful_dataloader = is_stateful
    _exchange(prepared, loader)
    prepared.use_stateful_dataloader = is_stateful  # accelerator.save_state() saves the loader's state
    prepared._is_accelerate_prepared = True
    progress = progress_of(loader)
    if progress.has_set_epoch:
        prepared.set_epoch(progress.next_number)
    return prepared


def skip_first_batches(prepared: Any, num_batches: int = 0) -> Any:
    """Like ``accelerator.skip_first_batches``, but the result keeps fastload's own arguments.

    ``prepared.load_state_dict()`` resumes without this function, and knows the number of batches.

    Args:
        prepared: The result of `prepare`.
        num_batches: How many batches of the next epoch to skip.

    Raises:
        TypeError: ``prepared`` is not a result of `prepare`.
    """
    if type(prepared) not in (_Shard, _Dispatcher):
        raise TypeError(
            "fastload.integrations.accelerate.skip_first_batches() takes a result of prepare(), but got a "
            f"{type(prepared).__name__}"
        )
    skipping: Any = accelerate.data_loader.skip_first_batches(prepared, num_batches)
    _exchange(skipping, prepared.base_dataloader)
    skipping._is_accelerate_prepared = True
    return skipping


class _Prepared:
    """The methods that Accelerate's loaders do not forward to the wrapped loader."""

    def set_epoch(self: Any, epoch: int) -> None:
        """Set the number of the next epoch; Accelerate calls this when an epoch begins."""
        super().set_epoch(epoch)  # type: ignore[misc]  # of Accelerate's class
        self.base_dataloader.set_epoch(epoch)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Resume from a state of ``state_dict()`` with the next epoch."""
        self.base_dataloader.load_state_dict(state_dict)
        self.iteration = progress_of(self.base_dataloader).next_number
        self.dl_state_dict = self.base_dataloader.state_dict()

    def __reduce__(self) -> Any:
        return _unpickled, (type(self) is _Dispatcher, vars(self))


class _Shard(_Prepared, DataLoaderShard):  # type: ignore[misc]  # Accelerate might not be installed
    pass


class _Dispatcher(_Prepared, DataLoaderDispatcher):  # type: ignore[misc]  # Accelerate might not be installed
    pass


def _unpickled(is_dispatcher: bool, attributes: dict[str, Any]) -> Any:
    kind = _Dispatcher if is_dispatcher else _Shard
    prepared = kind.__new__(kind)
    vars(prepared).update(attributes)
    return prepared


def _exchange(prepared: Any, source: fastload.loader.DataLoader) -> None:
    """Replace the torch loader inside Accelerate's with a fastload loader."""
    kinds: dict[type, type] = {DataLoaderShard: _Shard, DataLoaderDispatcher: _Dispatcher}
    kind = kinds.get(type(prepared))
    if kind is None:
        raise NotImplementedError(f"{_CALLER} does not support Accelerate's {type(prepared).__name__}")
    device: torch.device | None = prepared.state.device if kind is _Dispatcher else prepared.device
    loader = loader_in_place_of(prepared.base_dataloader, source, device)
    sampler = accelerate.data_loader.get_sampler(loader)
    if isinstance(sampler, SeedableRandomSampler):
        # It seeds its generator in each epoch, which can be the loader's, so the seed of seeding="sample" is
        # taken now. It makes a generator in its first epoch if it has none; a loader's state has the
        # generators that were there when the epoch began.
        known = progress_of(source).sample_seed
        progress_of(loader).sample_seed = sample_seed_of(loader) if known is None else known
        if sampler.generator is None:
            sampler.generator = torch.Generator()
    prepared.base_dataloader = loader
    prepared.dl_state_dict = loader.state_dict()
    # Accelerate's classes hide their class behind a property.
    vars(object)["__class__"].__set__(prepared, kind)
