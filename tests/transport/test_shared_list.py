"""SharedList: a sequence like a list, whose memory all processes share and the last one frees."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import multiprocessing
import os
import pickle
import re
import resource
import weakref
from array import array
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

import fastload
from fastload import SharedList
from fastload.errors import SharedMemoryError
from fastload.memory import shared_list
from fastload.memory.segment import Segment
from tests.kit import datasets
from tests.kit.faults import limited

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDS = [{"path": f"train/{number}.jpg", "label": number % 7} for number in range(100)]
METHODS = ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.thorough)]

leaves = st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
nests = st.recursive(
    leaves, lambda part: st.lists(part) | st.tuples(part) | st.dictionaries(st.text(), part), max_leaves=4
)
bounds = st.none() | st.integers(-12, 12)
slices = st.builds(slice, bounds, bounds, bounds.filter(lambda step: step != 0))


def inode_of(shared: Any) -> int:
    """The segment of a list."""
    return os.fstat(shared._records._memory.fd).st_ino


def count_maps(inode: int) -> int:
    """How often this process maps a segment."""
    with open("/proc/self/maps") as maps:
        return len(re.findall(rf" {inode} +/memfd:fastload-list", maps.read()))


@pytest.mark.slow
@given(st.lists(nests, max_size=6))
def test_it_holds_what_a_list_holds(items: list[Any]) -> None:
    """Length, items by position from both ends, order both ways, `in`, `index` and `count`."""
    shared = SharedList(items)

    assert len(shared) == len(items)
    assert list(shared) == items
    assert list(reversed(shared)) == items[::-1]
    assert [shared[i] for i in range(-len(items), len(items))] == items * 2
    for item in items:
        assert item in shared
        assert shared.index(item) == items.index(item)
        assert shared.count(item) == items.count(item)
    for index in (len(items), -len(items) - 1):
        with pytest.raises(IndexError, match=rf"index {index} is out of range for {len(items)} items"):
            shared[index]


@pytest.mark.slow
@given(st.lists(st.integers(), max_size=12), slices, slices)
def test_slices_are_those_of_a_list(items: list[int], one: slice, other: slice) -> None:
    """Slices of slices, too; each is a SharedList."""
    part = SharedList(items)[one]

    assert isinstance(part, SharedList)
    assert isinstance(part, Sequence)
    assert list(part) == items[one]
    assert list(part[other]) == items[one][other]
    assert list(pickle.loads(pickle.dumps(part))) == items[one]


def test_positions_are_integers_of_any_kind_and_nothing_is_written() -> None:
    """Samplers give NumPy's and torch's. What is changed in a returned item stays there."""
    shared: Any = SharedList([{"boxes": [1]}, 2])
    for index in ("a", 1.0, None, [1]):
        with pytest.raises(TypeError, match="must be integers or slices"):
            shared[index]
    with pytest.raises(TypeError, match="'SharedList' object does not support item assignment"):
        shared[0] = 1
    with pytest.raises(TypeError, match="'SharedList' object doesn't support item deletion"):
        del shared[0]
    shared[0]["boxes"].append(2)

    assert shared[np.int64(0)] == shared[torch.tensor(0)] == {"boxes": [1]}


@pytest.mark.parametrize("size", [shared_list._CHUNK_BYTES - 1, 3 * shared_list._CHUNK_BYTES + 1])
def test_large_and_small_records_follow_each_other(size: int) -> None:
    """What is written at once ends anywhere."""
    items = [b"", os.urandom(size), None, os.urandom(size), "", np.arange(size // 8)]
    shared = SharedList(items)

    assert list(shared[:5]) == items[:5]
    assert np.array_equal(shared[5], items[5])
    assert shared.nbytes > 3 * size
    assert repr(shared).startswith("<SharedList of 6 items in ")


def test_records_may_lie_beyond_4_gib() -> None:
    """Offsets have 64 bits; this memory is sparse."""
    at, record = 5 << 30, pickle.dumps("far")
    memory = Segment.create(0, name="fastload-list")
    numbers = array("q", [at, at + len(record), 1])
    memory.write(record + numbers.tobytes(), at)
    memory.nbytes = at + len(record) + len(numbers) * numbers.itemsize

    assert shared_list._Records(memory).read(0) == "far"


def test_items_are_read_one_at_a_time() -> None:
    """A million records need not be in memory together."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def read() -> Iterator[Any]:
        for number in range(50):
            box = datasets.Box(number)
            alive.add(box)
            yield box
            assert len(alive) <= 2

    assert [box.content for box in SharedList(read())] == list(range(50))


def test_an_item_that_cannot_be_pickled_is_named() -> None:
    """Its position, what it is, and pickle's reason."""
    told = r"item 1,234 cannot be pickled \(\w+: .*lambda.*\): \{'f': <function"
    with pytest.raises(TypeError, match=told):
        SharedList([None] * 1234 + [{"f": lambda: None}])


def test_errors_of_the_iterable_and_of_memory() -> None:
    """An OSError of the iterable is its own, and no refusal of memory, which names the limit."""

    def read() -> Iterator[bytes]:
        yield b"x" * (2 << 20)
        raise FileNotFoundError(errno.ENOENT, "labels.json")

    with pytest.raises(FileNotFoundError, match=r"labels\.json"):
        SharedList(read())
    told = r"cannot grow a SharedList beyond 2,[\d,]+ bytes: .*RLIMIT_FSIZE is 3,145,728"
    with limited(resource.RLIMIT_FSIZE, 3 << 20), pytest.raises(SharedMemoryError, match=told):
        SharedList(b"x" * (1 << 20) for _ in range(9))


class Records(torch.utils.data.Dataset[Any]):
    """Labels from two slices of one list, its segment, and how often the process maps it."""

    def __init__(self) -> None:
        self.train = SharedList(RECORDS)[20:]
        self.reverse = self.train[::-1]

    def __len__(self) -> int:
        return len(self.train)

    def __getitem__(self, index: int) -> Any:
        inode = inode_of(self.train)
        return self.train[index]["label"], self.reverse[index]["label"], inode, count_maps(inode)


@pytest.mark.slow
@pytest.mark.parametrize("start_method", METHODS)
@pytest.mark.parametrize("loader", [torch.utils.data.DataLoader, fastload.DataLoader])
def test_workers_map_the_memory_of_the_parent(loader: Any, start_method: str) -> None:
    """A list and its slices are one mapping in each worker, of one inode, with either loader."""
    dataset = Records()
    labels = [record["label"] for record in RECORDS[20:]]

    (batch,) = loader(dataset, 80, num_workers=1, multiprocessing_context=start_method)

    assert batch[0].tolist() == labels
    assert batch[1].tolist() == labels[::-1]
    assert set(batch[2].tolist()) == {inode_of(dataset.train)}
    assert set(batch[3].tolist()) == {1}


def answer(pipe: Any) -> None:
    """Read each list that comes in pickled, until nothing does."""
    while (handle := pipe.recv()) is not None:
        try:
            shared = pickle.loads(handle)
            pipe.send((list(shared), inode_of(shared)))
        except SharedMemoryError as error:
            pipe.send(str(error))


def saved_by_torch(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def read_after(shared: Any, pipe: Any) -> None:
    """Read the list when the parent has let it go."""
    pipe.recv()
    pipe.send((list(shared), inode_of(shared)))


@contextlib.contextmanager
def process(start_method: str, work: Any, *args: Any) -> Iterator[Any]:
    """The pipe to a process."""
    context = multiprocessing.get_context(start_method)
    pipe, other = context.Pipe()
    process: Any = context.Process(target=work, args=(*args, other))  # type: ignore[attr-defined]
    process.start()  # and lets its arguments go
    del args
    with pipe, other:
        yield pipe
    process.join()
    process.close()


def test_multiprocessing_sends_a_handle_while_the_list_lives() -> None:
    """A process that runs already attaches through /proc; later the handle is an error that says why."""
    with process("fork", answer) as pipe:
        shared = SharedList(RECORDS)
        handle, inode = ForkingPickler.dumps(shared).tobytes(), inode_of(shared)
        pipe.send(handle)
        first = pipe.recv()
        del shared
        pipe.send(handle)
        later = pipe.recv()
        pipe.send(None)

    assert len(handle) < 500
    assert first == (RECORDS, inode)
    assert re.search("cannot attach the shared segment|no longer the segment", later)


@pytest.mark.parametrize("dumps", [pickle.dumps, saved_by_torch], ids=["pickle", "torch"])
def test_any_other_pickle_holds_the_records(dumps: Any) -> None:
    """It can be loaded when the list is gone; slices of one list share the new memory, which is shared."""
    shared = SharedList(RECORDS)
    text = dumps({"epoch": 3, "train": shared[20:], "reverse": shared[::-1], "other": SharedList([])})
    del shared
    loaded = (
        torch.load(io.BytesIO(text), weights_only=False) if dumps is saved_by_torch else pickle.loads(text)
    )
    again = pickle.loads(pickle.dumps(loaded["train"]))

    assert list(loaded["train"]) == list(again) == RECORDS[20:]
    assert list(loaded["reverse"]) == RECORDS[::-1]
    assert list(loaded["other"]) == []
    assert inode_of(loaded["train"]) == inode_of(loaded["reverse"])
    assert len(ForkingPickler.dumps(loaded["train"])) < 500


@pytest.mark.parametrize("start_method", METHODS)
def test_a_process_keeps_the_memory_that_its_parent_gives_up(start_method: str) -> None:
    """The last holder frees it, whichever that is."""
    lists = [SharedList(RECORDS)]
    inode = inode_of(lists[0])
    with process(start_method, read_after, lists.pop()) as pipe:
        kept = count_maps(inode)
        pipe.send(None)
        found = pipe.recv()

    assert kept == 0
    assert found == (RECORDS, inode)


def test_the_last_slice_frees_the_memory() -> None:
    """Mapping and descriptor go with it, without a collection of garbage; items hold nothing."""
    shared = SharedList(RECORDS)
    part, item, inode = shared[5:][::2], shared[5], inode_of(shared)
    fd = part._records._memory.fd  # type: ignore[union-attr]
    del shared
    first, still = part[0], count_maps(inode)
    del part

    assert still == 1
    assert first == item == RECORDS[5]
    assert count_maps(inode) == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_copies_share_the_memory() -> None:
    """Copies of a dataset, such as those that training frameworks make, cost nothing."""
    shared = SharedList(RECORDS)
    for one in (copy.copy(shared), copy.deepcopy({"dataset": shared})["dataset"]):
        assert list(one) == RECORDS
        assert count_maps(inode_of(shared)) == 1


def test_without_shared_memory_there_is_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the system's reason, and what to use."""
    monkeypatch.setattr(shared_list, "why_unsupported", lambda: "this system denies it")
    with pytest.raises(SharedMemoryError, match="but this system denies it: use a list instead"):
        SharedList(RECORDS)
