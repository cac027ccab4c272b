"""A folder for PYTHONPATH: Python imports the file `sitecustomize` in it when an interpreter starts.

Interpreters inherit environment variables, so spawned and fork server workers, ranks that a launcher starts,
and their own children are all reached. Interpreters that ignore the environment (`python -E`, `-I`, `-S`), or
get a different one, are not.
"""

from __future__ import annotations

import os

from fastload.integrations.bootstrap import sitecustomize

_FOLDER = os.path.dirname(__file__)


def install_hook(hook: str) -> None:
    """Call a function when torch's loader is imported: in this process, and in every interpreter it starts.

    Args:
        hook: `"MODULE:FUNCTION"`. The function takes no arguments, and finds its settings in environment
            variables. It runs in the middle of the import of torch, so it should import little.
    """
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folders[0] != _FOLDER:
        os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *filter(None, folders)])
    os.environ[sitecustomize.HOOK] = hook
    sitecustomize.arm()
