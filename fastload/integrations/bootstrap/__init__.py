"""A folder for PYTHONPATH: Python imports the file `sitecustomize` in it when an interpreter starts.

Interpreters inherit environment variables, so the script, its spawned and fork server workers, ranks that a
launcher starts, and their own children are all reached. Interpreters that ignore the environment (`python
-E`, `-I`, `-S`), or get a different one, are not.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

SETTINGS = "FASTLOAD_RUN"  # the environment variable with the settings, as JSON


def settings_here() -> tuple[dict[str, Any], bool]:
    """The settings of the hook, and whether this process writes what `fastload` has to say.

    The process that became python does, and each first rank of a machine; not the children of either.
    """
    settings = json.loads(os.environ[SETTINGS])
    rank = os.environ.get("RANK")
    # A script can set RANK itself, and its workers inherit it.
    is_worker = any(word.startswith("from multiprocessing.") for word in sys.orig_argv)
    speaks = settings["pid"] == os.getpid() or (rank != settings["rank"] and not is_worker)
    os.environ[SETTINGS] = json.dumps({**settings, "rank": rank})  # the children of a rank have its number
    return settings, speaks and os.environ.get("LOCAL_RANK", "0") == "0"
