"""Write the figures of a loader to TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fastload.epochs.stats import LoaderStats


class ScalarWriter(Protocol):
    """The method of torch's `SummaryWriter` used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any:
        """Write a number."""


def write_stats(
    writer: ScalarWriter, stats: LoaderStats, step: int | None = None, prefix: str = "loader"
) -> None:
    """Write each known figure as a scalar, such as `loader/wait_p95_s`.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`, or any object with its `add_scalar`.
        stats: The result of `loader.stats()`, or the argument of a callback of `loader.log_stats()`.
        step: The training step of the figures.
        prefix: The group of the scalars.
    """
    for name, value in stats.as_dict().items():
        writer.add_scalar(f"{prefix}/{name}", value, step)
