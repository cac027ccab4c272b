"""Where the ends of pipelines take a shorter way: where samples are read, with and without a cache."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from fastload.readers import patches
from fastload.readers.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable

_V1, _V2 = "torchvision.transforms", "torchvision.transforms.v2"
_ENDS = {_V1: f"{__name__}:patches_of_v1", _V2: f"{__name__}:patches_of_v2"}


class _Fetches(threading.local):
    """Those that the current thread is in, one within another; used as a block around each."""

    number = 0

    def __enter__(self) -> None:
        patches.meet(_ENDS)
        self.number += 1

    def __exit__(self, *exc_info: object) -> None:
        self.number -= 1


_fetches = _Fetches()


def met() -> _Fetches | None:
    """Meet the ends during a fetch, as a block; None: there are none, because torchvision is not imported."""
    return _fetches if _V1 in sys.modules else None


def patches_of_v1() -> list[Patch]:
    """What is replaced in torchvision.transforms."""
    return [Patch(sys.modules[_V1].Compose, "__call__", _composing, _is_fetching)] * _is_on()


def patches_of_v2() -> list[Patch]:
    """What is replaced in torchvision.transforms.v2."""
    return [Patch(sys.modules[_V2].Compose, "forward", _composing, _is_fetching)] * _is_on()


def _is_on() -> bool:
    return os.environ.get("FASTLOAD_FUSE") != "off"


def _is_fetching(_: Any) -> bool:
    return _fetches.number > 0


def _composing(real: Callable[..., Any]) -> Callable[..., Any]:
    from fastload.augmentation.torchvision_end import composed

    def call(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if kwargs or not self.transforms or len(inputs) != 1:
            return real(self, *inputs, **kwargs)
        return composed(self.transforms, inputs[0])

    return call
