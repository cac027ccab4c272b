"""Loaders that fall back to torch's own iterator: fastload knows nothing of their multiprocessing context."""

from __future__ import annotations

import multiprocessing
from typing import Any

_Fork: Any = type(multiprocessing.get_context("fork"))
_Spawn: Any = type(multiprocessing.get_context("spawn"))


class OwnFork(_Fork):  # type: ignore[misc]  # typeshed has no class for it on all systems
    """A library's context that forks."""

    def __repr__(self) -> str:
        return "OwnFork"


class OwnSpawn(_Spawn):  # type: ignore[misc]
    """A library's context that spawns."""

    def __repr__(self) -> str:
        return "OwnSpawn"


FORK: dict[str, Any] = {"multiprocessing_context": OwnFork()}
SPAWN: dict[str, Any] = {"multiprocessing_context": OwnSpawn()}
