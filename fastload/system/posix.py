"""Modules of Python that Windows lacks: there each of them is None, and shared memory is not supported."""

from __future__ import annotations

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]
try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]

__all__ = ["fcntl", "resource"]
