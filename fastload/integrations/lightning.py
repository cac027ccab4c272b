"""A Lightning callback that logs the figures of the training loader.

Importing this file imports Lightning: `lightning.pytorch`, or else `pytorch_lightning`. If only one of the
two was imported before, this file uses it.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from fastload.epochs.stats import Counts, recorder_of, stats_of
from fastload.loader import DataLoader

if TYPE_CHECKING:
    from fastload.epochs.stats import Recorder


def _callback_class() -> Any:
    names = sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules)
    for name in names:
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise  # the package is installed, but not all that it needs
    raise ImportError("fastload.integrations.lightning needs Lightning: pip install lightning")


class StatsCallback(_callback_class()):  # type: ignore[misc]  # Lightning might not be installed
    """Logs what the training loader did since the last time, to all loggers of the Trainer.

    The names are `loader/wait_share`, `loader/wait_p95_s` and so on; see `fastload.LoaderStats`. It logs
    nothing if the training loader is not a `fastload.DataLoader`.

    Args:
        every_n_steps: Log after this many batches; None logs at the end of each epoch.
        prefix: The first part of the names.

    Raises:
        ValueError: ``every_n_steps`` is below 1.
    """

    def __init__(self, every_n_steps: int | None = None, prefix: str = "loader") -> None:
        super().__init__()
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps should be at least 1, or None, but got {every_n_steps!r}")
        self._every_n_steps = every_n_steps
        self._prefix = prefix
        self._logged: tuple[Recorder, Counts] | None = None  # the loader's figures at the last log

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Log, if that many batches were trained."""
        batch_number: int = kwargs["batch_idx"] if "batch_idx" in kwargs else args[2]
        if self._every_n_steps is not None and (batch_number + 1) % self._every_n_steps == 0:
            self._log(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log, unless batches are counted."""
        if self._every_n_steps is None:
            self._log(trainer, pl_module)

    def _log(self, trainer: Any, pl_module: Any) -> None:
        loader = trainer.train_dataloader
        if not isinstance(loader, DataLoader):
            return
        recorder = recorder_of(loader)
        counts = recorder.copied_counts()
        before = self._logged[1] if self._logged is not None and self._logged[0] is recorder else Counts()
        self._logged = recorder, counts
        figures = stats_of(counts.since(before)).as_dict()
        pl_module.log_dict({f"{self._prefix}/{name}": float(value) for name, value in figures.items()})
