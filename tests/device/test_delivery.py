"""A DataLoader with device=: on the CPU, and on the fake device."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.utils.data as tud

from fastload import DataLoader
from fastload.device import pinning
from fastload.epochs import on_device
from fastload.errors import LoaderClosedError
from fastload.transforms import RandomHorizontalFlip
from tests.device.fake import FakeBackend
from tests.kit import datasets

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.device.loaders import Place


WAYS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "worker_type": "thread"},
    {"num_workers": 1, "in_order": False},
]
IMAGES = datasets.Made(datasets.image, 22)
quietly = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")


def numbers(batches: Any) -> list[int]:
    """The first label of each batch."""
    return [int(labels[0]) for _, labels in batches]


def doubled(batch: Any) -> Any:
    images, labels = batch
    return images.float() * 2, labels


# --- what comes out ---------------------------------------------------------------------------------------


@pytest.mark.slow
@quietly
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], WAYS[3]], ids=str)
def test_batches_are_those_of_the_host(place: Place, way: dict[str, Any], pin_memory: bool) -> None:
    """Each epoch in order, on one stream for life; held batches, and views of dropped ones, stay valid."""
    dataset = datasets.Made(datasets.image, 102)
    expected = list(DataLoader(dataset, 4))
    with DataLoader(dataset, 4, device="cuda", pin_memory=pin_memory, **way) as loader:
        assert len(loader) == len(expected) == 26
        for _ in range(2):
            held = []
            for number, (images, labels) in enumerate(loader):
                place.work()
                held.append((images[1:3] if number % 2 else images, labels))
            assert len(held) == len(expected)
            for number, ((images, labels), whole) in enumerate(zip(held, expected, strict=True)):
                assert torch.equal(place.content(images), whole[0][1:3] if number % 2 else whole[0])
                assert torch.equal(place.content(labels), whole[1])
        if place.fake is not None:
            assert [stream.name for stream in place.fake.streams] == ["main", "side 1"]


def test_the_transform_runs_on_the_copy_stream_ahead_of_the_caller(fake: FakeBackend) -> None:
    """Of three batches under way each is transformed behind its copies, and the caller waits for both."""
    at: list[str] = []

    def transform(batch: Any) -> Any:
        at.append(fake.current.name)
        assert not torch.is_grad_enabled()
        return doubled(batch)

    expected = [doubled(batch)[0] for batch in DataLoader(IMAGES, 4)]
    with DataLoader(IMAGES, 4, device="cuda", device_transform=transform) as loader:
        iterator = iter(loader)
        first = next(iterator)
        assert at == ["side 1"] * 3
        assert fake.log.index("main waits for side 1") > fake.log.index("record on side 1")
        assert fake.log[-2:] == ["recorded for main"] * 2
        assert all(torch.equal(a, b[0]) for a, b in zip(expected, [first, *iterator], strict=True))
        del iterator


def test_a_batch_that_moves_late_is_transformed_where_it_is(fake: FakeBackend) -> None:
    """What cannot be copied ahead goes to the caller's stream, and the transform follows it."""
    at: list[str] = []

    def transform(batch: Any) -> Any:
        at.append(fake.current.name)
        return batch.data.sum()

    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    loader = DataLoader([0], 1, collate_fn=lambda _: packed, device=0, device_transform=transform)
    assert [int(total) for total in loader] == [5]
    assert at == ["main"]


def test_what_cannot_be_looked_into_is_not_written_over(fake: FakeBackend) -> None:
    """A copy waits for all that the caller launched before, also where a transform gave an opaque object."""

    def pack(batch: Any) -> Any:
        return torch.nn.utils.rnn.pack_sequence([batch[0].float().flatten()])

    for _ in DataLoader(IMAGES, 4, device="cuda", device_transform=pack):
        fake.log.append("step")
    waits = [place for place, entry in enumerate(fake.log) if entry == "side 1 waits for main"]
    copies = [place for place, entry in enumerate(fake.log) if entry == "copy on side 1"]
    assert len(copies) == 2 * len(waits)  # images and labels
    for wait, first_copy in zip(waits, copies[::2], strict=True):
        assert first_copy == wait + 1


def test_a_transform_needs_a_device_and_must_be_callable() -> None:
    """One that would never be applied is an error."""
    with pytest.raises(ValueError, match="device_transform needs device="):
        DataLoader(IMAGES, device_transform=doubled)
    with pytest.raises(ValueError, match="device_transform should be a callable"):
        DataLoader(IMAGES, device="cpu", device_transform=3)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("device", "way"), [*(("cuda", way) for way in WAYS[:3]), ("cpu", WAYS[1])])
def test_a_closed_loader_ends_its_iterator_at_once(fake: FakeBackend, device: str, way: Any) -> None:
    """What was copied ahead is dropped, batches that are held stay valid, and the loader can go again."""
    transform = None if device == "cuda" and way is WAYS[1] else doubled
    loader = DataLoader(IMAGES, 4, device=device, device_transform=transform, **way)
    iterator = iter(loader)
    images, _ = next(iterator)
    loader.close()
    with pytest.raises(LoaderClosedError):
        next(iterator)
    assert loader.state_dict()["_num_yielded"] == 1
    assert len(list(loader)) == 6
    fake.drain()
    expected = next(iter(DataLoader(IMAGES, 4)))[0]
    assert torch.equal(images, expected if transform is None else expected.float() * 2)
    loader.close()


# --- modes of the caller ---------------------------------------------------------------------------------


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "none": contextlib.nullcontext,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
ahead_or_when_asked = pytest.mark.parametrize("device", ["cuda", "cpu"])


@ahead_or_when_asked
@pytest.mark.parametrize("mode", MODES)
def test_a_transform_runs_in_no_mode_of_the_caller(fake: FakeBackend, device: str, mode: str) -> None:
    """It has neither gradients nor inference mode nor autocast; nor do copies that were begun in them."""
    seen: list[tuple[bool, bool, torch.dtype]] = []

    def transform(batch: Any) -> Any:
        pixels = batch[0].float().reshape(4, -1)
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (pixels @ pixels.T).dtype
        seen.append(modes)
        return batch[0] if device == "cuda" else pixels

    iterator = iter(DataLoader(IMAGES, 4, device=device, device_transform=transform))
    with MODES[mode]():
        first = next(iterator)
    later = list(iterator)
    assert seen == [(False, False, torch.float32)] * 6
    assert not any(batch.is_inference() for batch in [first, *later])


@pytest.mark.parametrize(
    ("text", "is_of_devices"),
    [
        (
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
            True,
        ),
        ("Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same", True),
        ("Expected object of device type cuda but got device type cpu for argument #2", True),
        ("Tensor on device cpu is not on the expected device cuda:0!", True),
        ("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)", True),
        ("Input type (unsigned char) and bias type (float) should be the same", False),
        ("mat1 and mat2 shapes cannot be multiplied (4x3 and 7x7)", False),
        ("CUDA error: device-side assert triggered", False),
    ],
)
def test_an_error_of_devices_is_explained(text: str, is_of_devices: bool) -> None:
    """Only then a note says that a module's own tensors stay where they are."""
    transform = mock.Mock(side_effect=RuntimeError(text))
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(IMAGES, 4, device="cpu", device_transform=transform)))
    (note,) = caught.value.__notes__
    assert note.startswith("raised by device_transform, which gets whole batches on cpu")
    assert ("the loader does not move a module's own tensors there" in note) is is_of_devices


# --- pin_memory=True without a device ---------------------------------------------------------------------


@pytest.fixture
def pinned_in(pretend_accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that there is an accelerator: "pinning" copies, and notes the thread that did it."""
    threads: list[str] = []

    def pin(batch: Any, device: str | None = None) -> Any:
        threads.append(threading.current_thread().name)
        if 13 in batch[1].tolist():
            raise ValueError("cannot pin 13")
        return [part.clone() for part in batch]

    pretend_accelerator()
    monkeypatch.setattr(pinning, "pin_memory", pin)
    return threads


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_come_pinned_in_order_from_a_thread(pinned_in: list[str], persistent: bool) -> None:
    """Two epochs, the first of them left early; an error of pinning is raised at its batch, as in torch."""
    with DataLoader(IMAGES, 2, num_workers=2, persistent_workers=persistent) as loader:
        for _ in loader:
            break
        iterator = iter(loader)
        seen = numbers([next(iterator) for _ in range(6)])
        with pytest.raises(ValueError, match="in pin memory thread for device"):
            next(iterator)
        assert seen + numbers(iterator) == [0, 2, 4, 6, 8, 10, 14, 16, 18, 20]
        del iterator
    assert set(pinned_in) == {"fastload-pin"}


def test_an_accelerator_that_refuses_the_thread_is_an_error(
    pinned_in: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer gets the error at the first batch, and does not wait forever."""

    def refuse(index: int) -> None:
        raise RuntimeError(f"CUDA error: out of memory on {index}")

    monkeypatch.setattr(pinning, "accelerator_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", refuse)
    with DataLoader(IMAGES, 4, num_workers=1, timeout=60) as loader:
        iterator = iter(loader)
        with pytest.raises(RuntimeError, match=r"(?s)in pin memory thread for device 0.*out of memory on 0"):
            next(iterator)


@quietly
@pytest.mark.parametrize(
    ("options", "thread"),
    [({}, "MainThread"), ({"num_workers": 1, "worker_type": "thread"}, "fastload-worker-0")],
)
def test_where_batches_are_pinned(pinned_in: list[str], options: Any, thread: str) -> None:
    """Without worker processes there is no thread for it, as in torch; worker threads do it themselves."""
    with DataLoader(datasets.Made(datasets.image, 4), 2, pin_memory=True, **options) as loader:
        assert len(list(loader)) == 2
    assert pinned_in == [thread] * 2


@quietly
@pytest.mark.parametrize("pin_memory", [False, True])
def test_worker_threads_pin_for_the_device(
    fake: FakeBackend, monkeypatch: pytest.MonkeyPatch, pin_memory: bool
) -> None:
    """With or without pin_memory=True, the consumer's thread copies none of their batches on the host."""
    threads, pinned = [], fake.pinned

    def noted(like: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return pinned(like)

    monkeypatch.setattr(fake, "pinned", noted)
    options: dict[str, Any] = {"num_workers": 1, "worker_type": "thread", "pin_memory": pin_memory}
    with DataLoader(datasets.Made(datasets.image, 4), 2, device="cuda", **options) as loader:
        assert len(list(loader)) == 2
    assert threads == ["fastload-worker-0"] * 4  # images and labels


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_without_an_accelerator_torch_says_that_nothing_is_pinned(num_workers: int) -> None:
    """Torch's own warning, which torch 2.6 lacks; the batches come all the same."""
    said = []
    for kind in (tud.DataLoader, DataLoader):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert len(list(kind(IMAGES, 4, num_workers=num_workers, pin_memory=True))) == 6
        said.append([str(warning.message) for warning in caught if warning.category is UserWarning])
    assert said[0] == said[1]
    assert all("no accelerator is found" in message for message in said[1])


def test_a_batch_that_is_tried_again_has_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transform that found no memory the first time draws what it would have drawn then."""

    class Fails(RandomHorizontalFlip):
        failures = 0

        def forward(self, batch: Any) -> Any:
            found = super().forward(batch)
            if int(batch[1][0]) == 8 and self.failures < 2:
                self.failures += 1
                raise torch.OutOfMemoryError("no room")
            return found

    def run(transform: Any) -> list[Any]:
        backend = FakeBackend()
        monkeypatch.setattr(on_device, "choose_backend", lambda device, _: backend)
        loader = DataLoader(IMAGES, 4, seeding="sample", device="cuda", device_transform=transform)
        found, iterator = [], iter(loader)
        while len(found) < 6:
            with contextlib.suppress(torch.OutOfMemoryError):
                found.append(next(iterator)[0].clone())
        return found

    failing = Fails()
    assert all(map(torch.equal, run(failing), run(RandomHorizontalFlip())))
    assert failing.failures == 2


class Fails:
    """A batch sampler whose iter() fails from some moment on."""

    has_failed = False

    def __iter__(self) -> Any:
        if self.has_failed:
            raise OSError("the list of indices is gone")
        return iter([[4 * number + place for place in range(4)] for number in range(6)])


@pytest.mark.slow
def test_an_epoch_that_cannot_begin_leaves_the_old_one_as_it_is(fake: FakeBackend) -> None:
    """It goes on, on the device, with the batches that were copied ahead."""
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "device": "cuda"}
    sampler: Any = Fails()
    with DataLoader(IMAGES, batch_sampler=sampler, **options) as loader:
        iterator = iter(loader)
        before = [next(iterator), next(iterator)]
        sampler.has_failed = True
        with pytest.raises(OSError, match="is gone"):
            iter(loader)
        after = list(iterator)
        fake.drain()
        assert numbers(before + after) == [0, 4, 8, 12, 16, 20]
        assert all(images.untyped_storage().data_ptr() in fake._blocks for images, _ in after)
        del before, after


def test_threads_can_share_an_iterator(fake: FakeBackend) -> None:
    """Each batch goes to one of them."""
    found: list[Any] = []
    iterator = iter(DataLoader(IMAGES, 1, device="cuda"))

    def take(batches: Any) -> None:
        for batch in batches:
            found.append(batch)  # noqa: PERF402  # while another thread does

    threads = [threading.Thread(target=take, args=(iterator,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fake.drain()
    assert sorted(numbers(found)) == list(range(len(IMAGES)))
    found.clear()
    del iterator
