"""What must hold before worker processes are started; called by the pool, in the parent."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing import forkserver, process
from typing import TYPE_CHECKING, Any

from fastload.errors import WorkerStartError

if TYPE_CHECKING:
    from fastload.transport.job import Job


def check_start(job: Job, method: str) -> None:
    """Say clearly what would otherwise fail in another process, or in the middle of a bootstrap."""
    if getattr(process.current_process(), "_inheriting", False):
        raise WorkerStartError(
            "workers were asked for while this process is itself being started. "
            "Put the code that iterates over the loader under `if __name__ == '__main__':`."
        )
    if process.current_process().daemon:
        # multiprocessing asserts this itself, with less to go on.
        raise AssertionError("daemonic processes are not allowed to have children")
    if method == "fork":
        return
    main_module = sys.modules.get("__main__")
    kind = type(job.dataset)
    if kind.__module__ == "__main__" and getattr(main_module, "__file__", None) is None:
        raise WorkerStartError(
            f"the dataset's class {kind.__qualname__} was defined interactively, and workers started with "
            f"{method!r} cannot import it. Move it to a module file, or use multiprocessing_context='fork'."
        )


def preload_forkserver() -> None:
    """Let a fork server that is not running yet import torch once, instead of every worker."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is None and server._preload_modules == ["__main__"]:
        multiprocessing.set_forkserver_preload(["__main__", "fastload.transport.preload"])
