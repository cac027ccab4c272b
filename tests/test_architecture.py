"""The layers of the package, read from its imports: lower rooms never import upper ones."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from docs import layers

if TYPE_CHECKING:
    from tests.kit.processes import Interpreter

# Rooms from the bottom up; a file may import from its own room and from rooms before it, never in a circle.
# A folder imports from itself and from folders before it, for types too.
FROM_THE_BOTTOM = """
errors version system memory nested images readers augmentation rng batch cache device transforms
workers epochs training loader profiling integrations bench cli __init__ __main__
"""
LAYERS = FROM_THE_BOTTOM.split()


FILES = layers.modules()


def _layer(name: str) -> int:
    return LAYERS.index(layers.layer_of(name))


def _part_of_layer(name: str) -> str:
    """The folder or file directly inside a layer, such as `cache.lmdb` or `cache.dataset`."""
    return ".".join(name.split(".")[:2])


@pytest.mark.slow
def test_a_file_imports_from_its_own_folder_and_lower_ones_only() -> None:
    """Neither by a statement, for types too, nor by a string that names a module."""
    upward = {
        (name, other) for name in FILES for other in layers.imports(name) if _layer(other) > _layer(name)
    }
    assert upward == set()


def _circles(needs: dict[str, set[str]]) -> dict[str, set[str]]:
    """The entries that are in a circle, or need one that is."""
    left = dict(needs)
    while ready := [name for name, others in left.items() if not others & set(left)]:
        for name in ready:
            del left[name]
    return left


@pytest.mark.slow
def test_imports_make_no_circle() -> None:
    """Files can be read one after another, each after what it builds on, for types and by strings too."""
    assert _circles({name: set(layers.imports(name)) for name in FILES}) == {}


def test_a_module_that_a_string_names_counts_as_imported() -> None:
    """`import_module("...")`, `sys.modules.get("...")` and tables of names hide no arrow from these tests."""
    assert "cache.dataset" in layers.imports("workers.process")
    assert "transforms.triton_crop" in layers.imports("transforms.resample")
    assert {"loader", "images.folder"} <= layers.imports("__init__")


# Inside cache/: what all of it builds on, then the folders, from the bottom up.
CACHE_BASE = {
    *(
        "cache.columns",
        "cache.decoded_files",
        "cache.fingerprint",
        "cache.lmdb_file",
        "cache.lmdb_store",
    ),
    *("cache.records", "cache.sample_cache", "cache.samples", "cache.store"),
}
CACHE_FOLDERS: dict[str, set[str]] = {
    "cache.ram": CACHE_BASE,
}


@pytest.mark.parametrize("folder", [*sorted(CACHE_BASE), *CACHE_FOLDERS])
def test_a_folder_inside_the_cache_builds_on_lower_ones_only(folder: str) -> None:
    """For types too; the files beside the folders build on all of them, and none of these on the files."""
    files = [name for name in FILES if _part_of_layer(name) == folder]
    needs = {_part_of_layer(other) for name in files for other in layers.imports(name)}
    assert files
    assert {part for part in needs if part.startswith("cache.")} <= CACHE_FOLDERS.get(folder, CACHE_BASE) | {
        folder
    }


@pytest.mark.slow
def test_the_page_counts_the_lines_of_each_layer() -> None:
    """Within a tenth; `python docs/layers.py` counts again."""
    counted = layers.lines_of_layers()
    shown = layers.lines_in_page(layers.PAGE.read_text(encoding="utf-8"))
    assert list(shown) == [layer for layer in LAYERS if layer != "version" and not layer.startswith("__")]
    assert {name for name, lines in shown.items() if abs(lines - counted[name]) > lines / 10 + 20} == set()


@pytest.mark.parametrize("row", layers.BUDGETS)
def test_folders_keep_to_their_budget(row: str) -> None:
    """Of lines of code; whoever needs more finds the mechanism that can go for it."""
    lines, (budget, _) = layers.lines_of_rows()[row], layers.BUDGETS[row]
    assert lines <= budget, (
        f"{row}: {lines:,} lines of code, {lines - budget:,} more than the budget of {budget:,} "
        "(BUDGETS in docs/layers.py)"
    )


def test_every_file_is_in_one_budget() -> None:
    """And every name in the table is a folder or a file of the package."""
    names = " ".join(layers.BUDGETS).split()
    assert sorted(names) == sorted({layers.layer_of(name) for name in FILES})


def test_the_page_names_files_that_exist() -> None:
    """In the table of the layers, each name is a file of its folder; elsewhere names have a folder."""
    page = layers.PAGE.read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)/` \|[^|]*\|[^|]*\|([^|]*)\|$", page, re.MULTILINE)
    assert {folder for folder, _ in rows} == {layer for layer in LAYERS if f"{layer}.__init__" in FILES}
    names = {f"{folder}/{file}" for folder, files in rows for file in re.findall(r"`([\w/]+)`", files)}
    names |= {name for name in re.findall(r"`(\w+/[\w/]*\w)`", page) if name.partition("/")[0] in LAYERS}
    assert len(names) > 40
    assert {name for name in names if name.replace("/", ".") not in FILES} == set()


FOLDERS = [name.removesuffix(".__init__") for name in FILES if name.endswith(".__init__")]
# Of these, the docstring names every file.
LOADERS_OWN = LAYERS[LAYERS.index("system") : LAYERS.index("training")]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_in_which_order_to_read_its_files(folder: str) -> None:
    """Each name in its docstring is a file or folder in it; below the loader, it names all of them."""
    docstring = ast.get_docstring(ast.parse(FILES[f"{folder}.__init__"].read_text("utf-8"))) or ""
    named = set(re.findall(r"`(\w+)`", docstring))
    inside = {
        name.removeprefix(f"{folder}.").partition(".")[0] for name in FILES if name.startswith(f"{folder}.")
    }
    inside.discard("__init__")
    assert named <= inside
    assert folder.partition(".")[0] not in LOADERS_OWN or named == inside


def _changes() -> dict[str, str]:
    """The changes that CONTRIBUTING.md describes, and where they are made."""
    text = (layers.ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.partition("## Changes, and the files they touch")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!change )(\w.*?) \| (.+) \|$", section, re.MULTILINE)
    return dict(rows)


@pytest.mark.parametrize("change", _changes())
def test_a_change_touches_at_most_three_files(change: str) -> None:
    """They exist, and the names that the change is made at are in them."""
    where = _changes()[change]
    files = set(re.findall(r"`([\w/]+\.py)`", where))
    paths = [layers.ROOT / file if file.startswith("tests/") else layers.PACKAGE / file for file in files]
    assert 1 <= len(paths) <= 3
    code = "\n".join(path.read_text("utf-8") for path in paths)
    assert {name for name in re.findall(r"`(\w+)`", where) if not re.search(rf"\b{name}\b", code)} == set()


def test_each_rule_names_a_test_that_exists() -> None:
    """Five rules never break, and the page says which test holds each."""
    named = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", layers.PAGE.read_text(encoding="utf-8"))
    assert len(named) == 5
    _check_that_tests_exist(named)


def test_each_fault_names_a_test_that_exists() -> None:
    """The table of what happens when something goes wrong names tests and situations in each row."""
    page = (layers.ROOT / "tests" / "situations" / "README.md").read_text(encoding="utf-8")
    section = page.partition("\n## What happens when\n")[2].partition("\n## ")[0]
    rows = section.strip().splitlines()[4:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::([\w:]+))?`", row)
        assert named, row
        _check_that_tests_exist(named)


def _check_that_tests_exist(named: list[tuple[str, str]]) -> None:
    for file, test in named:
        code = (layers.ROOT / file).read_text(encoding="utf-8")
        assert all(re.search(rf"(def|class) {part}\b", code) for part in test.split("::") if part), test


@pytest.mark.slow
def test_the_drawing_shows_the_arrows_of_the_imports() -> None:
    """`python docs/layers.py` draws again; line counts aside, which the table has."""
    without_lines = functools.partial(re.sub, r"[\d,]+ lines", "")
    assert without_lines(layers.drawing()) == without_lines(layers.DRAWING.read_text(encoding="utf-8"))


# What only Linux has, and the one file in which its absence is handled.
OF_LINUX = {
    r"memfd_create|F_ADD_SEALS": "system.linux",
    r"pidfd_open\(|pidfd_send_signal\(": "system.linux",
    r"SCM_RIGHTS\b|SOCK_SEQPACKET\b": "workers.channel",
    r"\bflock\(|\blockf\(|\.flock\b": "system.locks",
    r"MADV_POPULATE_WRITE|MADV_HUGEPAGE|MADV_COLLAPSE|SEEK_HOLE": "memory.segment",
    r"transparent_hugepage": "system.linux",
    r"\bmallopt\(": "system.worker_memory",
    r"/sys/fs/cgroup|sys/fs/cgroup": "system.limits",
}


@pytest.mark.slow
def test_what_only_linux_has_is_used_in_one_place() -> None:
    """Code, comments and docstrings apart, names it in one file, so that its absence is handled there."""
    codes = {name: _code(path) for name, path in FILES.items()}
    for names, file in OF_LINUX.items():
        assert {name for name, code in codes.items() if re.search(names, code)} == {file}, names


def _code(path: Path) -> str:
    """The code of a file without its docstrings and comments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node) is not None
        ):
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def _private_names_of_torch(path: Path) -> set[str]:
    """The private names of torch that a file imports, or reads of what it imported from torch."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    paths: dict[str, str] = {}  # what the file's names from torch stand for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                paths[alias.asname or name] = name
                paths[f" {alias.name}"] = alias.name  # the module itself
        elif isinstance(node, ast.ImportFrom):
            is_ours = node.module == "fastload.system.torch_private"
            module = "torch" if is_ours else node.module or ""
            paths |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
    paths = {name: full for name, full in paths.items() if full.partition(".")[0] == "torch"}
    used = set(paths.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name, _, rest = ast.unparse(node).partition(".")
            used |= {f"{paths[name]}.{rest}"} if name in paths else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used |= {node.value} if re.fullmatch(r"torch(\.\w+)+", node.value) else set()
    return {name for name in used if re.search(r"\._[a-z]", name, re.IGNORECASE)}


def test_private_names_of_torch_are_in_one_file() -> None:
    """Code imports none, and reads none of a module, a class or a user's loader, outside of torch_private."""
    of_loaders = re.compile(r"\._dataset_kind\b|\b(?:loader|twin)\._(?:auto_collation|index_sampler)\b")
    users = {
        name
        for name, path in FILES.items()
        if _private_names_of_torch(path) or of_loaders.search(_code(path))
    }
    assert users == {"system.torch_private"}


def test_torch_cuda_is_named_for_devices_and_training_alone() -> None:
    """CUDA is touched where batches meet a device, and beside the training loop, which is the user's."""
    naming = {name for name, path in FILES.items() if "torch.cuda." in path.read_text()}
    assert {name.split(".")[0] for name in naming} == {"device", "training"}


def test_import_starts_nothing_and_brings_no_heavy_libraries(interpreter: Interpreter) -> None:
    """No process, no thread, no CUDA context; albumentations and OpenCV only where they are used."""
    _run(
        interpreter,
        "import os, sys, threading, torch.utils.data\n"
        "before = set(sys.modules)\n"
        "from fastload import *\n"
        "assert threading.active_count() == 1\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not open(f'/proc/self/task/{os.getpid()}/children').read()\n"
        "libraries = {'albumentations', 'cv2', 'rich', 'scipy', 'typer'}\n"
        "assert not libraries & (set(sys.modules) - before), libraries & set(sys.modules)\n",
    )


def test_import_of_the_package_alone_imports_nothing_else() -> None:
    """Every public name brings its module when it is used, as `fastload.errors` does."""
    program = (
        "import sys, fastload\n"
        "found = {name for name in sys.modules if name.startswith(('fastload.', 'torch', 'numpy'))}\n"
        "found -= {'fastload.version', 'fastload.system', 'fastload.system.lazy_exports'}\n"
        "assert not found, found\n"
        "assert issubclass(fastload.errors.ResumeError, fastload.FastloadError)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("program", ["from fastload import DataLoader", "import fastload.workers.worker"])
def test_a_loader_and_a_worker_bring_no_cache(program: str, interpreter: Interpreter) -> None:
    """Pillow, LMDB, psutil and the caches are imported with a CachedDataset, not before."""
    _run(
        interpreter,
        f"import sys\n{program}\n"
        "libraries = {'PIL', 'lmdb', 'psutil', 'fastload.cache.dataset', 'fastload.cache.ram.shared'}\n"
        "assert not libraries & set(sys.modules), libraries & set(sys.modules)\n",
    )


def _run(interpreter: Interpreter, program: str) -> None:
    done = interpreter.run(program, exits=False)
    assert done.returncode == 0, done.stderr


PUBLIC = ("fastload", "fastload.cache", "fastload.profiling", "fastload.training", "fastload.transforms")


@pytest.mark.parametrize("name", PUBLIC)
def test_all_is_sorted_and_is_what_can_be_seen(name: str) -> None:
    """Public names come through a few packages alone, at most 23 of them through the top one."""
    package = importlib.import_module(name)
    assert dir(package) == package.__all__ == sorted(package.__all__)
    assert len(package.__all__) <= 23
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'Dataloader'"):
        package.Dataloader  # noqa: B018


@pytest.mark.parametrize("name", PUBLIC)
def test_public_classes_name_no_mechanism(name: str) -> None:
    """No descriptor, plan or structure is among the names that their users see."""
    package = importlib.import_module(name)
    kinds = [kind for kind in map(package.__getattr__, package.__all__) if isinstance(kind, type)]
    seen = [f"{kind.__name__}.{part}" for kind in kinds for part in dir(kind) if not part.startswith("_")]
    assert not [path for path in seen if re.search(r"[._](fd|anchor|plan|structure)(_|$)", path)]


def test_public_modules_show_their_public_names() -> None:
    """Of the modules that need no other library; what they import is not seen."""
    import fastload.errors
    import fastload.integrations.patch

    assert dir(fastload.errors) == sorted(name for name in vars(fastload.errors) if name.endswith("Error"))


@pytest.mark.parametrize("name", PUBLIC)
def test_type_checkers_read_the_names_that_python_finds(name: str) -> None:
    """The imports for type checkers and the table of names agree; the second use is a plain look-up."""
    package = importlib.import_module(name)
    imports = [
        node
        for branch in ast.parse(Path(package.__file__ or "").read_text()).body
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
    ]
    read = {
        alias.asname: importlib.import_module(node.module or "") for node in imports for alias in node.names
    }
    assert sorted(read) == package.__all__
    for public, module in read.items():
        assert getattr(package, public) is getattr(module, public) is vars(package)[public]
