"""Call a function in this interpreter as soon as torch's loader is imported.

Python imports a module of this name when it starts. `install_hook` puts this folder in front of PYTHONPATH,
so child processes find it here. The environment variable FASTLOAD_CHILD_HOOK names the function, as
MODULE:FUNCTION. Rules:

1. An interpreter that never imports torch's loader imports nothing of fastload.
2. A user's `sitecustomize`, further back in the path, runs as it would without this one, and first.
3. The program finds the `sys.path` that it would have without this folder.
4. The code runs in any Python from 3.6 on, because a child process can run a different Python.
"""

import os
import sys

HOOK = "FASTLOAD_CHILD_HOOK"
TORCH_LOADER = "torch.utils.data.dataloader"


class LoaderFinder:
    """A module finder that is the first until torch's loader is imported, and then calls the hook."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Find torch's loader by the other finders, and let its import end with the hook."""
        if name != TORCH_LOADER:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)  # type: ignore[arg-type]  # the import system asks for find_spec() alone
        spec = find_spec(name)
        loader = getattr(spec, "loader", None)
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: object) -> None:
            del loader.exec_module  # the method of its class is found again
            execute(module)
            call_hook()

        loader.exec_module = exec_module
        return spec


def arm() -> None:
    """Call the hook when torch's loader is imported, or now if it was imported before."""
    if TORCH_LOADER in sys.modules:
        call_hook()
    elif not any(type(finder).__name__ == LoaderFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, LoaderFinder())  # type: ignore[arg-type]


def call_hook() -> None:
    """Call the function that the environment variable names; an interpreter without fastload says so."""
    module, _, function = os.environ.get(HOOK, "").partition(":")
    if not module:
        return
    from importlib import import_module

    try:
        hook = getattr(import_module(module), function)
    except ImportError as error:
        sys.stderr.write(f"fastload: no effect in this child process, {sys.executable}: {error}\n")
        return
    hook()


def _run_the_next_sitecustomize() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    try:
        _run_the_next_sitecustomize()
    finally:
        if os.environ.get(HOOK):
            arm()
