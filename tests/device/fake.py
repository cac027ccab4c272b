"""A device without a device: streams are queues whose work runs late, in an order that the test chooses.

Device tensors are CPU tensors over memory that the fake hands out, poisons and uses again as torch's caching
allocator would. Nothing runs when it is asked for. `advance` runs the next piece of work of one stream, and
`synchronize` whatever an event needs, no more. So work on two streams that nothing orders can be made to run
either way round, and memory that came back too early is found in use.

Violations are collected, because much of it is noticed in finalizers, where nothing can be raised:

- a kernel that read a tensor before its copy had run, or after its memory was used again
- memory that was registered twice, or unregistered too early
- pinned memory that died while a copy from it had not run, or a copy from memory that is not pinned
- a device tensor that died while a stream that it was not recorded for still had to read it
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fastload.nested.tree import move_leaf

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST_POISON = 0xA5
DEVICE_POISON = 0x5A


class FakeStream:
    """Work in order: ("copy", ...), ("read", ...), ("record", event) or ("wait", event)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: collections.deque[tuple[Any, ...]] = collections.deque()


class FakeEvent:
    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.is_done = False


class Memory:
    """Host or device memory that outlives the tensors over it; registered memory has an address."""

    def __init__(self, num_bytes: int, address: int | None = None) -> None:
        self.address = address
        self.stream = ""  # under which it was allocated
        self.recorded: set[str] = set()  # other streams, while a tensor has this memory
        mapped = None if address is None else (ctypes.c_ubyte * num_bytes).from_address(address)
        self.bytes: Any = bytearray(num_bytes) if mapped is None else mapped


class FakeBackend:
    """See the module. The consumer's current stream is `current`; set it to move to another."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.violations: list[str] = []
        self.log: list[str] = []
        self.streams: list[FakeStream] = []
        self.current = self._add_stream("main")
        self.num_copies = 0
        self.num_reserved = 0  # pieces of device memory, as torch's reserved bytes: none is given back
        self.num_pinned_copies = 0
        self._pinned: dict[int, Memory] = {}  # by address
        self._blocks: dict[int, Memory] = {}  # of device tensors, by address
        self._free: list[tuple[Memory, list[FakeEvent]]] = []  # free for use once these events are done
        self.refuses = ""  # the reason that register gives
        self.num_refused = 0
        self.num_read_in_place = 0
        self.registered: dict[int, int] = {}  # bytes by address

    # --- what the prefetcher asks for ---

    def make_stream(self) -> FakeStream:
        return self._add_stream(f"side {len(self.streams)}")

    def current_stream(self) -> FakeStream:
        return self.current

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if _address(tensor) in self._pinned or self._is_registered(tensor):
            return tensor
        self.num_pinned_copies += 1
        return self.pinned(tensor)

    def expect_no_capture(self) -> None:
        pass

    def allocate(self, likes: list[torch.Tensor], stream: FakeStream) -> list[torch.Tensor]:
        return [self.allocate_one(like, stream) for like in likes]

    def allocate_one(self, like: torch.Tensor, stream: FakeStream) -> torch.Tensor:
        memory = self._allocate(like.nbytes, stream)
        tensor = _tensor_over(memory, like, lambda: self._free_block(memory))
        self._blocks[_address(tensor)] = memory
        return tensor

    def copy(self, pinned: list[torch.Tensor], targets: list[torch.Tensor], stream: FakeStream) -> None:
        for source, target in zip(pinned, targets, strict=True):
            self.copy_one(source, target, stream)

    def copy_one(self, pinned: torch.Tensor, target: torch.Tensor, stream: FakeStream) -> None:
        source = self._pinned.get(_address(pinned))
        if source is None and self._is_registered(pinned):
            self.num_read_in_place += 1
            source = Memory(pinned.nbytes, pinned.data_ptr())
        if source is None:
            self.violations.append("copy from memory that is not pinned")
            source = Memory(pinned.nbytes)
        self.num_copies += 1
        memory = self._blocks[_address(target)]
        stream.queue.append(("copy", source, memory))
        self.log.append(f"copy on {stream.name}")

    def move(self, value: Any) -> Any:
        self.log.append(f"move on {self.current.name}")
        return move_leaf(value, self.device)

    def record_event(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent(stream)
        stream.queue.append(("record", event))
        self.log.append(f"record on {stream.name}")
        return event

    def wait_event(self, stream: FakeStream, event: FakeEvent) -> None:
        stream.queue.append(("wait", event))
        self.log.append(f"{stream.name} waits for {event.stream.name}")

    def record_stream(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        block = self._blocks.get(_address(tensor))  # what a transform made has none
        if block is not None:
            block.recorded.add(stream.name)
        self.log.append(f"recorded for {stream.name}")

    def is_done(self, event: FakeEvent) -> bool:
        return event.is_done

    def synchronize(self, event: FakeEvent) -> None:
        while not event.is_done:
            self._advance_to(event.stream)

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        while stream.queue:  # a transform computes at once here: what it reads has to be there
            self._advance_to(stream)
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def register(self, address: int, nbytes: int) -> str:
        if self.refuses:
            self.num_refused += 1
            return self.refuses
        if any(old < address + nbytes and address < old + size for old, size in self.registered.items()):
            self.violations.append("memory was registered twice")
        self.registered[address] = nbytes
        self.log.append("register")
        return ""

    def unregister(self, address: int) -> str:
        nbytes = self.registered.pop(address, 0)
        if not nbytes:
            self.violations.append("memory was unregistered that is not registered")
        read = [work[1].address for stream in self.streams for work in stream.queue if work[0] == "copy"]
        if any(start is not None and 0 <= start - address < nbytes for start in read):
            self.violations.append("memory was unregistered before the copy from it had run")
        self.log.append("unregister")
        return ""

    # --- what the test does ---

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """A pinned copy of ``like``, finished on return; its death is watched."""
        memory = Memory(like.nbytes)
        tensor = _tensor_over(memory, like, lambda: self._free_host(memory))
        self._pinned[_address(tensor)] = memory
        tensor.copy_(like)
        return tensor

    def read(self, tensor: torch.Tensor, expected: torch.Tensor) -> None:
        """Launch a kernel on the consumer's stream that reads ``tensor``; checked when it runs."""
        base = tensor.untyped_storage().data_ptr()
        block = self._blocks.get(base)
        if block is None:
            self.violations.append("a kernel was given a tensor that is not on the device")
            return
        start = tensor.data_ptr() - base
        content = expected.contiguous().numpy().tobytes()
        self.current.queue.append(("read", block, start, content))

    def use_stream(self, name: str) -> None:
        """Make the stream of this name the consumer's current one."""
        known = {stream.name: stream for stream in self.streams}
        self.current = known.get(name) or self._add_stream(name)

    def advance(self, stream: FakeStream) -> bool:
        """Run the next piece of ``stream``'s work; False if there is none or it has to wait."""
        if not stream.queue:
            return False
        kind, *rest = stream.queue[0]
        if kind == "wait" and not rest[0].is_done:
            return False
        stream.queue.popleft()
        if kind == "record":
            rest[0].is_done = True
        elif kind == "copy":
            rest[1].bytes[:] = rest[0].bytes
        elif kind == "poison":
            rest[0].bytes[:] = bytes([DEVICE_POISON]) * len(rest[0].bytes)
        elif kind == "read":
            block, start, content = rest
            if bytes(block.bytes[start : start + len(content)]) != content:
                self.violations.append(f"a kernel on {stream.name} did not read what the batch held")
        return True

    def drain(self) -> None:
        """Run everything."""
        while any([self.advance(stream) for stream in self.streams]):  # noqa: C419  # each gets its turn
            pass

    @property
    def num_waiting_copies(self) -> int:
        return sum(work[0] == "copy" for stream in self.streams for work in stream.queue)

    @property
    def num_alive(self) -> tuple[int, int]:
        """How many pieces of pinned memory, and of device memory, tensors have."""
        return len(self._pinned), len(self._blocks)

    def check(self) -> None:
        """Run everything, then fail if anything was used without order."""
        self.drain()
        assert not any(stream.queue for stream in self.streams), "streams wait for each other for ever"
        assert self.violations == []

    # --- memory ---

    def _allocate(self, num_bytes: int, stream: FakeStream) -> Memory:
        found = None
        for number, (memory, events) in enumerate(self._free):
            is_fitting = len(memory.bytes) == num_bytes and memory.stream == stream.name
            if is_fitting and all(event.is_done for event in events):
                del self._free[number]
                memory.recorded.clear()
                found = memory
                break
        if found is None:
            self.num_reserved += 1
            found = Memory(num_bytes)
            found.stream = stream.name
        # In order with what the stream still has to do, a read by the tensor's last user, say.
        stream.queue.append(("poison", found))
        return found

    def _free_block(self, block: Memory) -> None:
        self._blocks = {address: other for address, other in self._blocks.items() if other is not block}
        for stream in self.streams:
            if stream.name in (block.stream, *block.recorded):
                continue
            if any(work[0] == "read" and work[1] is block for work in stream.queue):
                self.violations.append(f"a tensor died that {stream.name} has to read, unrecorded")
            if any(work[0] == "copy" and work[2] is block for work in stream.queue):
                self.violations.append(f"a tensor died that {stream.name} has to write, unrecorded")
        # As torch does it: an event on each recorded stream at the time of death. Work of the stream that it
        # was allocated under is in order with the next use there.
        recorded = [stream for stream in self.streams if stream.name in block.recorded]
        events = [self.record_event(stream) for stream in recorded]
        self._free.append((block, events))

    def _free_host(self, memory: Memory) -> None:
        self._pinned = {key: other for key, other in self._pinned.items() if other is not memory}
        if any(work[0] == "copy" and work[1] is memory for stream in self.streams for work in stream.queue):
            self.violations.append("pinned memory died before the copy from it had run")
        memory.bytes[:] = bytes([HOST_POISON]) * len(memory.bytes)

    # --- the rest ---

    def _add_stream(self, name: str) -> FakeStream:
        stream = FakeStream(name)
        self.streams.append(stream)
        return stream

    def _advance_to(self, stream: FakeStream) -> None:
        """Run one piece of ``stream``'s work, and before it what that waits for."""
        if not self.advance(stream):
            kind, event = stream.queue[0]
            assert kind == "wait"
            self._advance_to(event.stream)

    def _is_registered(self, tensor: torch.Tensor) -> bool:
        start = tensor.data_ptr()
        within = any(0 <= start - address < nbytes for address, nbytes in self.registered.items())
        return within and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensor_over(memory: Memory, like: torch.Tensor, at_death: Any) -> torch.Tensor:
    """A tensor over ``memory``, of the shape of ``like``; ``at_death`` is called with its last view."""
    exporter = (ctypes.c_ubyte * len(memory.bytes)).from_buffer(memory.bytes)
    weakref.finalize(exporter, at_death).atexit = False
    flat = torch.frombuffer(exporter, dtype=like.dtype)
    return torch.as_strided(flat, like.shape, torch.empty_like(like, device="meta").stride())
