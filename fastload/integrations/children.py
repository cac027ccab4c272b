"""Call a function when torch's loader is imported: in this process, and in every interpreter that it starts.

Interpreters inherit environment variables, so spawned and fork server workers, ranks that a launcher starts,
and their own children are all reached. Interpreters that ignore the environment (`python -E`, `-I`, `-S`), or
get a different one, are not.
"""

from __future__ import annotations

import os
from pathlib import Path

from fastload.integrations.bootstrap import sitecustomize

_FOLDER = str(Path(sitecustomize.__file__).parent)


def watch(hook: str) -> None:
    """Call a function once torch's loader is imported, here and in child processes.

    Args:
        hook: `"MODULE:FUNCTION"`. The function takes no arguments, and finds its settings in environment
            variables. It runs in the middle of the import of torch, so it should import little.
    """
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if places[0] != _FOLDER:
        os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *(place for place in places if place)])
    os.environ[sitecustomize.HOOK] = hook
    sitecustomize.arm()
