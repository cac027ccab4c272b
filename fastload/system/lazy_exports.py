"""Public names of a package, each imported on first use (PEP 562).

A package that has them stays cheap to import: workers and `fastload profile` import modules inside it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def public_names(
    package: str, names: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """A package's `__getattr__`, `__dir__` and `__all__`.

    Args:
        package: Its name.
        names: The public names, by the module inside the package that defines them.
        modules: Public modules inside the package, which need no separate import.
    """
    module_of = {name: module for module, defined in names.items() for name in defined}
    public = sorted(module_of)

    def get(name: str) -> object:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)  # later uses do not come here
        return value

    return get, lambda: public, public
