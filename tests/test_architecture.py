"""The layers of the package, read from its imports: lower rooms never import upper ones."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fastload

PACKAGE = Path(fastload.__file__).parent

# Rooms from the bottom up; a file may import from its own row and from rows before it, never in a circle.
LAYERS: list[set[str]] = [
    {"errors", "sizes", "system_errors", "failed_sample"},
    {"failures"},
    {"terminal"},
    {
        "transport.segment",
        "transport.schedule",
        "transport.limits",
        "rng.pipelines",
        "transport.obituary",
        "cache.budget",
    },
    {"transport.worker_info", "transport.thread_copy", "transport.task", "transport.stream_state"},
    {"rng.seeding", "rng.draws", "rng.loans", "rng.local_pipelines", "rng.sample_rng", "rng.keyed"},
    {"transport.memory", "transport.packing", "transport.ring", "cache.*", "device.*", "images.*"},
    {
        "transport.stacking",
        "transport.collate",
        "transport.fetch",
        "transport.channel",
        "transport.job",
        "transport.replacing",
        "transport.loader_collate",
    },
    {"transport.worker", "transport.preload", "transport.starting"},
    {"transport.process"},
    {"transport.pool"},
    {"transport.threads"},
    {"order"},
    {"saved_state", "epoch"},
    {"resume"},
    {"local_iterator", "worker_iterator", "torch_iterator"},
    {"delivery"},
    {"loader"},
    {"source_argument", "doctor"},
    {"cache_commands"},
    {"cli"},
    {"__init__", "__main__"},
]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


FILES = {
    _name(path): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py" or path.parent == PACKAGE
}


def _layer(name: str) -> int:
    exact = [number for number, layer in enumerate(LAYERS) if name in layer]
    whole_rooms = [number for number, layer in enumerate(LAYERS) if name.split(".")[0] + ".*" in layer]
    return (exact or whole_rooms)[0]


def _imports(path: Path) -> set[str]:
    """Modules of ours that a file imports when it runs; those for types alone do not count."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {name.removeprefix("fastload.") for name in names if name.startswith("fastload.")}
    return found & set(FILES)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_imports_its_own_layer_and_lower_ones_only(name: str) -> None:
    """See LAYERS."""
    above = {other for other in _imports(FILES[name]) if _layer(other) > _layer(name)}

    assert above == set()


def test_imports_make_no_circle() -> None:
    """Files can be read one after another, each after what it builds on."""
    left = {name: _imports(path) for name, path in FILES.items()}
    while ready := [name for name, needs in left.items() if not needs & set(left)]:
        for name in ready:
            del left[name]

    assert left == {}


def test_torch_cuda_is_named_in_the_device_room_alone() -> None:
    """CUDA is touched in one place."""
    naming = {name for name, path in FILES.items() if "torch.cuda." in path.read_text()}

    assert {name.split(".")[0] for name in naming} == {"device"}


def test_import_starts_nothing_and_brings_no_heavy_guests() -> None:
    """No process, no thread, no CUDA context; albumentations, OpenCV and rich only where they are used."""
    program = (
        "import os, sys, threading, torch.utils.data\n"
        "before = set(sys.modules)\n"
        "import fastload\n"
        "assert threading.active_count() == 1\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not open(f'/proc/self/task/{os.getpid()}/children').read()\n"
        "guests = {'albumentations', 'cv2', 'rich', 'matplotlib', 'scipy', 'typer'}\n"
        "assert not guests & (set(sys.modules) - before), guests & set(sys.modules)\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_all_is_sorted_and_is_what_can_be_seen() -> None:
    """Public names come through the package alone."""
    visible = {
        name
        for name, value in vars(fastload).items()
        if not name.startswith("_") and not isinstance(value, type(sys))
    }

    assert set(fastload.__all__) == visible
    assert sorted(fastload.__all__, key=_ruffs_order) == fastload.__all__


def _ruffs_order(name: str) -> tuple[int, str]:
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name
