"""Count the lines of code of each layer, and write them into the table of docs/how-it-works.md.

`python docs/layers.py` does both. A line of code is neither blank, nor a comment, nor part of a docstring.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-it-works.md"
_ROW = re.compile(r"^(\| `(\w+)(?:/|\.py)` \| )([\d,]+)( \|)", re.MULTILINE)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(path: Path) -> int:
    """The lines of code in a file."""
    text = path.read_text(encoding="utf-8")
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in docstrings for number, line in lines)


def lines_of_layers(package: Path = ROOT / "fastload") -> dict[str, int]:
    """The lines of code by layer: of each folder, and of each file beside the folders."""
    found: dict[str, int] = {}
    for path in package.rglob("*.py"):
        layer = path.relative_to(package).parts[0].removesuffix(".py")
        found[layer] = found.get(layer, 0) + code_lines(path)
    return found


def lines_in_page(text: str) -> dict[str, int]:
    """The lines of code by layer, as the table has them."""
    return {match[2]: int(match[3].replace(",", "")) for match in _ROW.finditer(text)}


def main() -> None:
    """Write the counts into the table, and print them."""
    counts = lines_of_layers()
    page = PAGE.read_text(encoding="utf-8")
    page = _ROW.sub(lambda match: f"{match[1]}{counts[match[2]]:,}{match[4]}", page)
    total = f"{sum(counts.values()):,} lines of code"
    PAGE.write_text(re.sub(r"[\d,]+ lines of code", total, page), encoding="utf-8")
    for layer, count in sorted(counts.items(), key=lambda item: -item[1]):
        sys.stdout.write(f"{count:6,} {layer}\n")
    sys.stdout.write(f"{sum(counts.values()):6,} in all\n")


if __name__ == "__main__":
    main()
