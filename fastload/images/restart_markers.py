"""Cuts a JPEG at its restart markers: a smaller JPEG that shows a region with the same pixels.

The MCUs (the smallest units of a scan) between two restart markers are a restart interval, which can be
decoded without the ones before it. A header with different sides, the intervals that a region touches and
renumbered markers are again an ordinary JPEG, which any decoder reads. Rules:

1. A margin of two pixels lies around the region, because colors are interpolated between neighbors; and
   eight columns are kept at least, because libjpeg-turbo does not interpolate in pictures of four columns.
2. A file is cut only if its markers are those that its header promises: as many, in order, and nothing else.
   Corrupt data between two markers then changes the same pixels as in the whole picture.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastload.images.jpeg import END, markers, parse_jpeg

if TYPE_CHECKING:
    from fastload.images.geometry import Box
    from fastload.images.jpeg import Content, JpegHeader

_MARGIN, _MIN_WIDTH = 2, 8  # pixels
_COMMENT_KIND = 0xFE
_RESTART_KIND, _NUM_RESTART_KINDS = 0xD0, 8
_SIDES = struct.Struct(">HH")
# How many MCUs lie between two markers that we write: the first of these that divides a row. Fewer let a crop
# skip more; each marker takes about three bytes, 1.3% of a file at 4 and 5% at 1.
_WRITTEN_INTERVALS = (4, 5, 3, 2, 7, 1)


class JpegCrop(NamedTuple):
    """A part of a JPEG as a JPEG.

    Attributes:
        content: A whole JPEG, without EXIF.
        header: Its header.
        x: Its first column in the original picture.
        y: Its first row there.
    """

    content: bytearray
    header: JpegHeader
    x: int
    y: int

    def box_of(self, box: Box) -> Box:
        """A box of the original picture, in this one."""
        x_min, y_min, x_max, y_max = box
        return x_min - self.x, y_min - self.y, x_max - self.x, y_max - self.y


def choose_interval(columns: int) -> int:
    """The number of MCUs between two restart markers of a JPEG to write, in rows of this many MCUs."""
    return next(number for number in _WRITTEN_INTERVALS if columns % number == 0)


def crop_jpeg(data: Content, box: Box) -> JpegCrop | None:
    """The restart intervals that a region of a JPEG needs, as a JPEG.

    Args:
        data: The content of the file.
        box: `(x_min, y_min, x_max, y_max)` in the stored picture.

    Returns:
        None if the file cannot be cut, or the region needs all of it.
    """
    header = parse_jpeg(data)
    if header is None or not header.restart_interval or not header.is_one_scan:
        return None
    x_min, x_max = min(box[0] - _MARGIN, header.width - _MIN_WIDTH), max(box[2] + _MARGIN, _MIN_WIDTH)
    y_min, y_max = box[1] - _MARGIN, box[3] + _MARGIN
    interval = header.restart_interval
    mcu_width, mcu_height = header.mcu_sides
    columns, rows = header.num_mcus
    # Where each row begins with a marker, it can be cut between any two; otherwise whole rows are cut, at
    # those that begin with one.
    is_aligned = columns % interval == 0
    left, right = _span(x_min, x_max, mcu_width, columns, interval if is_aligned else columns)
    step = interval // math.gcd(interval, columns)
    top, bottom = _span(y_min, y_max, mcu_height, rows, step)
    if (bottom - top) * (right - left) == rows * columns:
        return None

    num_intervals = -(-rows * columns // interval)
    places, kinds = markers(data, header)
    expected = _RESTART_KIND + np.arange(num_intervals, dtype=np.uint8) % _NUM_RESTART_KINDS
    expected[-1] = END[1]
    if not np.array_equal(kinds[:num_intervals], expected):
        return None
    ends = places[:num_intervals] + header.scan_at
    # One row of `intervals` lies together in the file: intervals of a row of MCUs, or of several whole rows.
    per_line = columns * step // interval
    first, last = (left // interval, right // interval) if is_aligned else (0, per_line)
    lines = np.arange(top // step, -(-bottom // step))[:, None] * per_line
    intervals = lines + np.arange(first, last)
    starts = np.append(header.scan_at, ends + 2)[intervals[:, 0]]
    line_ends = ends[np.minimum(intervals[:, -1], num_intervals - 1)] + 2
    offsets = header.scan_at + np.append(0, np.cumsum(line_ends - starts)[:-1])
    marker_offsets = (ends.take(intervals, mode="clip") - starts[:, None] + offsets[:, None])[
        intervals < num_intervals
    ]

    view = memoryview(data)
    content = bytearray(view[: header.scan_at])
    for start, end in zip(starts.tolist(), line_ends.tolist(), strict=True):
        content += view[start:end]
    x, y = left * mcu_width, top * mcu_height
    height = min(header.height, bottom * mcu_height) - y
    width = min(header.width, right * mcu_width) - x
    _SIDES.pack_into(content, header.frame_at + 5, height, width)
    for at in header.tags_at:
        content[at + 1] = _COMMENT_KIND
    new_kinds = np.frombuffer(content, np.uint8)
    new_kinds[marker_offsets + 1] = _RESTART_KIND + np.arange(len(marker_offsets)) % _NUM_RESTART_KINDS
    new_kinds[-1] = END[1]
    return JpegCrop(content, header._replace(height=height, width=width), x, y)


def _span(start: int, stop: int, mcu: int, num_mcus: int, step: int) -> tuple[int, int]:
    """The first and last MCU (exclusive) of an axis that hold these pixels."""
    first, last = start // mcu, -(-stop // mcu)
    return max(0, first) // step * step, min(num_mcus, -(-last // step) * step)
