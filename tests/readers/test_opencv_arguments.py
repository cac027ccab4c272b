"""cv2.imread and cv2.imdecode with odd arguments: what they return or raise, they do under a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest

from fastload.readers import patches
from fastload.readers.decode_cache import UNUSUAL, DecodeCache
from fastload.system.cache_counts import cache_counts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.kit.decoding import DictStore

PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


@pytest.fixture
def damaged(tmp_path: Path) -> str:
    """A PNG that ends in its middle: `imread` returns None, or the `dst` that it was given."""
    path = tmp_path / "damaged.png"
    path.write_bytes(cv2.imencode(".png", PIXELS)[1].tobytes()[:40])
    return str(path)


def outcome(call: Callable[[], Any]) -> Any:
    """A result or error, to compare."""
    try:
        result = call()
    except cv2.error as error:
        return str(error)
    return result if result is None else (result.dtype, result.tolist())


@pytest.mark.parametrize("value", [True, 1.0])
def test_values_that_are_no_flags_are_not_remembered_as_flags(
    value: Any, damaged: str, settled: None, store: DictStore
) -> None:
    """`imread(path, True)` has a `dst`; `imread(path, flags=True)` after it raises OpenCV's error."""
    calls: list[Callable[[], Any]] = [
        lambda: cv2.imread(damaged, value),
        lambda: cv2.imread(filename=damaged, flags=value),
        lambda: cv2.imread(filename=damaged, flags=1),
    ]
    expected = [outcome(call) for call in calls]
    assert expected[0] != expected[1]
    # A hit that is decoded again would raise the error.
    patches.meet()
    with DecodeCache(store, verify_share=0).active():
        for _ in range(3):
            assert [outcome(call) for call in calls] == expected


def test_opencv_without_optimizations_has_pixels_of_its_own(
    tmp_path: Path, cache: DecodeCache, store: DictStore
) -> None:
    """Floats differ in the last bit, so what one implementation decoded is not served for the other."""
    path = str(tmp_path / "sky.hdr")
    rng = np.random.default_rng(0)
    cv2.imwrite(path, rng.random((37, 53, 3), np.float32))
    try:
        for _ in range(2):
            for is_optimized in True, False:
                cv2.setUseOptimized(is_optimized)
                cv2.imread(path, cv2.IMREAD_ANYDEPTH)
    finally:
        cv2.setUseOptimized(True)
    assert len(store.values) == 2


@pytest.mark.parametrize("flags", [True, 1.0, "1", None, np.int64(1)])
def test_a_buffer_with_odd_flags_is_not_remembered(flags: Any, cache: DecodeCache, store: DictStore) -> None:
    """Whatever OpenCV says to such flags, it says each time."""
    buffer = cv2.imencode(".png", PIXELS)[1]
    results = [outcome(lambda: cv2.imdecode(buffer, flags)) for _ in range(3)]
    assert results[0] == results[1] == results[2]
    assert not store.values


@pytest.mark.parametrize("options", [{"flags": np.int64(1)}, {"dst": None, "flags": 1}], ids=["flags", "dst"])
def test_a_call_with_odd_arguments_is_counted(options: Any, damaged: str, cache: DecodeCache) -> None:
    """A report says that such calls are not remembered, rather than that nothing was decoded."""
    cache_counts.take_reasons()
    cv2.imread(damaged, **options)
    cv2.imdecode(cv2.imencode(".png", PIXELS)[1], np.int64(1))
    assert cache_counts.take_reasons() == {UNUSUAL: 2}
