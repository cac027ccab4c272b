"""Imported by a fork server before it forks workers: loads all modules that workers need, once.

Import it only in the fork server, for its side effects.
"""

import fastload.workers.worker  # noqa: F401
from fastload.system.worker_memory import freeze_inherited

freeze_inherited()
