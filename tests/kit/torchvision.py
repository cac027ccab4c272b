"""torchvision without its compiled part, which may have been built for CUDA while torch was not."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest


def import_torchvision() -> Any:
    """The module, with its transforms; skips the test where it is not installed."""
    if "torchvision" not in sys.modules:
        name = "torchvision._meta_registrations"  # it asks for operators that were not loaded
        sys.modules[name] = types.ModuleType(name)
    torchvision = pytest.importorskip("torchvision")
    pytest.importorskip("torchvision.transforms.v2")
    return torchvision
