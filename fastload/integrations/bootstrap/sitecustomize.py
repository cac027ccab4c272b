"""Call a function in this interpreter as soon as torch is imported.

Python imports a module of this name when it starts. `become_python` puts this folder in front of PYTHONPATH,
so python finds it here. The environment variable FASTLOAD_RUN has the name of the function, as
MODULE:FUNCTION, among its settings. Rules:

1. An interpreter that never imports torch imports nothing of fastload.
2. A user's `sitecustomize`, further back in the path, runs as it would without this one, and first.
3. The program finds the `sys.path` that it would have without this folder.
4. The code runs in any Python from 3.6 on, because a child process can run a different Python.
"""

import os
import sys


class TorchFinder:
    """A module finder that is the first until torch is imported, and then calls the hook."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Find torch by the other finders, and let its import end with the hook."""
        if name != "torch" or "FASTLOAD_RUN" not in os.environ:  # this interpreter got the path alone
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)  # type: ignore[arg-type]  # the import system asks for find_spec() alone
        spec = find_spec(name)
        loader = getattr(spec, "loader", None)
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: object) -> None:
                del loader.exec_module  # the method of its class is found again
                execute(module)
                call_hook()

            loader.exec_module = exec_module
        return spec


def call_hook() -> None:
    """Call the function that the environment variable names; an interpreter without fastload says so."""
    import json
    from importlib import import_module

    module, _, function = json.loads(os.environ["FASTLOAD_RUN"])["hook"].partition(":")
    try:
        hook = getattr(import_module(module), function)
    except ImportError as error:
        sys.stderr.write(f"fastload: no effect in this process, {sys.executable}: {error}\n")
    else:
        hook()


if __name__ == "sitecustomize":
    _HERE = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    from importlib.machinery import PathFinder

    _spec = PathFinder.find_spec("sitecustomize")
    try:
        if _spec is not None and _spec.loader is not None:
            from importlib.util import module_from_spec

            sys.modules["sitecustomize"] = module_from_spec(_spec)
            _spec.loader.exec_module(sys.modules["sitecustomize"])
    finally:
        if "torch" in sys.modules and "FASTLOAD_RUN" in os.environ:  # the user's sitecustomize imported it
            call_hook()
        else:
            sys.meta_path.insert(0, TorchFinder())  # type: ignore[arg-type]
