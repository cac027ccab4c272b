"""Gather: a dataset that lies on the device; the loader sends row numbers, and batches are gathered there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data
from torch import nn

from fastload.device.devices import free_bytes
from fastload.nested.tree import leaves, map_device_leaves
from fastload.system.humanize import readable_size

if TYPE_CHECKING:
    from typing import Self


class Gather(nn.Module):
    """Replaces a batch of row numbers, ``(B,) int64``, with these rows of columns that lie on the device.

    For datasets that fit into the device's memory beside the model, CIFAR for example: no sample is read or
    copied again after the start, and no worker is needed. Order, resuming, ranks and the random numbers of
    the transforms after it are those of the same loader over the dataset itself::

        gather = Gather.from_dataset(dataset)
        augment = [gather, RandomCrop(32, 4), RandomHorizontalFlip()]
        loader = DataLoader(gather.rows, 512, shuffle=True, device="cuda", device_transform=augment)

    Args:
        columns: A nested batch of all samples: each tensor has the samples along its first dimension. The
            module keeps these tensors, and moves them to the device of the first batch, once. Other values
            are passed on to each batch.

    Attributes:
        columns: The samples, on the device of the last batch.
        rows: ``range(number of samples)``, the dataset for the loader.

    Raises:
        ValueError: There is no tensor, or their first dimensions differ.
        TypeError: When called: the batch is not an int64 tensor of one dimension.
        torch.OutOfMemoryError: When called: the columns do not fit into the device's free memory.
    """

    def __init__(self, columns: Any) -> None:
        super().__init__()
        self.columns = columns
        tensors = self._tensors()
        lengths = {len(tensor) if tensor.ndim else None for tensor in tensors}
        if len(lengths) != 1 or None in lengths:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensor"
            raise ValueError(f"columns should have all samples along their first dimension, but got {shapes}")
        self.rows = range(len(tensors[0]))

    @classmethod
    def from_dataset(cls, dataset: Any) -> Self:
        """The samples of a map-style dataset, collated once; they need equal shapes, and no text.

        Read a `CachedDataset` without its random transform: what it draws would be the same in all epochs.

        Raises:
            ValueError: There is no sample, or samples hold something else than arrays, tensors and numbers.
            Exception: That of torch's `default_collate` for samples of different shapes or structures.
        """
        if not len(dataset):
            raise ValueError("Gather needs a dataset with samples, but got an empty one")
        generator = torch.Generator()  # torch's loader draws a seed: not from the user's stream
        (columns,) = torch.utils.data.DataLoader(dataset, len(dataset), generator=generator)
        others = {type(leaf).__name__ for leaf in leaves(columns) if not isinstance(leaf, torch.Tensor)}
        if others:
            raise ValueError(
                "Gather keeps samples of arrays, tensors and numbers in dicts, lists and tuples, but got "
                f"{', '.join(sorted(others))}"
            )
        return cls(columns)

    def forward(self, rows: torch.Tensor) -> Any:
        """The samples of these rows, as a batch of the structure of `columns`."""
        if not isinstance(rows, torch.Tensor) or rows.dtype != torch.int64 or rows.ndim != 1:
            got = (
                f"{rows.dtype} of shape {tuple(rows.shape)}" if isinstance(rows, torch.Tensor) else type(rows)
            )
            raise TypeError(
                f"Gather expects row numbers, (B,) int64, but got {got}; give the loader gather.rows"
            )
        self._move(rows.device)
        return map_device_leaves(self.columns, lambda column: column.index_select(0, rows))

    def _move(self, device: torch.device) -> None:
        here = [tensor for tensor in self._tensors() if tensor.device != device]
        if not here:
            return
        if device.type == "cuda":
            nbytes, num_free = sum(tensor.nbytes for tensor in here), free_bytes(device)
            if nbytes > num_free:
                raise torch.OutOfMemoryError(
                    f"the columns of Gather take {readable_size(nbytes)}, but {device} has only "
                    f"{readable_size(num_free)} free: give the loader the dataset itself, with workers"
                )
        self.columns = map_device_leaves(self.columns, lambda column: column.to(device))

    def _tensors(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []

        def note(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
            return leaf

        map_device_leaves(self.columns, note)
        return tensors
