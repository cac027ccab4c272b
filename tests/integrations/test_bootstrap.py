"""Child interpreters call the hook when they import torch's loader; a small stand-in takes torch's place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastload

ROOT = Path(__file__).parents[2]
BOOTSTRAP = Path(fastload.__file__).parent / "integrations" / "bootstrap"
HOOK = "def called():\n    import sys\n    print('hook', 'torch.utils.data.dataloader' in sys.modules)\n"
SHOW_PATH = "import sys; print(sys.path)"
USE_TORCH = (
    "import torch.utils.data.dataloader as found; print(found.value, type(found.__spec__.loader).__name__)"
)
pytestmark = pytest.mark.slow  # an interpreter each


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A folder with a stand-in for torch, and with a hook."""
    folder = tmp_path / "torch" / "utils" / "data"
    folder.mkdir(parents=True)
    for place in (tmp_path / "torch", tmp_path / "torch" / "utils", folder):
        (place / "__init__.py").write_text("")
    (folder / "dataloader.py").write_text("value = 'imported'\n")
    (tmp_path / "my_hook.py").write_text(HOOK)
    return tmp_path


def run(code: str, path: list[Path], **variables: str) -> list[str]:
    """The lines that a child interpreter writes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **variables}
    command, both = [sys.executable, "-c", code], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, env=environment, text=True, check=True, **both).stdout.splitlines()


def output_of(code: str, *places: Path, hook: str = "my_hook:called") -> list[str]:
    """The same, with the bootstrap folder first in its path."""
    return run(code, [BOOTSTRAP, *places], FASTLOAD_CHILD_HOOK=hook)


def test_the_hook_runs_when_torch_s_loader_was_imported(places: Path) -> None:
    """Once, after the module's own code; the module keeps its loader."""
    lines = output_of(f"{USE_TORCH}; import importlib; importlib.reload(found)", places)
    assert lines == ["hook True", "imported SourceFileLoader"]


def test_a_child_without_torch_sees_nothing_of_ours(places: Path) -> None:
    """Neither the hook nor any module of fastload, nor a folder in its path."""
    code = "import sys; print([m for m in sys.modules if m.startswith(('fastload', 'my_hook', 'torch'))]);"
    assert output_of(f"{code} {SHOW_PATH}", places) == ["[]", *run(SHOW_PATH, [places])]


def test_a_sitecustomize_of_the_user_runs_too(places: Path) -> None:
    """It is the module of this name afterwards, and its errors are reported as Python reports them."""
    (places / "sitecustomize.py").write_text("print('the user\\'s'); mine = True\n")
    lines = output_of(f"{USE_TORCH}; import sitecustomize; print(sitecustomize.mine)", places)
    (places / "sitecustomize.py").write_text("1 / 0\n")
    after_an_error = output_of(USE_TORCH, places)
    assert lines == ["the user's", "hook True", "imported SourceFileLoader", "True"]
    assert any("ZeroDivisionError" in line for line in after_an_error)
    assert after_an_error[-2:] == ["hook True", "imported SourceFileLoader"]


def test_a_child_of_another_environment_says_that_it_is_not_reached(places: Path) -> None:
    """Its import of torch works; one line says which interpreter, and why."""
    lines = output_of(USE_TORCH, places, hook="absent_package:called")
    assert lines[0].startswith("fastload: no effect in this child process, ")
    assert lines[0].endswith("No module named 'absent_package'")
    assert lines[1:] == ["imported SourceFileLoader"]


@pytest.mark.parametrize("before", ["", "import torch.utils.data.dataloader; "])
def test_install_hook_reaches_this_process_and_its_children(places: Path, before: str) -> None:
    """Also if torch's loader was imported before; twice is once."""
    code = (
        f"{before}from fastload.integrations.bootstrap import install_hook; import subprocess, sys\n"
        "install_hook('my_hook:called'); install_hook('my_hook:called')\n"
        f"{USE_TORCH}; sys.stdout.flush()\n"
        f"subprocess.run([sys.executable, '-c', {USE_TORCH!r}])\n"
    )
    here, there = ["hook True"] * (2 if before else 1), ["imported SourceFileLoader", "hook True"]
    assert run(code, [places, ROOT]) == [*here, *there, "imported SourceFileLoader"]
