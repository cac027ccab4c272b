"""Tools for the training loop: out-of-memory retries, torch's speed switches, memory and machine reports.

Read `oom` (retries), `backends` (the switches), `report` and `machine_report`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastload.training.backends import tune_backends as tune_backends
    from fastload.training.oom import find_batch_size as find_batch_size
    from fastload.training.oom import retry_on_oom as retry_on_oom
    from fastload.training.report import DeviceMemory as DeviceMemory
    from fastload.training.report import MemoryReport as MemoryReport
    from fastload.training.report import memory_report as memory_report
else:
    from fastload.system.lazy_exports import public_names as _public_names

    __getattr__, __dir__, __all__ = _public_names(
        "fastload.training",
        {
            "backends": ("tune_backends",),
            "oom": ("find_batch_size", "retry_on_oom"),
            "report": ("DeviceMemory", "MemoryReport", "memory_report"),
        },
    )
