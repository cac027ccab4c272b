"""The signatures of the public names, for whoever reads docs/api.md outside of the built site.

`python docs/signatures.py` writes them into the page; a test fails if they are not those of the code.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("api.md")
# What the loader and the caches call; mkdocs.yml has the same names.
PRIVATE = re.compile(r"_|(defer|extra_repr|gather|lend|of)$")
BLOCK = re.compile(r"(?<=<!-- signatures -->\n)```py\n.*?```\n", re.DOTALL)
_NAME = re.compile(r"^::: (fastload\.\S+)$", re.MULTILINE)


def _signature(function: Any) -> str:
    """Names and defaults; the built site has the types, too."""
    signature = inspect.signature(function)
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return re.sub(r"^\((self|cls)(, |(?=\)))", "(", text)


def _members(owner: type) -> list[tuple[str, Any]]:
    """The public methods and properties that a class defines itself, without those of torch's classes."""
    strangers = [base for base in owner.__mro__ if not base.__module__.startswith("fastload")]
    return [
        (name, value)
        for name, value in vars(owner).items()
        if not PRIVATE.match(name)
        and (callable(value) or isinstance(value, (property, classmethod)))
        and not any(hasattr(base, name) for base in strangers)
    ]


def _claim(value: Any) -> str:
    return (inspect.getdoc(value) or "").partition("\n")[0]


def _entry(name: str, value: Any) -> list[str]:
    if inspect.ismodule(value):
        return []
    if not callable(value):
        return [f"{name}  # {_claim(value)}"]
    head = name if isinstance(value, type) and issubclass(value, Exception) else name + _signature(value)
    lines = [f"{head}  # {_claim(value)}"]
    if isinstance(value, type):
        for member, method in _members(value):
            function = method.__func__ if isinstance(method, classmethod) else method
            called = "" if isinstance(method, property) else _signature(function)
            lines.append(f"    .{member}{called}  # {_claim(function)}")
    return lines


def signatures() -> str:
    """All of them, as a block of code: a class with its methods and properties below it."""
    lines: list[str] = []
    for name in _NAME.findall(PAGE.read_text()):
        module, _, attribute = name.partition(":")
        lines += _entry(name, pkgutil.resolve_name(f"{module}:{attribute}" if attribute else name))
    return "```py\n" + "\n".join(lines) + "\n```\n"


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: signatures(), PAGE.read_text()))
