"""The private names of torch that fastload needs, in one place: a drop-in loader cannot do without them.

Each comment says since which release torch has the name there; all were read in 2.6 to 2.14. When a release
moves one, its test in tests/test_torch_private.py fails, and this is the only file to change. Where fastload
can do without a name, one line of the log tells that it has gone; the others end the import with its name.
Subclasses of torch's loader and iterators also inherit, read and override private attributes (`_next_data`,
`_iterator`): the same test names them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import _utils as torch_utils
from torch.autograd import profiler
from torch.utils import _pytree
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe, _utils, dataloader

from fastload.system.logs import say_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader


def _warn_gone(name: str, cost: str) -> None:
    say_once(f"torch {torch.__version__} has no {name} as fastload knows it: {cost}")


def _find(owner: Any, name: str, instead: Any, cost: str) -> Any:
    """What the owner has under this name; where it has gone, ``instead`` and a line of the log."""
    value = getattr(owner, name, None)
    if value is not None:
        return value
    _warn_gone(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}", cost)
    return instead


# The base of all iterators, and the one with workers: since 1.2.
BaseDataLoaderIter = dataloader._BaseDataLoaderIter
MultiProcessingDataLoaderIter = dataloader._MultiProcessingDataLoaderIter
# Errors in transit from a worker: since 1.2; before, it was in torch.utils.data._utils.
ExceptionWrapper = torch_utils.ExceptionWrapper
# The modules, for what is replaced in them; `collate` and `default_collate_fn_map` in the first: since 2.0.
torch_collate = _utils.collate
torch_fetch = _utils.fetch
torch_pin_memory = _utils.pin_memory
torch_worker = _utils.worker
# `tree_flatten`, `tree_unflatten`: since 1.8. torchvision's v2 imports them, too.
pytree = _pytree
# (batch, device): since 1.2, with a device since 1.12.
pin_memory: Callable[..., Any] = _find(
    torch_pin_memory, "pin_memory", lambda batch, device=None: batch, "batches are not pinned"
)
# What a worker process of torch's loader runs: since 1.2. Its dataset is in a list since 2.14.
worker_loop = _find(torch_worker, "_worker_loop", None, "fastload profile does not see torch's workers")


def generate_state(base_seed: int, worker_id: int) -> Any:
    """The seed of numpy.random in a worker, which torch makes as numpy's SeedSequence does (since 1.9)."""
    words = [worker_id, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]
    return np.random.SeedSequence(words).generate_state(4).tolist()


_PUBLIC_SAMPLERS = "batch_sampler and sampler are used, also where a subclass has others"


def _name_in(error: AttributeError, owner: Any) -> str:
    """The full name of what an attribute error misses."""
    of = owner if error.obj is None else error.obj
    return f"{getattr(of, '__name__', type(of).__name__)}.{error.name}"


def is_data_pipe(dataset: Any) -> bool:
    """Whether a dataset is one of torch's DataPipes, which its iterators treat in ways of their own."""
    return isinstance(dataset, (IterDataPipe, MapDataPipe))


MAP_STYLE = dataloader._DatasetKind.Map  # since 1.2


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Whether the loader's dataset is iterable-style (`_dataset_kind`, since 1.2)."""
    try:
        return bool(loader._dataset_kind == dataloader._DatasetKind.Iterable)
    except AttributeError as error:
        _warn_gone(_name_in(error, loader), "the dataset's class tells whether it is iterable")
        return isinstance(loader.dataset, IterableDataset)


def has_auto_collation(loader: DataLoader[Any]) -> bool:
    """Whether the loader's sampler returns lists of indices (`_auto_collation`, since 1.2)."""
    return bool(_find(loader, "_auto_collation", loader.batch_sampler is not None, _PUBLIC_SAMPLERS))


def index_sampler(loader: DataLoader[Any]) -> Any:
    """The sampler that an epoch iterates over: of batches or of samples (`_index_sampler`, since 1.2)."""
    samplers = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return _find(loader, "_index_sampler", samplers, _PUBLIC_SAMPLERS)


def needs_torch_next(iterator: BaseDataLoaderIter) -> bool:
    """Whether torch's `__next__` does more than count: it labels a profile, and warns about wrong lengths.

    `_is_profiler_enabled`: in 2.6 to 2.14. `_IterableDataset_len_called`: since 1.5.
    """
    try:
        return profiler._is_profiler_enabled or iterator._IterableDataset_len_called is not None
    except AttributeError as error:
        _warn_gone(_name_in(error, iterator), "each batch takes some microseconds more")
        return True


def set_worker_info(worker_id: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Let torch's `get_worker_info()` describe this process as a worker (`_worker_info`, since 1.2)."""
    info: Any = None
    with contextlib.suppress(AttributeError, TypeError):
        info = torch_worker._worker_info = torch_worker.WorkerInfo(
            id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset
        )
    if info is None or torch_worker.get_worker_info() is not info:
        _warn_gone(f"{torch_worker.__name__}._worker_info", "torch's get_worker_info() is None in workers")


def set_thread_name(name: str) -> None:
    """Name this thread for tools such as top; since 2.5."""
    _find(torch.multiprocessing, "_set_thread_name", lambda _: None, "workers have no names in top")(name)


def has_cuda_context(device_index: int) -> bool | None:
    """Whether this process has a context on the device (in 2.6 to 2.14, with CUDA); None: unknown."""
    asks = _find(torch._C, "_cuda_hasPrimaryContext", None, "reports list the devices where tensors are")
    return None if asks is None else bool(asks(device_index))


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a subclass as one of torch's class, whatever the subclass makes of results; since 2.0."""
    cost = "tensors whose class returns its own class cannot be cached"
    with _find(torch._C, "DisableTorchFunctionSubclass", contextlib.nullcontext, cost)():
        return tensor.as_subclass(torch.Tensor)


def is_compiled(function: Any) -> bool:
    """Whether torch.compile made it, or a part of it: of a function, or of a module.

    `_torchdynamo_orig_callable` and `_orig_mod`: since 2.0. `_compiled_call_impl`: since 2.2.
    """
    parts = function.modules() if isinstance(function, torch.nn.Module) else [function]
    return any(
        hasattr(part, "_torchdynamo_orig_callable")
        or hasattr(part, "_orig_mod")
        or getattr(part, "_compiled_call_impl", None) is not None
        for part in parts
    )


# Hooks of all modules: since 1.8, those before the backward pass since 2.0.
_HOOKS_OF_ALL = tuple(
    _find(torch.nn.modules.module, f"_global_{name}_hooks", {}, "hooks of all modules are not seen")
    for name in ("forward_pre", "forward", "backward_pre", "backward")
)
_NO_MODES = "modes that change functions of torch are not seen"
# How many modes that change functions of torch are on in this thread: since 1.13 and 2.0.
_num_function_modes = _find(torch._C, "_len_torch_function_stack", lambda: 0, _NO_MODES)
_num_dispatch_modes = _find(torch._C, "_len_torch_dispatch_stack", lambda: 0, _NO_MODES)


def has_hooks_or_modes() -> bool:
    """Whether modules or functions of torch may do more here than they say."""
    return any(_HOOKS_OF_ALL) or _num_function_modes() > 0 or _num_dispatch_modes() > 0


def has_own_methods(dataset: Any, cls: type) -> bool:
    """Whether a dataset is read by the methods of its class, which nobody has replaced, on either of them."""
    if "__getitems__" in getattr(dataset, "__dict__", ()):
        return False
    methods = [vars(cls)[name] for name in ("__getitem__", "__getitems__") if name in vars(cls)]
    # Not their `__module__`, which functools.wraps copies.
    names = [
        getattr(getattr(method, "fget", method), "__globals__", {}).get("__name__") for method in methods
    ]
    return all(name == cls.__module__ for name in names)
