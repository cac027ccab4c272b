"""The prefetcher as the caller sees it, what it does without a device, and devices without streams."""

from __future__ import annotations

import copy
import logging
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fastload import DataLoader, DevicePrefetcher
from fastload.device import cuda as cuda_module
from fastload.device import streamless
from fastload.errors import DeviceUnavailableError
from fastload.system import logs
from tests.device.fake import FakeBackend
from tests.device.loaders import Loader, on
from tests.kit import datasets

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kit.processes import Interpreter


def test_the_loader_stays_reachable() -> None:
    """len(), set_epoch and attributes are the loader's; what it lacks is missing here too."""
    loader = Loader(5)
    prefetcher = DevicePrefetcher(loader, device="cpu")
    prefetcher.set_epoch(3)

    assert len(prefetcher) == 5
    assert loader.epoch == 3
    assert prefetcher.loader is loader
    assert prefetcher.dataset is loader.dataset
    assert not hasattr(prefetcher, "sampler")
    assert copy.copy(prefetcher).loader is loader
    with pytest.raises(TypeError, match="generator"):
        len(DevicePrefetcher((number for number in range(3)), device="cpu"))


@pytest.mark.parametrize(
    ("depth", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_depth_is_checked(depth: Any, error: type[Exception]) -> None:
    """A depth that is no whole number of batches is refused, with the value."""
    with pytest.raises(error, match=f"^depth should be .*, but got (depth=)?{depth}$"):
        DevicePrefetcher([], device="cpu", depth=depth)


# --- without a device -------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make torch say that it was built with CUDA and sees so many devices."""

    def pretend(*, is_built: bool = True, num_devices: int = 0) -> None:
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)

    logs.say_once.cache_clear()
    return pretend


@pytest.mark.parametrize("loader", [None, 3, object()])
def test_what_is_no_iterable_is_refused(loader: Any) -> None:
    """A loader that cannot be iterated is named when the prefetcher is made."""
    with pytest.raises(TypeError, match="loader should be an iterable of batches, but got"):
        DevicePrefetcher(loader, device="cpu")


def test_a_prefetcher_that_was_used_can_be_copied() -> None:
    """Its stream stays behind; the copy makes one of its own."""
    prefetcher = on(FakeBackend(), Loader(3))
    list(prefetcher)
    clone = copy.copy(prefetcher)

    assert len(list(clone)) == 3
    assert clone._stream is not prefetcher._stream


def test_auto_says_once_why_it_uses_the_cpu(cuda: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Without CUDA, device="auto" passes batches through and logs the reason, once for all prefetchers."""
    cuda(is_built=False)
    with caplog.at_level(logging.INFO, "fastload"):
        prefetchers = [DevicePrefetcher([1, 2], device="auto") for _ in range(3)]

    assert [list(p) for p in prefetchers] == [[1, 2]] * 3
    assert [str(p.device) for p in prefetchers] == ["cpu"] * 3
    assert len(caplog.records) == 1
    assert "built without CUDA" in caplog.text


def test_auto_uses_cuda_where_there_is_one(cuda: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With a device, "auto" means "cuda" and nothing is said; an index stays."""
    cuda(num_devices=2)

    assert DevicePrefetcher([], device="auto").device == torch.device("cuda")
    assert DevicePrefetcher([], device="cuda:1").device == torch.device("cuda:1")
    assert caplog.records == []


def test_cuda_by_name_without_a_visible_device_raises(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names CUDA_VISIBLE_DEVICES and its value, or the build of torch."""
    cuda(num_devices=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")

    with pytest.raises(DeviceUnavailableError, match="CUDA_VISIBLE_DEVICES='-1'"):
        DevicePrefetcher([], device="cuda")
    cuda(is_built=False)
    with pytest.raises(DeviceUnavailableError, match="built without CUDA"):
        DevicePrefetcher([], device="cuda")


@pytest.mark.parametrize("device", ["cuda:3", 3, torch.device("cuda", 3)])
def test_an_index_that_is_not_there_raises(cuda: Any, device: Any) -> None:
    """The error names the devices that are there."""
    cuda(num_devices=2)

    with pytest.raises(DeviceUnavailableError, match="'cuda:3': torch sees CUDA devices up to cuda:1;"):
        DevicePrefetcher([], device=device)


def test_a_stream_serves_again_when_its_owner_is_gone(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners who live at the same time have a stream each, on each device; later ones take them over."""
    cuda(num_devices=2)
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: (made.append(device), len(made))[1])
    monkeypatch.setattr(cuda_module, "_idle_streams", {})

    def own(index: int) -> tuple[Any, Any]:
        backend: Any = cuda_module.choose_backend(index, "this test")
        return backend, backend.make_stream()

    owners = [own(0), own(0), own(1)]
    assert [stream for _, stream in owners] == [1, 2, 3]
    del owners[1]
    assert own(1)[1] == 4
    assert own(0)[1] == 2
    assert made == [torch.device("cuda", index) for index in (0, 0, 1, 1)]


@pytest.mark.parametrize("device", ["hpu", "cuda:-1", "gpu", -1, True, b"cuda", 1.0, None, ["cuda"]])
def test_other_devices_are_refused(device: Any) -> None:
    """What is no device of a supported kind is shown in an error that lists them, numbers included."""
    message = re.escape(
        "'cuda:N' or the int N (from 0), 'cpu', 'auto', 'mps' or 'xpu', but got " + repr(device)
    )
    with pytest.raises(ValueError, match=message):
        DevicePrefetcher([], device=device)


def test_importing_touches_no_cuda(interpreter: Interpreter) -> None:
    """The import alone neither initialises CUDA nor asks for devices."""
    code = (
        "import torch; torch.cuda.is_available = torch.cuda.device_count = None; "
        "import fastload.device.prefetch, sys; sys.exit(torch.cuda.is_initialized())"
    )

    assert interpreter.run(code).returncode == 0


# --- mps and xpu -----------------------------------------------------------------------------------------


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An xpu that is there; what moves to it is noted, and stays a clone on the CPU."""
    moved: list[Any] = []

    def to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        moved.append((device.type, tuple(tensor.shape)))
        return tensor.clone()

    def move(self: streamless.StreamlessDevice, batch: Any) -> Any:
        return streamless.map_movable(batch, lambda leaf: to(leaf, self.device))

    monkeypatch.setattr(cuda_module, "why_no_streamless_device", lambda device: None)
    monkeypatch.setattr(streamless.StreamlessDevice, "move", move)
    logs.say_once.cache_clear()
    return moved


def plain_batches() -> list[Any]:
    return list(DataLoader(datasets.Made(datasets.image, 12), 4))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_batch_is_moved_when_it_is_asked_for(num_workers: int, moves: list[Any], caplog: Any) -> None:
    """The caller gets moved and transformed batches, nothing is moved before, and the log says so."""
    with caplog.at_level(logging.WARNING, "fastload"):
        loader = DataLoader(
            datasets.Made(datasets.image, 12),
            4,
            num_workers=num_workers,
            device="xpu",
            device_transform=lambda batch: (batch[0] + 1, batch[1]),
        )
        iterator = iter(loader)
        assert moves == []
        found = [next(iterator)]
        assert [kind for kind, _ in moves] == ["xpu", "xpu"]
        found += list(iterator)

    for (images, labels), (expected, expected_labels) in zip(found, plain_batches(), strict=True):
        assert torch.equal(images, expected + 1)
        assert torch.equal(labels, expected_labels)
    assert ["experimental" in record.getMessage() for record in caplog.records] == [True]


def test_the_prefetcher_moves_the_batches_of_any_iterable(moves: list[Any]) -> None:
    """DevicePrefetcher takes the device, too, and begins anew at each iter()."""
    batches = [{"image": torch.ones(2, 3), "name": "a"}]
    prefetcher = DevicePrefetcher(batches, device="xpu")

    for _ in range(2):
        (batch,) = prefetcher
        assert torch.equal(batch["image"], batches[0]["image"])
        assert batch["name"] == "a"
    assert moves == [("xpu", (2, 3))] * 2
    assert prefetcher.device == torch.device("xpu")


@pytest.mark.parametrize("device", ["mps", "xpu:0"])
def test_one_that_is_not_there_is_an_error(device: str) -> None:
    """As with CUDA: it says what torch found, and that "auto" would do."""
    with pytest.raises(DeviceUnavailableError, match=rf"{device}.*no accelerator here.*auto"):
        iter(DataLoader(datasets.Made(datasets.image, 12), device=device))


def test_move_keeps_what_is_no_tensor() -> None:
    """Tensors move, also in nests; other values are the same objects."""
    value = object()
    moved = streamless.StreamlessDevice(torch.device("meta")).move({"a": [torch.ones(2), value], "b": "text"})

    assert moved["a"][0].device.type == "meta"
    assert moved["a"][1] is value
