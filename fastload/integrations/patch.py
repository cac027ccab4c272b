"""patch_torch() and unpatch_torch(): `torch.utils.data.DataLoader` builds fastload's loader in this process.

torch's class stays in place, and gets two methods, which do nothing after unpatch_torch():

1. `__new__`: a call of exactly torch's class makes an object of `replaced.DataLoader`, whose constructor
   Python then calls. This works for every name of the class, also in modules imported before, in default
   arguments and in closures, which replacing names in modules would not reach. isinstance and issubclass stay
   correct.
2. `__init_subclass__`: classes derived from torch's class from now on derive from `replaced.DataLoader`, too.
   Earlier ones stay.

This file imports little, because `fastload run` calls `patch` wherever torch is imported.
"""

from __future__ import annotations

import functools
from typing import Any

from fastload.integrations.patch_status import status


def patch_torch(**defaults: Any) -> None:
    """Let `torch.utils.data.DataLoader` build `fastload.DataLoader`, without changing the calls.

    Works for any name of torch's class, in modules imported before and later, and in frameworks. When a
    framework rebuilds one of fastload's loaders (Accelerate's `prepare`, Ray's `prepare_data_loader`), the
    new loader keeps the arguments that torch's loader lacks.

    Earlier loaders and subclasses of torch's class stay torch's, and so do copies of these loaders. Later
    subclasses derive from fastload's loader. `isinstance(loader, torch.utils.data.DataLoader)` is True for
    all of them.

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
    from fastload.workers.settings import CHECKS

    for name in defaults:
        if name not in CHECKS:
            raise TypeError(
                f"patch_torch() got an unexpected argument {name!r}; it takes the arguments that torch's "
                f"loader lacks: {', '.join(sorted(CHECKS))}"
            )
    DataLoader([0], **{**status.defaults, **defaults})  # type: ignore[arg-type]  # raises if they do not fit
    patch(defaults)


def unpatch_torch() -> None:
    """Let `torch.utils.data.DataLoader` build torch's loader again; undoes all calls of `patch_torch`.

    Loaders built and subclasses defined in the meantime stay fastload's, and work. Without a prior
    `patch_torch`, the call has no effect.
    """
    status.is_patched = False
    status.defaults = {}


def patch(defaults: dict[str, Any]) -> None:
    """Patch torch's class without a check of the defaults, which the first loader makes."""
    status.defaults = {**status.defaults, **defaults}
    status.is_patched = True
    add_methods()


def add_methods() -> None:
    """Give torch's class the methods that do what `status` says; the class cannot do without them again."""
    from torch.utils.data.dataloader import DataLoader as TorchLoader

    @functools.wraps(TorchLoader.__init__, assigned=())  # for inspect.signature
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if status.at_first_loader is not None:
            begin, status.at_first_loader = status.at_first_loader, None
            begin()
        is_patched = status.is_patched
        if is_patched:
            from fastload.integrations.replaced import DataLoader

            if cls is TorchLoader and (args or kwargs):  # a copy and a pickle make the object without any
                cls = DataLoader
        make = super(TorchLoader, cls).__new__
        loader = make(cls) if make is object.__new__ else make(cls, *args, **kwargs)
        if is_patched and isinstance(loader, DataLoader):
            # For a derived class that names its base, `torch.utils.data.DataLoader.__init__(self, ...)`.
            vars(loader).update(status.defaults)
        return loader

    for name, method in ("__new__", staticmethod(new)), ("__init_subclass__", _init_subclass):
        if name not in vars(TorchLoader):
            setattr(TorchLoader, name, method)


@classmethod  # type: ignore[misc]  # it becomes a method of torch's class
def _init_subclass(cls: Any, /, **kwargs: Any) -> None:
    from torch.utils.data.dataloader import DataLoader as TorchLoader

    super(TorchLoader, cls).__init_subclass__(**kwargs)
    if not status.is_patched or TorchLoader not in cls.__bases__ or cls.__module__.startswith("fastload."):
        return
    from fastload.integrations.replaced import DataLoader
    from fastload.loader import DataLoader as FastloadLoader

    if not issubclass(cls, FastloadLoader):
        cls.__bases__ = tuple(DataLoader if base is TorchLoader else base for base in cls.__bases__)
