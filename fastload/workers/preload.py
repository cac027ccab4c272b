"""Imported by a fork server before it forks workers: this loads all modules that workers need, once.

Import it only in the fork server, for its side effects.
"""

import gc
import sys

import fastload.workers.worker  # noqa: F401

# Imported modules live as long as the process. gc.freeze() keeps the garbage collector of each worker from
# writing to their pages, and so from copying them ("before fork" in the documentation of gc). Free-threaded
# builds go without: in releases before 2026, objects in use can be destroyed after it (issues 126312 and
# 142975 of CPython).
if "t" not in sys.abiflags:
    gc.freeze()
