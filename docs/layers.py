"""The layers of the code, read from the code: what each folder imports, how many lines it has, and a drawing.

`python docs/layers.py` writes the lines into the table of docs/how-it-works.md, and the drawing to
docs/layers.svg, and prints the lines beside their budgets. A line of code is neither blank, nor a comment,
nor part of a docstring.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fastload"
if not PACKAGE.is_dir():  # the tests of an installed wheel run without the package's source beside them
    _SPEC = importlib.util.find_spec("fastload")
    PACKAGE = Path((_SPEC and _SPEC.origin) or "").parent
PAGE = ROOT / "docs" / "how-it-works.md"
DRAWING = ROOT / "docs" / "layers.svg"
# Folders, and files beside them: the lines of code that they may have now, and those that are the goal.
# Whoever takes code out lowers the first number; tests/test_architecture.py fails above it.
BUDGETS = {
    "loader errors version __init__ __main__": (427, 420),
    "epochs": (1463, 1050),
    "workers": (1799, 1150),
    "batch": (1160, 800),
    "cache": (3888, 2600),
    "readers": (1513, 1200),
    "images": (704, 600),
    "augmentation": (886, 800),
    "nested": (637, 620),
    "rng": (857, 750),
    "device transforms": (1224, 1150),
    "memory system": (1700, 1350),
    "training": (419, 420),
    "profiling bench": (1134, 900),
    "cli integrations": (1039, 1000),
}
_ROW = re.compile(r"^(\| `(\w+)(?:/|\.py)` \| )([\d,]+)( \|)", re.MULTILINE)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_MODULE = re.compile(r"fastload(\.\w+)+")


def _docstrings(tree: ast.AST) -> list[ast.stmt]:
    return [
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
    ]


def code_lines(path: Path) -> int:
    """The lines of code in a file."""
    text = path.read_text(encoding="utf-8")
    documented: set[int] = set()
    for docstring in _docstrings(ast.parse(text)):
        documented.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in documented for number, line in lines)


def name_of(path: Path) -> str:
    """The name of a module inside the package: `cache.dataset`, `cache.__init__`, `loader`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@functools.cache
def modules() -> dict[str, Path]:
    """All files of the package by their names."""
    return {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def imports(name: str, *, with_types: bool = True) -> frozenset[str]:
    """The modules of the package that a module imports, by a statement or by a string that names one.

    Args:
        name: The module.
        with_types: Whether imports for type checkers count too.
    """
    tree = ast.parse(modules()[name].read_text(encoding="utf-8"))
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    docstrings = {id(docstring.value) for docstring in _docstrings(tree) if isinstance(docstring, ast.Expr)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in for_types and not with_types:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            names.update([node.value] if _MODULE.fullmatch(node.value) else [])
    return frozenset(
        _of_package(name, names) | _of_table(name, tree)
        if name.endswith("__init__")
        else _of_package(name, names)
    )


def _of_package(importer: str, names: set[str]) -> set[str]:
    """The modules of the package among dotted names; what a package exports comes from its `__init__`."""
    found = set()
    for name in names:
        inside = name.removeprefix("fastload.") if name.startswith("fastload.") else ""
        if inside in modules():
            found.add(inside)
        elif name == "fastload" or (PACKAGE / inside.replace(".", "/")).is_dir():
            continue  # the package of a name that is a module, or of one that is looked up below
        elif f"{inside.rpartition('.')[0]}.__init__" in modules():
            found.add(f"{inside.rpartition('.')[0]}.__init__")
        elif name.startswith("fastload.") and "." not in inside:
            found.add("__init__")
    return found - {importer}


def _of_table(package: str, tree: ast.AST) -> set[str]:
    """The modules in the table of a package's public names, which are imported when they are used."""
    prefix = package.removesuffix("__init__")
    keys = (
        key.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    )
    return {prefix + key for key in keys} & set(modules())


def layer_of(name: str) -> str:
    """The folder of a module, or the module itself if it lies beside the folders."""
    return name.split(".")[0]


@functools.cache
def lines_of_layers() -> dict[str, int]:
    """The lines of code by layer."""
    counts: dict[str, int] = {}
    for name, path in modules().items():
        counts[layer_of(name)] = counts.get(layer_of(name), 0) + code_lines(path)
    return counts


def lines_of_rows() -> dict[str, int]:
    """The lines of code by row of `BUDGETS`."""
    counts = lines_of_layers()
    return {row: sum(counts.get(layer, 0) for layer in row.split()) for row in BUDGETS}


def lines_in_page(text: str) -> dict[str, int]:
    """The lines of code by layer, as the table has them."""
    return {match[2]: int(match[3].replace(",", "")) for match in _ROW.finditer(text)}


# --- the drawing -----------------------------------------------------------------------------------------


def arrows() -> dict[str, set[str]]:
    """The layers that each layer imports, without those that it reaches through another one."""
    needs: dict[str, set[str]] = {}
    for name in modules():
        layer = layer_of(name)
        needs.setdefault(layer, set()).update({layer_of(other) for other in imports(name)} - {layer})
    for beside in ("__init__", "__main__", "version"):
        needs.pop(beside, None)
    for others in needs.values():
        others.intersection_update(needs)

    reached: dict[str, set[str]] = {}
    for layer in graphlib.TopologicalSorter(needs).static_order():  # raises CycleError
        reached[layer] = needs[layer].union(*(reached[other] for other in needs[layer]))
    return {
        layer: {other for other in others if not any(other in reached[via] for via in others)}
        for layer, others in needs.items()
    }


_WIDTH, _BOX_WIDTH, _BOX_HEIGHT, _ROW_HEIGHT, _MARGIN = 720, 150, 42, 66, 16
_STYLE = """
  .box { fill: #e4eef8; stroke: #3d6fa5; }
  .name { fill: #1f2933; font-weight: 600; } .lines { fill: #52606d; }
  .arrow { fill: none; stroke: #52606d; stroke-width: 1.2; marker-end: url(#head); } .head { fill: #52606d; }
  @media (prefers-color-scheme: dark) {
    .box { fill: #1d2b3a; stroke: #6fa3d8; } .name { fill: #e6edf3; } .lines { fill: #a9b6c3; }
    .arrow { stroke: #8d99a6; } .head { fill: #8d99a6; }
  }
"""


_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="13" role="img"
 font-family="system-ui, sans-serif" text-anchor="middle"
 aria-label="The layers of the code; arrows lead from a layer to those that it imports">
<style>{style}</style>
<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path class="head" d="M0 0L8 4L0 8z"/></marker>"""


def drawing() -> str:
    """The layers as an SVG: each above all that it imports, with an arrow to those next below."""
    below, counts = arrows(), lines_of_layers()

    @functools.cache
    def row_of(layer: str) -> int:
        return 1 + max((row_of(other) for other in below[layer]), default=-1)

    rows: dict[int, list[str]] = {}
    for layer in sorted(below):
        rows.setdefault(row_of(layer), []).append(layer)
    places = {
        layer: (_WIDTH * (2 * column + 1) // (2 * len(layers)), _MARGIN + (max(rows) - row) * _ROW_HEIGHT)
        for row, layers in rows.items()
        for column, layer in enumerate(layers)
    }
    height = 2 * _MARGIN + max(rows) * _ROW_HEIGHT + _BOX_HEIGHT
    parts = [_HEAD.format(width=_WIDTH, height=height, style=_STYLE)]
    for layer, others in sorted(below.items()):
        for other in sorted(others):
            (x, y), (to_x, to_y) = places[layer], places[other]
            y += _BOX_HEIGHT
            bend = (y + to_y) // 2
            parts.append(f'<path class="arrow" d="M{x} {y}C{x} {bend} {to_x} {bend} {to_x} {to_y}"/>')
    for layer, (x, y) in sorted(places.items()):
        name = f"{layer}/" if (PACKAGE / layer).is_dir() else f"{layer}.py"
        lines = f"{round(counts[layer], -2) or counts[layer]:,} lines"
        parts.append(
            f'<rect class="box" x="{x - _BOX_WIDTH // 2}" y="{y}" width="{_BOX_WIDTH}"'
            f' height="{_BOX_HEIGHT}" rx="6"/>'
            f'<text class="name" x="{x}" y="{y + 18}">{name}</text>'
            f'<text class="lines" x="{x}" y="{y + 34}">{lines}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Write the counts into the table and the drawing, and print the counts and the budgets."""
    counts = lines_of_layers()
    page = PAGE.read_text(encoding="utf-8")
    page = _ROW.sub(lambda match: f"{match[1]}{counts[match[2]]:,}{match[4]}", page)
    total = f"{sum(counts.values()):,} lines of code"
    PAGE.write_text(re.sub(r"[\d,]+ lines of code", total, page), encoding="utf-8")
    DRAWING.write_text(drawing(), encoding="utf-8")
    for layer, count in sorted(counts.items(), key=lambda item: -item[1]):
        sys.stdout.write(f"{count:6,} {layer}\n")
    sys.stdout.write("\n lines budget   goal\n")
    rows = [(lines, *BUDGETS[row], row) for row, lines in lines_of_rows().items()]
    sums = (sum(column) for column in list(zip(*rows, strict=True))[:3])
    for lines, budget, goal, row in [*rows, (*sums, "in all")]:
        mark = "  over its budget" if lines > budget else ""
        sys.stdout.write(f"{lines:6,} {budget:6,} {goal:6,} {row}{mark}\n")


if __name__ == "__main__":
    main()
