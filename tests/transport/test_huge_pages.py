"""Huge pages: which blocks of memory become one, that memory does not grow, and what a refusal does."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import fastload
from fastload.memory.segment import _MADV_COLLAPSE, HUGE_PAGE_BYTES, PAGE_BYTES, Segment, populate
from fastload.system import linux
from fastload.training import machine_report

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_BLOCKS = 4
PAGES = HUGE_PAGE_BYTES // PAGE_BYTES


class Advised:
    """A mapping that only notes what is asked of the kernel."""

    def __init__(self, nbytes: int = 0, *refusals: int) -> None:
        self.nbytes = nbytes
        self.calls: list[tuple[int, int, int]] = []
        self.refusals = list(refusals)

    def __len__(self) -> int:
        return self.nbytes

    def madvise(self, *call: int) -> None:
        self.calls.append(call)  # type: ignore[arg-type]
        if self.refusals and (number := self.refusals.pop(0)):
            raise OSError(number, os.strerror(number))


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The system's file, as it is when huge pages are enabled for shared memory."""
    path = tmp_path / "shmem_enabled"
    path.write_text("always within_size [advise] never deny force\n")
    monkeypatch.setattr(linux, "SHARED_HUGE_PAGES", path)
    return path


@pytest.fixture
def segment() -> Iterator[Segment]:
    """A sparse segment of some blocks, and a part of one."""
    with contextlib.closing(Segment.create(NUM_BLOCKS * HUGE_PAGE_BYTES + 3 * PAGE_BYTES)) as one:
        yield one


def blocks(mapping: Any) -> list[int]:
    """The blocks that the kernel was asked to make huge pages of, in this order."""
    assert all(call[::2] == (_MADV_COLLAPSE, HUGE_PAGE_BYTES) for call in mapping.calls)
    return [start // HUGE_PAGE_BYTES for _, start, _ in mapping.calls]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("always within_size advise [never] deny force", False),
        ("always within_size advise never [deny] force", False),
        ("always within_size [advise] never deny force", True),
        ("always [within_size] advise never deny force", True),
        (None, None),
    ],
)
def test_the_setting_is_read_as_the_kernel_writes_it(setting: Path, text: str | None, answer: Any) -> None:
    """And `doctor` says so, with the line that enables huge pages where they are off."""
    setting.write_text(text) if text else setting.unlink()
    assert linux.has_shared_huge_pages() is answer
    said = machine_report.machine_report()[0]["huge_pages"]
    assert said == {None: "", True: "on"}.get(answer, said)
    assert said.endswith(f": echo advise | sudo tee {setting}") is (answer is False)


@pytest.mark.parametrize("order", ["in order", "shuffled"])
def test_a_block_becomes_a_huge_page_when_its_last_hole_is_filled(
    setting: Path, segment: Segment, order: str
) -> None:
    """Once, in whatever order rows are written; never the part of a block at the end of the segment."""
    mapping: Any = Advised()
    segment.collapse_into(mapping)
    row_bytes = 3 * PAGE_BYTES - 100  # crosses the bounds of pages and blocks
    rows = list(range(segment.nbytes // row_bytes))
    if order == "shuffled":
        random.Random(0).shuffle(rows)
    filled = np.zeros(segment.nbytes // PAGE_BYTES + 1, bool)
    due = []
    for row in rows:
        start = row * row_bytes
        segment.write(bytes(row_bytes), start)
        filled[start // PAGE_BYTES : -(-(start + row_bytes) // PAGE_BYTES)] = True
        full = [block for block in range(NUM_BLOCKS) if filled[block * PAGES :][:PAGES].all()]
        due += [block for block in full if block not in due]
        assert list(dict.fromkeys(blocks(mapping))) == due
    assert sorted(due) == list(range(NUM_BLOCKS))


def test_one_write_can_fill_several_blocks(setting: Path, segment: Segment) -> None:
    """A large value asks for each block that it fills, and for no block that it begins or ends in."""
    mapping: Any = Advised()
    segment.collapse_into(mapping)
    segment.write(bytes(3 * HUGE_PAGE_BYTES), PAGE_BYTES)
    assert blocks(mapping) == [1, 2]


@pytest.mark.parametrize("refusal", [errno.ENOMEM, errno.EINVAL, errno.EBUSY])
def test_a_refusal_is_the_last_question(setting: Path, segment: Segment, refusal: int) -> None:
    """Without a free huge page, or on an old kernel, each write would ask in vain; the data is written."""
    mapping: Any = Advised(0, refusal)
    segment.collapse_into(mapping)
    for block in range(NUM_BLOCKS):
        segment.write(b"x" * HUGE_PAGE_BYTES, block * HUGE_PAGE_BYTES)
    assert blocks(mapping) == [0]
    assert os.pread(segment.fd, 1, NUM_BLOCKS * HUGE_PAGE_BYTES - 1) == b"x"


def test_a_block_that_is_in_use_is_left_alone(setting: Path, segment: Segment) -> None:
    """EAGAIN is about one block."""
    mapping: Any = Advised(0, errno.EAGAIN)
    segment.collapse_into(mapping)
    for block in range(NUM_BLOCKS):
        segment.write(bytes(HUGE_PAGE_BYTES), block * HUGE_PAGE_BYTES)
    assert blocks(mapping) == list(range(NUM_BLOCKS))


def test_nothing_is_asked_where_huge_pages_are_off(setting: Path, segment: Segment) -> None:
    """The administrator decides."""
    setting.write_text("always within_size advise [never] deny force\n")
    mapping: Any = Advised(HUGE_PAGE_BYTES)
    segment.collapse_into(mapping)
    segment.write(bytes(HUGE_PAGE_BYTES))
    assert mapping.calls == []
    populate(mapping)
    assert mmap.MADV_HUGEPAGE not in [call[0] for call in mapping.calls]


@pytest.mark.parametrize("nbytes", [HUGE_PAGE_BYTES - PAGE_BYTES, 3 * HUGE_PAGE_BYTES])
def test_batch_buffers_are_advised_before_their_pages_are_allocated(setting: Path, nbytes: int) -> None:
    """All of their pages are allocated at once, so huge pages take no more memory."""
    mapping: Any = Advised(nbytes)
    populate(mapping)
    advised = [call for call in mapping.calls if call[0] == mmap.MADV_HUGEPAGE]
    assert advised == [(mmap.MADV_HUGEPAGE, 0, nbytes)] * (nbytes >= HUGE_PAGE_BYTES)
    assert mapping.calls[-1][1:] == (0, nbytes)


class Rows:
    """Images of 48 KiB that say their number."""

    def __len__(self) -> int:
        return 150

    def __getitem__(self, index: int) -> Any:
        return np.full((128, 128, 3), index, np.uint8)


def test_a_cache_takes_as_much_memory_with_huge_pages(setting: Path) -> None:
    """Half full and full, filled in any order; its samples are right."""
    used, order = {}, random.Random(0).sample(range(150), 150)
    for state in ("[never]", "[advise]"):
        setting.write_text(state)
        dataset = fastload.CachedDataset(Rows(), cache="ram")
        used[state] = []
        for part in (order[:75], order[75:], order):
            assert all((dataset[index] == index).all() for index in part)
            used[state].append(dataset.cache_info().nbytes)
        dataset.cache.close()
    assert used["[advise]"] == used["[never]"]


@pytest.mark.parametrize(("sizes", "num_asked"), [((8, 8), 1), ((8, 9), 0)])
def test_samples_of_one_shape_get_huge_pages(
    sizes: tuple[int, int], num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are gathered from these; samples of several shapes are read one by one."""
    asked: list[Segment] = []
    monkeypatch.setattr(Segment, "collapse_into", lambda segment, _: asked.append(segment))
    dataset = fastload.CachedDataset([np.zeros((size, 8), np.uint8) for size in sizes], cache="ram")
    dataset.cache.close()
    assert len(asked) == num_asked
