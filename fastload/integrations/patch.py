"""patch_torch() and unpatch_torch(): `torch.utils.data.DataLoader` builds fastload's loader in this process.

torch's class stays in place, and two of its methods change:

1. `__init__`: an object of exactly torch's class becomes one of `replaced.DataLoader`. This works for every
   name of the class, also in modules imported before, in default arguments and in closures, which replacing
   names in modules would not reach. isinstance and issubclass stay correct.
2. `__init_subclass__`: classes derived from torch's class from now on derive from `replaced.DataLoader`, too,
   also if their constructor calls `torch.utils.data.DataLoader.__init__` by name. Earlier ones stay.

This file imports little, because `from_environment` runs in the middle of the import of torch.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
from typing import Any

from fastload.integrations.bootstrap import install_hook
from fastload.integrations.state import state

_NOTE = "fastload-run"  # of children: that they have replaced a loader
_SETTINGS = "FASTLOAD_RUN"  # the environment variable with the settings of `fastload run`, as JSON


def patch_torch(**defaults: Any) -> None:
    """Let `torch.utils.data.DataLoader` build `fastload.DataLoader`, without changing the calls.

    Works for any name of torch's class, in modules imported before and later, and in frameworks. When a
    framework rebuilds one of fastload's loaders (Accelerate's `prepare`, Ray's `prepare_data_loader`), the
    new loader keeps the arguments that torch's loader lacks.

    Earlier loaders and subclasses of torch's class stay torch's. Later subclasses derive from fastload's
    loader. `isinstance(loader, torch.utils.data.DataLoader)` is True for all of them.

    Patches this process and the processes that it forks. A spawned process imports the main module again, and
    so repeats a `patch_torch()` at the top of a script, but not one under ``if __name__ == "__main__":``. A
    loader's worker processes need none. `fastload run` reaches all child processes. A second call adds to the
    defaults, and replaces those of the same name.

    Args:
        defaults: Arguments of `fastload.DataLoader` that torch's loader lacks, such as ``cache="ram"``. They
            apply unless a call sets them. An unsupported option (``seeding="sample"`` for an iterable-style
            dataset) raises the loader's usual error.

    Raises:
        TypeError: An argument that `fastload.DataLoader` lacks, or that torch's loader also has.
        ValueError: A value that `fastload.DataLoader` does not accept.
    """
    from fastload.loader import DataLoader
    from fastload.workers.settings import OPTION_NAMES

    for name in defaults:
        if name not in OPTION_NAMES:
            raise TypeError(
                f"patch_torch() got an unexpected argument {name!r}; it takes the arguments that torch's "
                f"loader lacks: {', '.join(sorted(OPTION_NAMES))}"
            )
    DataLoader([0], **{**state.defaults, **defaults})  # type: ignore[arg-type]  # raises if they do not fit
    _patch(defaults)


def unpatch_torch() -> None:
    """Let `torch.utils.data.DataLoader` build torch's loader again; undoes all calls of `patch_torch`.

    Loaders built and subclasses defined in the meantime stay fastload's, and work. Without a prior
    `patch_torch`, the call has no effect.
    """
    from torch.utils.data.dataloader import DataLoader as TorchLoader

    state.is_patched = False
    state.defaults = {}
    # A library might have wrapped the hooked method in the meantime: it keeps it, which has no effect now.
    if vars(TorchLoader)["__init__"] is _hooked_init():
        _set(TorchLoader, "__init__", _hooked_init().__wrapped__)
    if vars(TorchLoader).get("__init_subclass__") is _init_subclass:
        del TorchLoader.__init_subclass__


def patch_on_import(*, defaults: dict[str, Any], is_verbose: bool) -> None:
    """Patch this process and its child processes as soon as they import torch's loader.

    Args:
        defaults: As for `patch_torch`; checked when the first loader is made.
        is_verbose: Write the lines of `State.say` to standard error, and the number of loaders at exit.
    """
    from fastload.system import linux  # here: children do not need it

    note = None
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        note = linux.memfd(_NOTE)  # it ends with this process
    settings = {"defaults": defaults, "is_verbose": is_verbose, "pid": os.getpid(), "note": note}
    os.environ[_SETTINGS] = json.dumps(settings)
    state.is_verbose = is_verbose
    atexit.register(_report, os.getpid())
    install_hook(f"{__name__}:{from_environment.__name__}")


def from_environment() -> None:
    """Patch with the settings of `patch_on_import`, from this process or the one that started it."""
    settings = json.loads(os.environ[_SETTINGS])
    if _is_child():
        state.is_verbose = settings["is_verbose"]
        atexit.register(_report, os.getpid())
    _patch(settings["defaults"])


def _report(pid: int) -> None:
    """Say how many loaders were replaced; a forked process leaves that to its parent."""
    if os.getpid() != pid:
        return
    number = state.num_replaced
    stats = sys.modules.get("fastload.epochs.stats")
    counts = None if stats is None else stats.of_process.copied_counts()
    from fastload.system.ranks import number_in

    where = f"in process {pid}"
    if (rank := number_in("RANK")) is not None and (number_in("WORLD_SIZE") or 1) > 1:
        where += f", rank {rank} (those of the other ranks are not counted)"
    has_begun = hasattr(sys.modules["__main__"], "__file__")  # a script that python cannot read has none
    if number or (
        has_begun and not (counts and counts.num_epochs) and not _is_child() and not _have_children_replaced()
    ):
        state.say(f"replaced {number or 'no'} torch DataLoader{'s' * (number > 1)} {where}")
    if number and _is_child() and (path := _note()) is not None:
        with contextlib.suppress(OSError), open(path, "ab") as note:
            note.write(b"1")
    if counts is not None and counts.num_epochs:
        from fastload.readers.reasons import report
        from fastload.readers.request import requested_cache

        if counts.cache_hits or counts.cache_misses or requested_cache(None):
            first, *rest = report(counts.cache_hits, counts.cache_misses, +counts.miss_reasons)
            state.say("\n".join([f"cache {where}: {first}", *rest]))
    if state.seeds_pipelines and "albumentations" in sys.modules:
        state.say(
            "albumentations pipelines were seeded, differently in each worker, so their draws differ from "
            "those under torch's loader; --seeding torch leaves them alone"
        )


def _have_children_replaced() -> bool:
    """Whether child processes have replaced loaders, as those of a launcher do."""
    return (path := _note()) is not None and os.path.getsize(path) > 0


def _note() -> str | None:
    """The path of the memory file of the process that began the run; None if that process has ended."""
    settings = json.loads(os.environ.get(_SETTINGS, "{}"))
    path = f"/proc/{settings.get('pid')}/fd/{settings.get('note')}"
    with contextlib.suppress(OSError):
        if os.readlink(path) == f"/memfd:{_NOTE} (deleted)":  # else the process has ended, or closed it
            return path
    return None


def _is_child() -> bool:
    settings = json.loads(os.environ.get(_SETTINGS, "{}"))
    return bool(settings.get("pid") != os.getpid())


def _patch(defaults: dict[str, Any]) -> None:
    from torch.utils.data.dataloader import DataLoader as TorchLoader

    state.defaults = {**state.defaults, **defaults}
    state.is_patched = True
    method: Any = vars(TorchLoader)["__init__"]
    while method is not None and method is not _hooked_init():
        method = getattr(method, "__wrapped__", None)
    if method is None:
        _set(TorchLoader, "__init__", _hooked_init())
    if "__init_subclass__" not in vars(TorchLoader):
        _set(TorchLoader, "__init_subclass__", _init_subclass)


def _set(kind: type, name: str, method: Any) -> None:
    setattr(kind, name, method)  # type checkers allow no assignment to a method


@functools.cache
def _hooked_init() -> Any:
    """The constructor for torch's class; made once, around its previous constructor."""
    from torch.utils.data.dataloader import DataLoader as TorchLoader

    torch_init = vars(TorchLoader)["__init__"]

    @functools.wraps(torch_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not state.is_patched:
            torch_init(self, *args, **kwargs)
            return
        from fastload.integrations.replaced import DataLoader

        if type(self) is TorchLoader:
            object.__setattr__(self, "__class__", DataLoader)
        # Our own constructor comes here as well, after it has set worker_type. A derived class that names its
        # base, `torch.utils.data.DataLoader.__init__(self, ...)`, has not been there yet.
        if isinstance(self, DataLoader) and "worker_type" not in vars(self):
            DataLoader.__init__(self, *args, **kwargs)
        else:
            torch_init(self, *args, **kwargs)

    return init


@classmethod  # type: ignore[misc]  # it becomes a method of torch's class
def _init_subclass(cls: Any, /, **kwargs: Any) -> None:
    from torch.utils.data.dataloader import DataLoader as TorchLoader

    super(TorchLoader, cls).__init_subclass__(**kwargs)
    is_fastload = cls.__module__.partition(".")[0] == "fastload"
    if not state.is_patched or is_fastload or TorchLoader not in cls.__bases__:
        return
    from fastload.integrations.replaced import DataLoader
    from fastload.loader import DataLoader as FastloadLoader

    if not issubclass(cls, FastloadLoader):
        cls.__bases__ = tuple(DataLoader if base is TorchLoader else base for base in cls.__bases__)
