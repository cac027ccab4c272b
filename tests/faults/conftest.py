"""What the tests of faults share with those of survival."""

from __future__ import annotations

from tests.survival.conftest import pretend_accelerator

__all__ = ["pretend_accelerator"]
