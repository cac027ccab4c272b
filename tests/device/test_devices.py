"""The prefetcher as the caller sees it, and the choice of a device."""

from __future__ import annotations

import copy
import itertools
import logging
import multiprocessing
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fastload import DataLoader, DevicePrefetcher
from fastload.device import devices
from fastload.errors import DeviceUnavailableError
from fastload.system import logs
from tests.device.loaders import Loader, on
from tests.kit import datasets

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.device.fake import FakeBackend
    from tests.kit.processes import Interpreter

IMAGES = datasets.Made(datasets.image, 12)


def plus_one(batch: Any) -> Any:
    return batch[0] + 1, batch[1]


def check_plus_one(batches: list[Any]) -> None:
    for (images, labels), (expected, expected_labels) in zip(batches, DataLoader(IMAGES, 4), strict=True):
        assert torch.equal(images, expected + 1)
        assert torch.equal(labels, expected_labels)


def test_the_loader_stays_reachable(fake: FakeBackend) -> None:
    """len() and attributes are the loader's alone; a copy of a used prefetcher makes its own stream."""
    loader = Loader(5)
    prefetcher = on(fake, loader)
    assert len(prefetcher) == len(list(prefetcher)) == 5
    assert prefetcher.loader is loader
    assert prefetcher.make is loader.make
    assert not hasattr(prefetcher, "sampler")
    clone = copy.copy(prefetcher)
    assert clone.loader is loader
    assert len(list(clone)) == 5
    assert clone._stream is not prefetcher._stream
    with pytest.raises(TypeError, match="generator"):
        len(DevicePrefetcher((number for number in range(3)), device="cpu"))


@pytest.mark.parametrize(
    ("loader", "depth", "error", "message"),
    [
        ([], 0, ValueError, "^depth should be .*, but got depth=0$"),
        ([], 1.0, TypeError, "^depth should be .*, but got 1.0$"),
        ([], True, TypeError, "^depth should be .*, but got True$"),
        (3, 2, TypeError, "loader should be an iterable of batches"),
    ],
)
def test_arguments_are_checked(loader: Any, depth: Any, error: type[Exception], message: str) -> None:
    """A depth that is no whole number of batches, and a loader that cannot be iterated."""
    with pytest.raises(error, match=message):
        DevicePrefetcher(loader, device="cpu", depth=depth)


# --- the choice -------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make torch say that it was built with CUDA and sees so many devices."""

    def pretend(*, is_built: bool = True, num_devices: int = 0) -> None:
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)

    logs.say_once.cache_clear()
    return pretend


def test_auto(cuda: Any, caplog: Any) -> None:
    """Without CUDA the CPU transforms; one line says why, for each kind of caller."""
    cuda(num_devices=2)
    with caplog.at_level(logging.INFO, "fastload"):
        assert DevicePrefetcher([], device="auto").device == torch.device("cuda")
        assert DevicePrefetcher([], device="cuda:1").device == torch.device("cuda:1")
        assert caplog.records == []
        cuda(is_built=False)
        prefetchers = [DevicePrefetcher([1, 2], device="auto") for _ in range(3)]
        with DataLoader(IMAGES, 4, device="auto", device_transform=plus_one, num_workers=1) as loader:
            check_plus_one([*loader])
            check_plus_one([*loader])
            assert loader.state_dict()["_iterator_finished"] is True
    assert [list(p) for p in prefetchers] == [[1, 2]] * 3
    assert [str(p.device) for p in prefetchers] == ["cpu"] * 3
    for record, asker in zip(caplog.records, ["DevicePrefetcher", "DataLoader"], strict=True):
        assert f"{asker}(device='auto') leaves the batches on the CPU: torch" in record.message
        assert "built without CUDA" in record.message
        assert record.levelname == "INFO"


@pytest.mark.parametrize(
    ("device", "found", "message"),
    [
        ("cuda", {"num_devices": 0}, "CUDA_VISIBLE_DEVICES='-1'"),
        ("cuda", {"is_built": False}, "built without CUDA"),
        (3, {"num_devices": 2}, "'cuda:3': torch sees CUDA devices up to cuda:1;"),
        (torch.device("cuda", 3), {"num_devices": 2}, "'cuda:3': torch sees CUDA devices up to cuda:1;"),
    ],
)
def test_missing_devices(cuda: Any, monkeypatch: Any, device: Any, found: Any, message: str) -> None:
    """What hides it, the build of torch or the devices that are there; iter() says so and starts nothing."""
    if found:
        cuda(**found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(DeviceUnavailableError, match=message):
        DevicePrefetcher([], device=device)
    with pytest.raises(DeviceUnavailableError, match=message):
        iter(DataLoader(IMAGES, device=device, num_workers=2))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    "device",
    ["hpu", "mps", "xpu:0", "cuda:-1", "gpu", -1, True, b"cuda", 1.5, torch.device("meta")],
)
def test_other_devices_are_refused(device: Any) -> None:
    """What is no device of a supported kind is shown in an error that lists them, and says what to do."""
    message = "device should be 'cuda', 'cuda:N' or the int N (from 0), 'cpu' or 'auto', but got "
    for make in (lambda: DevicePrefetcher([], device=device), lambda: DataLoader(IMAGES, device=device)):
        with pytest.raises(
            ValueError, match=f"{re.escape(message + repr(device))}; .* move each batch yourself"
        ):
            make()
    with pytest.raises(ValueError, match="but got None"):
        DevicePrefetcher([], device=None)  # type: ignore[arg-type]


def test_a_stream_serves_again_when_its_owner_is_gone(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners who live at the same time have a stream each, on each device; later ones take them over."""
    cuda(num_devices=2)
    numbers = itertools.count(1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: (device.index, next(numbers)))
    monkeypatch.setattr(devices, "_idle_streams", {})

    def own(index: int) -> tuple[Any, Any]:
        backend: Any = devices.choose_backend(index, "this test")
        return backend, backend.make_stream()

    owners = [own(0), own(0), own(1)]
    assert [stream for _, stream in owners] == [(0, 1), (0, 2), (1, 3)]
    del owners[1]
    assert own(1)[1] == (1, 4)
    assert own(0)[1] == (0, 2)


def test_neither_an_import_nor_a_report_touches_cuda(interpreter: Interpreter) -> None:
    """They neither initialise CUDA nor ask for devices."""
    code = (
        "import torch; torch.backends.cuda.is_built = lambda: True; "
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda.mem_get_info = None; "
        "import fastload.device.device_prefetcher, sys; import fastload.training.report as r; "
        "found = r.memory_report(); found.reset_peak(); "
        "sys.exit(torch.cuda.is_initialized() or bool(found.devices))"
    )
    assert interpreter.run(code).returncode == 0
