"""torchvision without its compiled part, which may have been built for CUDA while torch was not."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest


def without_operators() -> None:
    """Let torchvision be imported without them: a module of it asks for operators that were not loaded."""
    name = "torchvision._meta_registrations"
    if "torchvision" not in sys.modules:
        sys.modules[name] = types.ModuleType(name)


def import_torchvision() -> Any:
    """The module, with its transforms; skips the test where it is not installed."""
    without_operators()
    torchvision = pytest.importorskip("torchvision")
    pytest.importorskip("torchvision.transforms.v2")
    return torchvision
