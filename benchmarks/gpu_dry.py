"""Stand-ins for torch.cuda, so that the GPU checks can run through on a machine without a GPU.

`python benchmarks/gpu_checks.py --dry-run` uses them: every line of every check runs, with small sizes, and
its figures mean nothing. Minutes on a device are few, and a misspelt name should not cost any.
"""
# ruff: noqa: D102  # methods are torch's

from __future__ import annotations

import collections
import contextlib
import functools
import os
import types
from typing import Any

import torch

CONSTRUCTORS = (
    *("arange", "as_tensor", "empty", "empty_like", "full", "full_like", "ones", "ones_like", "rand"),
    *("randint", "randn", "randperm", "tensor", "zeros", "zeros_like"),
)


class Stream:
    """A stream whose work is done at once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.device = torch.device("cpu")

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


class Event:
    """An event that is reached; a millisecond lies between any two."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class Profile(contextlib.nullcontext[Any]):
    """A profile of no kernels."""

    def __init__(self, **options: Any) -> None:
        super().__init__(self)

    def key_averages(self) -> list[Any]:
        return []


class Graph:
    """A graph that replays nothing."""

    def replay(self) -> None: ...


def on_host(device: Any) -> Any:
    """The device in place of one that is named."""
    is_cuda = str(device).startswith("cuda") or (type(device) is int and device >= 0)
    return torch.device("cpu") if is_cuda else device


def _constructing(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        if options.get("device") is not None:
            options["device"] = on_host(options["device"])
        return make(*args, **options)

    return made


def _moving(move: Any) -> Any:
    @functools.wraps(move)
    def moved(self: Any, *args: Any, **options: Any) -> Any:
        args = tuple(on_host(arg) if isinstance(arg, (str, torch.device)) else arg for arg in args)
        if options.get("device") is not None:
            options["device"] = on_host(options["device"])
        return move(self, *args, **options)

    return moved


def _nothing(*args: Any, **options: Any) -> Any:
    return contextlib.nullcontext()


def _on_the_cpu(function: Any, *args: Any, device: str) -> Any:
    return function(*args)


def install() -> None:
    """Put the stand-ins in place, for this process and those that it forks."""
    from fastload.device import devices

    for name in CONSTRUCTORS:
        setattr(torch, name, _constructing(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.to = _moving(tensor.to)
    tensor.cuda = lambda self, *args, **options: self.clone()
    tensor.pin_memory = lambda self, *args: self.clone()
    tensor.record_stream = lambda self, stream: None
    torch.nn.Module.cuda = lambda self, *args: self  # type: ignore[method-assign]
    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: 0,
        cudaHostUnregister=lambda address: 0,
        cudaGetErrorString=lambda code: "no error",
    )
    stream = Stream()
    properties = types.SimpleNamespace(total_memory=1 << 20)
    stand_ins: dict[str, Any] = {
        **dict.fromkeys(
            ("init", "synchronize", "empty_cache", "_sleep", "reset_peak_memory_stats"), _nothing
        ),
        **dict.fromkeys(("device", "stream", "graph", "set_sync_debug_mode"), _nothing),
        **dict.fromkeys(("memory_reserved", "memory_allocated", "max_memory_allocated"), lambda *args: 1),
        "is_available": lambda: True,
        "is_initialized": lambda: False,  # of torch's own parts
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "current_stream": lambda *args: stream,
        "get_device_name": lambda *args: "no GPU: a dry run",
        "get_device_properties": lambda *args: properties,
        "mem_get_info": lambda *args: (1 << 40, 1 << 40),
        "memory_stats": lambda *args: collections.defaultdict(int),
        "utilization": lambda: 0,
        "list_gpu_processes": lambda: "",
        "cudart": lambda: runtime,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    # A build for CUDA asks its driver here, also without a device.
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.set_device_index = _nothing
    with contextlib.suppress(ImportError):
        import torchvision

        torchvision.io.decode_jpeg = functools.partial(_on_the_cpu, torchvision.io.decode_jpeg)
    torch.compile = lambda function, **options: function  # type: ignore[assignment]
    devices.why_unavailable = lambda index: None
    torch.profiler.profile = Profile  # type: ignore[assignment, misc]
    os.environ["FASTLOAD_GPU_DRY_RUN"] = "1"
