"""The private names of torch that fastload needs are there, and mean what fastload believes."""

from __future__ import annotations

import importlib.util
import inspect
import os
import pkgutil
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import fastload
from fastload.batch.fetch import Fetcher
from fastload.system import torch_private
from fastload.system.logs import say_once

if TYPE_CHECKING:
    from collections.abc import Iterator

# In a list since 2.14, so that the Process of a worker does not retain it.
DATASET = "dataset" if torch.__version__ < "2.14" else "dataset_holder"
SIGNATURES = {
    "pin_memory": ["data", "device"],
    "worker_loop": [
        *("dataset_kind", DATASET, "index_queue", "data_queue", "done_event", "auto_collation"),
        *("collate_fn", "drop_last", "base_seed", "init_fn", "worker_id", "num_workers"),
        *("persistent_workers", "shared_seed"),
    ],
    "pytree.tree_flatten": ["tree", "is_leaf"],
    "pytree.tree_unflatten": ["leaves", "treespec"],
    "torch_collate.collate": ["batch", "collate_fn_map"],
    "torch_collate.collate_tensor_fn": ["batch", "collate_fn_map"],
    "BaseDataLoaderIter.__init__": ["self", "loader"],
    "BaseDataLoaderIter._next_data": ["self"],
    "BaseDataLoaderIter._next_index": ["self"],
    "BaseDataLoaderIter._reset": ["self", "loader", "first_iter"],
    "MultiProcessingDataLoaderIter._shutdown_workers": ["self"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_functions_take_the_arguments_that_fastload_passes(name: str) -> None:
    """Functions that fastload calls, replaces or overrides."""
    function: Any = torch_private
    for part in name.split("."):
        function = getattr(function, part)
    assert list(inspect.signature(function).parameters) == SIGNATURES[name]


# What fastload can do without: where the name is, how it is used, and what comes of it when it has gone.
REPLACEABLE: dict[str, Any] = {
    "torch.utils.data.DataLoader._auto_collation": lambda loader: torch_private.has_auto_collation(loader),
    "torch.utils.data.DataLoader._index_sampler": lambda loader: (
        torch_private.index_sampler(loader) is loader.batch_sampler
    ),
    "torch.utils.data.dataloader._DatasetKind": lambda loader: not torch_private.is_iterable(loader),
    "torch.autograd.profiler._is_profiler_enabled": lambda loader: list(fastload.DataLoader([1, 2])),
    "torch.utils.data._utils.worker.WorkerInfo": lambda _: set_info(),
    "torch.multiprocessing._set_thread_name": lambda _: torch_private.set_thread_name("x") is None,
    "torch._C._cuda_hasPrimaryContext": lambda _: torch_private.has_cuda_context(0) is None,
    "torch._C.DisableTorchFunctionSubclass": lambda _: torch_private.plain_tensor(torch.ones(1)) == 1,
    "torch.utils.data._utils.pin_memory.pin_memory": lambda _: fresh().pin_memory([3], None) == [3],
    "torch.utils.data._utils.worker._worker_loop": lambda _: fresh().worker_loop is None,
}


def set_info() -> bool:
    torch_private.set_worker_info(1, 2, 3, [4])
    return get_worker_info() is None


def fresh() -> Any:
    """The module, imported once more beside itself."""
    spec: Any = importlib.util.spec_from_file_location("private_again", str(torch_private.__file__))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", REPLACEABLE)
def test_a_name_that_has_gone_is_told_once_and_replaced(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names it, however often it is used, and what fastload needed it for still works."""
    path, _, attribute = name.rpartition(".")
    owner: Any = pkgutil.resolve_name(path)
    loader = DataLoader([1, 2, 3], 2)
    monkeypatch.setattr(torch_private.torch_worker, "_worker_info", None)
    monkeypatch.delattr(owner, attribute, raising=attribute != "_cuda_hasPrimaryContext")
    say_once.cache_clear()
    for _ in range(2):
        assert REPLACEABLE[name](loader)
    (record,) = caplog.records
    shown = "_worker_info" if attribute == "WorkerInfo" else attribute
    assert shown in record.message
    assert record.levelname == "WARNING"


def test_the_seed_of_numpy_is_torchs() -> None:
    """Of any base seed and worker, bit for bit."""
    expected: Any = torch_private.torch_worker._generate_state
    for base_seed in (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 6029384719283746501):
        for worker_id in (0, 1, 300):
            assert torch_private.generate_state(base_seed, worker_id) == expected(base_seed, worker_id)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


# What torch's iterator sets, and what fastload's iterators read, set or override.
OF_ITERATORS = {
    "_dataset": list,
    "_num_workers": int,
    "_pin_memory": bool,
    "_timeout": int,
    "_sampler_iter": object,
    "_base_seed": int,
    "_persistent_workers": bool,
    "_num_yielded": int,
    "_IterableDataset_len_called": type(None),
}


@pytest.mark.parametrize("name", OF_ITERATORS)
def test_torchs_iterator_has_the_attributes_that_fastloads_share(name: str) -> None:
    """The base class sets each, with a value of the type that fastload expects."""
    iterator = iter(DataLoader([1, 2, 3]))
    assert isinstance(iterator, torch_private.BaseDataLoaderIter)
    assert isinstance(getattr(iterator, name), OF_ITERATORS[name])


def test_torchs_next_is_needed_under_a_profiler_or_for_a_stream_with_a_length() -> None:
    """Each of the two is a state of torch's that its `__next__` reads."""
    iterator: Any = iter(DataLoader([1, 2, 3]))
    assert not torch_private.needs_torch_next(iterator)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_private.needs_torch_next(iterator)
    iterator._IterableDataset_len_called = 3
    assert torch_private.needs_torch_next(iterator)


@pytest.mark.parametrize("name", ["_MapDatasetFetcher", "_IterableDatasetFetcher"])
def test_fetchers_of_torch_have_a_method_fetch(name: str) -> None:
    """In a file whose name a profile knows; so does fastload's."""
    for fetcher in (getattr(torch_private.torch_fetch, name), Fetcher):
        code = fetcher.fetch.__code__
        assert (code.co_name, os.path.basename(code.co_filename)) == ("fetch", "fetch.py")


def test_worker_info_is_what_torchs_public_function_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """All four attributes; before, this process is no worker."""
    monkeypatch.setattr(torch_private.torch_worker, "_worker_info", None)
    assert get_worker_info() is None
    torch_private.set_worker_info(1, 2, 3, [4])
    info: Any = get_worker_info()
    assert (info.id, info.num_workers, info.seed, info.dataset) == (1, 2, 3, [4])


def test_a_thread_gets_its_name() -> None:
    """Linux shows it in /proc."""
    names = []

    def name_thread() -> None:
        torch_private.set_thread_name("pt_data_worker")
        with open(f"/proc/self/task/{threading.get_native_id()}/comm") as file:
            names.append(file.read().strip())

    thread = threading.Thread(target=name_thread)
    thread.start()
    thread.join()
    assert names == ["pt_data_worker"]


@pytest.mark.parametrize("is_module", [False, True])
def test_compiled_functions_and_modules_are_found(is_module: bool) -> None:
    """`torch.compile` marks both; a module around a compiled one counts, and so does `Module.compile()`."""
    plain: Any = torch.nn.ReLU() if is_module else torch.abs
    assert not torch_private.is_compiled(plain)
    assert torch_private.is_compiled(torch.compile(plain, backend="eager"))
    if is_module:
        assert torch_private.is_compiled(torch.nn.Sequential(torch.compile(torch.nn.ReLU(), backend="eager")))
        plain.compile(backend="eager")
        assert torch_private.is_compiled(plain)
