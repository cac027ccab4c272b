"""The settings of `patch_torch` in this process, and what it did."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from fastload.system.logs import write_stderr


@dataclass
class State:
    """The state of this process.

    Attributes:
        is_patched: Whether `torch.utils.data.DataLoader` builds fastload's loader.
        defaults: Arguments of fastload's loader, for calls that do not set them.
        is_verbose: Whether `fastload run` requested lines on standard error.
        num_replaced: Loaders built instead of torch's.
        seeds_pipelines: Whether one of them seeds albumentations pipelines.
    """

    is_patched: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    is_verbose: bool = False
    num_replaced: int = 0
    seeds_pipelines: bool = False

    def say(self, text: str) -> None:
        """Under `fastload run`, write a line to standard error, in the first rank of each machine.

        Worker processes write nothing: they are daemon processes, in fastload and in torch.
        """
        from multiprocessing import process

        is_worker = process.current_process().daemon
        if self.is_verbose and not is_worker and os.environ.get("LOCAL_RANK", "0") == "0":
            write_stderr(f"fastload: {text}\n")


state = State()
