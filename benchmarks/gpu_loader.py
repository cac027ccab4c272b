"""GPU checks of a loader in ordinary and in odd situations: waits, forks, captures, default devices, kills.

Run by gpu_checks.py.
"""

from __future__ import annotations

import gc
import itertools
import os
import select
import signal
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpu_slots import Pictures
from gpu_tools import MB, check, launch, register, sized, unregister, wall_ms

import fastload
from fastload import DataLoader, DevicePrefetcher
from fastload.memory.segment import Segment, populate

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

NUM_WORKERS = 4


def wait_for(ready: Callable[[], bool], limit_s: float = 20.0) -> bool:
    """Whether something came true in time."""
    end_s = time.perf_counter() + limit_s
    while not ready() and time.perf_counter() < end_s:
        select.select([], [], [], 0.01)
    return ready()


# --- memory that another process writes ---


class Shared:
    """A segment whose pages a forked child populates and writes, as a worker does with its slot."""

    def __init__(self, nbytes: int) -> None:
        self.segment = Segment.create(nbytes, name="fastload-slot")
        self.mapping: mmap.mmap = self.segment.map(writable=True)

    def written_by_a_child(self, value: int, *, is_first: bool, huge: bool = False) -> None:
        """Let a child write every byte."""
        pid = os.fork()
        if not pid:
            mapping = self.segment.map(writable=True)
            if huge:
                mapping.madvise(14)  # MADV_HUGEPAGE
            if is_first:
                populate(mapping)
            np.frombuffer(mapping, np.uint8)[:] = value
            os._exit(0)
        os.waitpid(pid, 0)

    def tensor(self, offset: int = 0, count: int = -1) -> torch.Tensor:
        """A view of it."""
        return torch.frombuffer(self.mapping, dtype=torch.uint8, offset=offset, count=count)


@check
def memory_written_by_a_child() -> dict[str, Any]:
    nbytes, offset = 38_535_168, 4160
    shared = Shared(nbytes)
    shared.written_by_a_child(3, is_first=True)
    found: dict[str, Any] = {"register": register(shared.tensor().data_ptr(), len(shared.mapping))}
    inner = shared.tensor(offset, 1_000_000)
    found["inner address is_pinned"] = inner.is_pinned()
    found["inner address, after the start of a storage of its own"] = shared.tensor(offset)[77:].is_pinned()
    target = torch.empty(nbytes - offset, dtype=torch.uint8, device="cuda")
    found["values"] = []
    for value in (3, 4, 5):
        shared.written_by_a_child(value, is_first=False)
        target.copy_(shared.tensor(offset, nbytes - offset), non_blocking=True)
        found["values"].append([value, int(target.min()), int(target.max())])
    found["unregister"] = unregister(shared.tensor().data_ptr())
    return found


@check
def cost_of_registering() -> dict[str, Any]:
    nbytes = 38_535_168
    found: dict[str, Any] = {}
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    found["shmem_enabled"] = open(path).read().strip() if os.path.exists(path) else None  # noqa: SIM115
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    for huge in (False, True):
        for busy in (False, True):
            rows = []
            for _ in range(4):
                shared = Shared(nbytes)
                shared.written_by_a_child(1, is_first=True, huge=huge)
                tensor = shared.tensor()
                torch.cuda.synchronize()
                done = torch.cuda.Event()
                if busy:
                    torch.cuda._sleep(200_000_000)  # 0.1 s
                done.record()
                start_s = time.perf_counter()
                code = register(tensor.data_ptr(), len(shared.mapping))
                register_ms = (time.perf_counter() - start_s) * 1000
                is_busy_still = not done.query()
                start_s = time.perf_counter()
                torch.ones(8, device="cuda").add_(1)
                launch_ms = (time.perf_counter() - start_s) * 1000
                torch.cuda.synchronize()
                copy_ms = min(
                    wall_ms(lambda t=tensor: target.copy_(t[:nbytes], non_blocking=True)) for _ in range(3)
                )
                if busy:
                    torch.cuda._sleep(200_000_000)
                start_s = time.perf_counter()
                gone = unregister(tensor.data_ptr())
                unregister_ms = (time.perf_counter() - start_s) * 1000
                rows.append(
                    {
                        "codes": [code, gone],
                        "register_ms": register_ms,
                        "busy survived": is_busy_still if busy else None,
                        "launch_after_ms": launch_ms,
                        "unregister_ms": unregister_ms,
                        "copy_GB_per_s": nbytes / copy_ms / MB,
                    }
                )
                torch.cuda.synchronize()
                del tensor
            found[f"huge pages={huge}, busy={busy}"] = rows
    start_s = time.perf_counter()
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    found["torch pins as much, first, ms"] = (time.perf_counter() - start_s) * 1000
    source = torch.ones(nbytes, dtype=torch.uint8)
    start_s = time.perf_counter()
    pinned.copy_(source)
    found["memcpy into it, ms"] = (time.perf_counter() - start_s) * 1000
    # In a thread, while this one launches: how long do launches take?
    shared = Shared(8 * nbytes)
    shared.written_by_a_child(1, is_first=True)
    thread = threading.Thread(target=register, args=(shared.tensor().data_ptr(), len(shared.mapping)))
    one = torch.ones(8, device="cuda")
    slowest_ms, launches = 0.0, 0
    thread.start()
    while thread.is_alive():
        start_s = time.perf_counter()
        one.add_(1)
        slowest_ms = max(slowest_ms, (time.perf_counter() - start_s) * 1000)
        launches += 1
    thread.join()
    found["launches beside a thread that registers 308 MB"] = {"slowest_ms": slowest_ms, "launches": launches}
    torch.cuda.synchronize()
    unregister(shared.tensor().data_ptr())
    return found


# --- what the loader's own figures say ---


@check
def waits_against_the_devices_idle_time() -> dict[str, Any]:
    """A step that the host launches at once: one long kernel; the device is never idle if data is there."""
    found: dict[str, Any] = {}
    cycles_per_ms = 1_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    start.record()
    torch.cuda._sleep(50 * cycles_per_ms)
    end.record()
    torch.cuda.synchronize()
    cycles_per_ms = int(50 * cycles_per_ms / start.elapsed_time(end))
    options: dict[str, Any] = {"num_workers": NUM_WORKERS, "persistent_workers": True}

    def epoch(batches: Any, step_ms: float) -> dict[str, float]:
        events = []
        start_s = time.perf_counter()
        for images, _ in batches:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            images.sum()
            torch.cuda._sleep(int(step_ms * cycles_per_ms))
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        elapsed_s = time.perf_counter() - start_s
        idle_ms = sum(a[1].elapsed_time(b[0]) for a, b in itertools.pairwise(events))
        return {"step_ms": 1000 * elapsed_s / len(events), "idle_share": idle_ms / (1000 * elapsed_s)}

    for step_ms in (30.0, 3.0):
        with DataLoader(Pictures(128 * sized(48, 3)), 128, device="cuda", **options) as loader:
            epoch(loader, step_ms)
            loader.stats(reset=True)
            row: dict[str, Any] = epoch(loader, step_ms)
            row["stats"] = loader.stats().as_dict()
            found[f"device=, step of {step_ms} ms"] = row
    with (
        fastload.profile() as profile,
        DataLoader(Pictures(128 * sized(48, 3)), 128, device="cuda", **options) as loader,
    ):
        for _ in range(2):
            epoch(loader, 30.0)
    found["profile"] = str(profile.report()).splitlines()
    return found


class Boxes(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples of a detector: a small image and three tensors."""

    def __len__(self) -> int:
        return 256 * sized(12, 3)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Four small tensors."""
        return {
            "image": torch.full((3, 16, 16), index % 256, dtype=torch.uint8),
            "a": torch.ones(4),
            "b": torch.ones(4, 4),
            "c": torch.tensor(index),
        }


def as_they_are(samples: list[Any]) -> list[Any]:
    """A collate_fn that keeps the samples apart."""
    return samples


@check
def cost_of_leaves() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, collate in (("4 leaves a batch", None), ("1024 leaves a batch", as_they_are)):
        with DataLoader(
            Boxes(), 256, num_workers=NUM_WORKERS, collate_fn=collate, device="cuda", persistent_workers=True
        ) as loader:
            list(loader)
            torch.cuda.synchronize()
            start_s, start_cpu_s, num = time.perf_counter(), time.thread_time(), 0
            wrong = 0
            for number, batch in enumerate(loader):
                if collate is not None:
                    wrong += int(batch[5]["c"]) != 256 * number + 5
                num += 1
            torch.cuda.synchronize()
            found[name] = {
                "ms_per_batch": (time.perf_counter() - start_s) / num * 1000,
                "thread_ms_per_batch": (time.thread_time() - start_cpu_s) / num * 1000,
                "wrong": wrong,
            }
    return found


def with_array(samples: list[Any]) -> Any:
    """Two tensors and an array."""
    return torch.utils.data.default_collate(samples), np.arange(len(samples))


@check
def an_array_in_the_batch() -> dict[str, Any]:
    found = {}
    for name, collate in (
        ("tensors", torch.utils.data.default_collate),
        ("tensors and an array", with_array),
    ):
        with DataLoader(
            Pictures(128 * sized(24, 2)),
            128,
            num_workers=NUM_WORKERS,
            collate_fn=collate,
            device="cuda",
            persistent_workers=True,
        ) as loader:
            for _ in loader:
                pass
            torch.cuda.synchronize()
            start_s, start_cpu_s = time.perf_counter(), time.thread_time()
            for _ in loader:
                pass
            torch.cuda.synchronize()
            found[name] = {
                "ms_per_batch": (time.perf_counter() - start_s) / 24 * 1000,
                "thread_ms_per_batch": (time.thread_time() - start_cpu_s) / 24 * 1000,
                "num_copies": loader.stats().num_copies,
            }
    return found


@check
def threads_and_no_workers() -> dict[str, Any]:
    found = {}
    for name, options in (
        ("threads", {"num_workers": NUM_WORKERS, "worker_type": "thread"}),
        ("threads, pin_memory", {"num_workers": NUM_WORKERS, "worker_type": "thread", "pin_memory": True}),
        ("no workers", {"num_workers": 0}),
        ("in_order=False", {"num_workers": NUM_WORKERS, "in_order": False, "persistent_workers": True}),
    ):
        with DataLoader(Pictures(128 * sized(24, 2), reuses=False), 128, device="cuda", **options) as loader:
            for _ in loader:
                pass
            torch.cuda.synchronize()
            start_s, start_cpu_s = time.perf_counter(), time.thread_time()
            wrong = torch.zeros((), dtype=torch.int64, device="cuda")
            for images, labels in loader:
                first = images[:, 0, :2, 0].to(torch.int64)
                wrong += (first[:, 0] * 256 + first[:, 1] != labels).sum()
            torch.cuda.synchronize()
            found[name] = {
                "ms_per_batch": (time.perf_counter() - start_s) / 24 * 1000,
                "thread_ms_per_batch": (time.thread_time() - start_cpu_s) / 24 * 1000,
                "wrong": int(wrong),
            }
    return found


# --- odd situations ---


@check
def forks_with_recorded_tensors() -> dict[str, Any]:
    """A forked child whose garbage holds delivered batches: with a collection, with and without a freeze."""
    found: dict[str, Any] = {}

    class Cycle:
        """Garbage that only a collection frees."""

        def __init__(self, batch: Any) -> None:
            self.batch, self.me = batch, self

    def exit_code(of_what: str, freeze: bool) -> int:
        gc.collect()
        gc.disable()
        if of_what == "loader":
            with DataLoader(Pictures(256), 64, num_workers=1, device="cuda") as loader:
                for batch in loader:
                    Cycle(batch)
        elif of_what == "prefetcher":
            for batch in DevicePrefetcher([torch.ones(64, 64) for _ in range(4)]):
                Cycle(batch)
        else:
            Cycle(torch.ones(64, 64).to("cuda"))
        pid = os.fork()
        if not pid:
            if freeze:
                gc.freeze()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            gc.collect()
            os._exit(0)
        gc.enable()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for of_what in ("loader", "prefetcher", "plain"):
            for freeze in (False, True):
                found[f"{of_what}, freeze={freeze}"] = exit_code(of_what, freeze)
    return found


@check
def capture_of_a_step_between_batches() -> dict[str, Any]:
    found: dict[str, Any] = {}
    static = torch.zeros(64, 224, 224, 3, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    sums = []
    with DataLoader(Pictures(64 * 8), 64, num_workers=2, device="cuda") as loader:
        for number, (images, labels) in enumerate(loader):
            static.copy_(images)
            if number == 2:
                with torch.cuda.graph(graph):
                    total = static[:, 0, :2, 0].to(torch.int64).sum(0)
            if number >= 2:
                graph.replay()
                expected = torch.stack([labels // 256, labels % 256], 1).sum(0)
                sums.append(bool((total == expected).all()))
    found["replayed steps are right"] = sums
    with DataLoader(Pictures(64 * 8), 64, num_workers=2, device="cuda") as loader:
        batches = iter(loader)
        next(batches)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                next(batches)
            found["next() inside a capture"] = "no error"
        except Exception as error:  # noqa: BLE001  # which one is the question
            found["next() inside a capture"] = f"{type(error).__name__}: {error}"[:400]
    found["afterwards"] = launch()
    return found


@check
def compiled_transform_with_cuda_graphs() -> dict[str, Any]:
    compiled = torch.compile(lambda batch: batch[0].float() + 1, mode="reduce-overhead")
    found: dict[str, Any] = {"wrong": 0, "batches": 0}
    with DataLoader(Pictures(64 * 10), 64, num_workers=2, device="cuda", device_transform=compiled) as loader:
        try:
            for number, images in enumerate(loader):
                high, low = divmod(64 * number, 256)
                found["wrong"] += images[0, 0, :2, 0].tolist() != [high + 1, low + 1]
                found["batches"] += 1
        except Exception as error:  # noqa: BLE001  # which one is the question
            found["error"] = f"{type(error).__name__}: {error}"[:400]
    return found


@check
def default_device() -> dict[str, Any]:
    transforms = fastload.transforms
    found: dict[str, Any] = {}
    torch.set_default_device("cuda")
    try:
        for transform in (
            transforms.RandomResizedCrop(64),
            transforms.RandomHorizontalFlip(),
            transforms.RandomCrop(64, 4),
            transforms.Normalize((0.5,) * 3, (0.5,) * 3),
        ):
            name = type(transform).__name__
            try:
                with DataLoader(Pictures(64), 16, device="cuda", device_transform=transform) as loader:
                    found[name] = [str(images.device) for images, _ in loader][:1]
            except Exception as error:  # noqa: BLE001  # which one is the question
                found[name] = f"{type(error).__name__}: {error}"[:300]
    finally:
        torch.set_default_device(None)
    return found


@check
def two_loaders_and_a_killed_worker() -> dict[str, Any]:
    """Batches of two loaders in turn; then a worker is killed while copies from its slots are in flight."""
    found: dict[str, Any] = {"wrong": 0}

    def is_wrong(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = images[:, 0, :2, 0].to(torch.int64)
        return (first[:, 0] * 256 + first[:, 1] != labels).sum()

    options: dict[str, Any] = {"num_workers": 2, "device": "cuda", "max_worker_restarts": 4}
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with (
        DataLoader(Pictures(64 * 30), 64, **options) as one,
        DataLoader(Pictures(64 * 30), 64, **options) as two,
    ):
        for first, second in zip(one, two, strict=True):
            torch.cuda._sleep(300_000)
            wrong += is_wrong(*first) + is_wrong(*second)
        batches = iter(one)
        num = 0
        for number, batch in enumerate(batches):
            torch.cuda._sleep(5_000_000)
            if number in (4, 11):
                os.kill(batches._workers[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
            wrong += is_wrong(*batch)
            num += 1
        found["batches after two kills"], found["restarts"] = num, one.stats().num_restarts
    found["wrong"] = int(wrong)
    found["launch"] = launch()
    return found


@check
def memory_of_2000_batches() -> dict[str, Any]:
    """What the allocators hold after each 200 batches of a loader with crops on the device."""
    transform = [
        fastload.transforms.RandomResizedCrop(64),
        fastload.transforms.Normalize((0.5,) * 3, (0.5,) * 3),
    ]
    reserved, rss, num = [], [], 0
    with DataLoader(
        Pictures(32 * sized(200, 4)),
        32,
        num_workers=NUM_WORKERS,
        device="cuda",
        device_transform=transform,
        persistent_workers=True,
    ) as loader:
        for _ in range(10):
            for images, _ in loader:
                images.mean()
                num += 1
            reserved.append(torch.cuda.memory_reserved())
            rss.append(int(open("/proc/self/statm").read().split()[1]) * 4096)  # noqa: SIM115
    stats = torch.cuda.memory_stats()
    return {
        "batches": num,
        "reserved_bytes": reserved,
        "rss_bytes": rss,
        "num_alloc_retries": stats["num_alloc_retries"],
    }
