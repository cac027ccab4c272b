"""A folder for PYTHONPATH: Python imports the file `sitecustomize` in it when an interpreter starts.

Interpreters inherit environment variables, so the script, its spawned and fork server workers, ranks that a
launcher starts, and their own children are all reached. Interpreters that ignore the environment (`python
-E`, `-I`, `-S`), or get a different one, are not.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from fastload.integrations.bootstrap import sitecustomize

if TYPE_CHECKING:
    from typing import NoReturn

_SETTINGS = "FASTLOAD_RUN"  # the environment variable with the settings of the hook, as JSON


def become_python(arguments: list[str], hook: str, **settings: Any) -> NoReturn:
    """Replace this process by python, and call a hook in each interpreter that imports torch.

    Args:
        arguments: Those of python.
        hook: `"MODULE:FUNCTION"`. The function takes no arguments. It runs at the end of the import of torch,
            also where no loader is used, so it should import little.
        settings: What `settings_here` gives to the hook; with values that JSON has.

    Raises:
        OSError: Python could not be started.
    """
    settings |= {"pid": os.getpid(), "rank": os.environ.get("RANK")}
    path = [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]
    os.environ |= {_SETTINGS: json.dumps(settings), sitecustomize.HOOK: hook}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    os.execv(sys.executable, [sys.executable, *arguments])


def settings_here() -> tuple[dict[str, Any], bool]:
    """The settings of the hook, and whether this process writes what `fastload` has to say.

    The process that became python does, and each first rank of a machine; not the children of either.
    """
    settings = json.loads(os.environ[_SETTINGS])
    rank = os.environ.get("RANK")
    # A script can set RANK itself, and its workers inherit it.
    is_worker = any(word.startswith("from multiprocessing.") for word in sys.orig_argv)
    speaks = settings["pid"] == os.getpid() or (rank != settings["rank"] and not is_worker)
    os.environ[_SETTINGS] = json.dumps({**settings, "rank": rank})  # the children of a rank have its number
    return settings, speaks and os.environ.get("LOCAL_RANK", "0") == "0"
