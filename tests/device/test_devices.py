"""The prefetcher as the caller sees it, the choice of a device, and devices without streams."""

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
from tests.device.loaders import Loader, on
from tests.kit import datasets

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.device.fake import FakeBackend
    from tests.kit.processes import Interpreter

IMAGES = datasets.Made(datasets.image, 12)


def test_the_loader_stays_reachable(fake: FakeBackend) -> None:
    """len(), set_epoch and attributes are the loader's; what it lacks is missing here too.

    A prefetcher that was used can be copied: its stream stays behind, and the copy makes one of its own.
    """
    loader = Loader(5)
    prefetcher = on(fake, loader)
    prefetcher.set_epoch(3)
    assert len(prefetcher) == len(list(prefetcher)) == 5
    assert loader.epoch == 3
    assert prefetcher.loader is loader
    assert prefetcher.dataset is loader.dataset
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
        ([], -1, ValueError, "^depth should be .*, but got depth=-1$"),
        ([], 1.0, TypeError, "^depth should be .*, but got 1.0$"),
        ([], True, TypeError, "^depth should be .*, but got True$"),
        *((value, 2, TypeError, "loader should be an iterable of batches") for value in (None, 3, object())),
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


def test_auto_is_cuda_where_there_is_one_and_says_once_if_not(
    cuda: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Without CUDA batches pass through, and the reason is logged once for all of them; an index stays."""
    cuda(num_devices=2)
    with caplog.at_level(logging.INFO, "fastload"):
        assert DevicePrefetcher([], device="auto").device == torch.device("cuda")
        assert DevicePrefetcher([], device="cuda:1").device == torch.device("cuda:1")
        assert caplog.records == []
        cuda(is_built=False)
        prefetchers = [DevicePrefetcher([1, 2], device="auto") for _ in range(3)]
    assert [list(p) for p in prefetchers] == [[1, 2]] * 3
    assert [str(p.device) for p in prefetchers] == ["cpu"] * 3
    assert len(caplog.records) == 1
    assert "built without CUDA" in caplog.text


@pytest.mark.parametrize(
    ("device", "found", "message"),
    [
        ("cuda", {"num_devices": 0}, "CUDA_VISIBLE_DEVICES='-1'"),
        ("cuda", {"is_built": False}, "built without CUDA"),
        *(
            (device, {"num_devices": 2}, "'cuda:3': torch sees CUDA devices up to cuda:1;")
            for device in ("cuda:3", 3, torch.device("cuda", 3))
        ),
        ("mps", {}, "mps.*no accelerator here.*auto"),
        ("xpu:0", {}, "xpu:0.*no accelerator here.*auto"),
    ],
)
def test_a_device_by_name_that_is_not_there_raises(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, device: Any, found: dict[str, Any], message: str
) -> None:
    """The error names what hides it, the build of torch or the devices that are there."""
    if found:
        cuda(**found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(DeviceUnavailableError, match=message):
        DevicePrefetcher([], device=device)
    with pytest.raises(DeviceUnavailableError, match=message):
        iter(DataLoader(IMAGES, device=device))


@pytest.mark.parametrize(
    "device",
    ["hpu", "cuda:-1", "cuda:x", "gpu", -1, True, b"cuda", 1.5, ["cuda"], torch.device("meta")],
)
def test_other_devices_are_refused(device: Any) -> None:
    """What is no device of a supported kind is shown in an error that lists them, numbers included."""
    message = re.escape(
        "device should be 'cuda', 'cuda:N' or the int N (from 0), 'cpu', 'auto', 'mps' or 'xpu', but got "
    )
    for make in (lambda: DevicePrefetcher([], device=device), lambda: DataLoader(IMAGES, device=device)):
        with pytest.raises(ValueError, match=message + re.escape(repr(device))):
            make()
    with pytest.raises(ValueError, match="but got None"):
        DevicePrefetcher([], device=None)  # type: ignore[arg-type]


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


def test_neither_an_import_nor_a_report_touches_cuda(interpreter: Interpreter) -> None:
    """They neither initialise CUDA nor ask for devices."""
    code = (
        "import torch; torch.backends.cuda.is_built = lambda: True; "
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda.mem_get_info = None; "
        "import fastload.device.prefetch, sys; import fastload.training.report as r; "
        "found = r.memory_report(); found.reset_peak(); "
        "sys.exit(torch.cuda.is_initialized() or found.devices != ())"
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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_moves_and_transforms_each_batch_when_asked(
    moves: list[Any], num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets moved and transformed batches, nothing is moved before, and the log says so."""
    options: dict[str, Any] = {"device": "xpu", "device_transform": lambda batch: (batch[0] + 1, batch[1])}
    with caplog.at_level(logging.WARNING, "fastload"):
        iterator = iter(DataLoader(IMAGES, 4, num_workers=num_workers, **options))
        assert moves == []
        found = [next(iterator)]
        assert [kind for kind, _ in moves] == ["xpu", "xpu"]
        found += list(iterator)
    for (images, labels), (expected, expected_labels) in zip(found, DataLoader(IMAGES, 4), strict=True):
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


def test_a_move_keeps_what_is_no_tensor() -> None:
    """Tensors move, also in nests; other values are the same objects."""
    value = object()
    moved = streamless.StreamlessDevice(torch.device("meta")).move({"a": [torch.ones(2), value], "b": "text"})
    assert moved["a"][0].device.type == "meta"
    assert moved["a"][1] is value
