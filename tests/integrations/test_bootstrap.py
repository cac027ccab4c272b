"""Interpreters call the hook when they import torch; a small stand-in takes its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastload
from fastload.integrations.bootstrap import settings_here

ROOT = Path(__file__).parents[2]
BOOTSTRAP = Path(fastload.__file__).parent / "integrations" / "bootstrap"
HOOK = "def called():\n    import torch\n    print('hook', hasattr(torch, 'value'))\n"
SHOW_PATH = "import sys; print(sys.path)"
USE_TORCH = "import torch as found; print(found.value, type(found.__spec__.loader).__name__)"
pytestmark = pytest.mark.slow  # an interpreter each


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A folder with a stand-in for torch, and with a hook."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("value = 'imported'\n")
    (tmp_path / "my_hook.py").write_text(HOOK)
    return tmp_path


def run(code: str, path: list[Path], **variables: str) -> list[str]:
    """The lines that a child interpreter writes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **variables}
    command, both = [sys.executable, "-c", code], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, env=environment, text=True, check=True, **both).stdout.splitlines()


def output_of(code: str, *places: Path, hook: str = "my_hook:called") -> list[str]:
    """The same, with the bootstrap folder first in its path."""
    return run(code, [BOOTSTRAP, *places], FASTLOAD_RUN=json.dumps({"hook": hook}))


def test_the_hook_runs_when_torch_was_imported(places: Path) -> None:
    """Once, after the module's own code; the module keeps its loader."""
    lines = output_of(f"{USE_TORCH}; import importlib; importlib.reload(found)", places)
    assert lines == ["hook True", "imported SourceFileLoader"]


def test_a_child_without_torch_sees_nothing_of_ours(places: Path) -> None:
    """Neither the hook nor any module of fastload, nor a folder in its path."""
    code = "import sys; print([m for m in sys.modules if m.startswith(('fastload', 'my_hook', 'torch'))]);"
    assert output_of(f"{code} {SHOW_PATH}", places) == ["[]", *run(SHOW_PATH, [places])]


def test_a_child_that_got_the_path_alone_is_left(places: Path) -> None:
    """As one whose environment was put together anew, or that has removed the variable."""
    assert run(USE_TORCH, [BOOTSTRAP, places]) == ["imported SourceFileLoader"]
    (places / "sitecustomize.py").write_text("import torch\n")
    assert run(USE_TORCH, [BOOTSTRAP, places]) == ["imported SourceFileLoader"]
    removes = f"import os; del os.environ['FASTLOAD_RUN']; {USE_TORCH}"
    (places / "sitecustomize.py").unlink()
    assert output_of(removes, places) == ["imported SourceFileLoader"]


def test_a_sitecustomize_of_the_user_runs_too(places: Path) -> None:
    """It is the module of this name afterwards, and its errors are reported as Python reports them."""
    (places / "sitecustomize.py").write_text("print('the user\\'s'); mine = True\n")
    lines = output_of(f"{USE_TORCH}; import sitecustomize; print(sitecustomize.mine)", places)
    (places / "sitecustomize.py").write_text("1 / 0\n")
    after_an_error = output_of(USE_TORCH, places)
    assert lines == ["the user's", "hook True", "imported SourceFileLoader", "True"]
    assert any("ZeroDivisionError" in line for line in after_an_error)
    assert after_an_error[-2:] == ["hook True", "imported SourceFileLoader"]


def test_the_user_s_may_import_torch(places: Path) -> None:
    """Then the hook runs when it has ended, once."""
    (places / "sitecustomize.py").write_text("import torch\nprint('imported it')\n")
    assert output_of(USE_TORCH, places) == ["imported it", "hook True", "imported SourceFileLoader"]


def test_a_child_of_another_environment_says_that_it_is_not_reached(places: Path) -> None:
    """Its import of torch works; one line says which interpreter, and why."""
    lines = output_of(USE_TORCH, places, hook="absent_package:called")
    assert lines[0].startswith("fastload: no effect in this process, ")
    assert lines[0].endswith("No module named 'absent_package'")
    assert lines[1:] == ["imported SourceFileLoader"]


@pytest.mark.parametrize(
    "path", ["{places}{sep}{root}", "{sep}{places}{sep}{root}", "{places}{sep}{root}{sep}"]
)
def test_become_python_reaches_the_script_and_its_children(places: Path, path: str) -> None:
    """The process is the same, and PYTHONPATH keeps its order and its empty parts, which mean this folder."""
    code = f"import os; print(os.getpid()); {SHOW_PATH}; {USE_TORCH}; sys.stdout.flush()\n"
    script = f"{code}import subprocess; subprocess.run([sys.executable, '-c', {USE_TORCH!r}])\n"
    become = (
        f"import os; print(os.getpid(), flush=True); {SHOW_PATH}; sys.stdout.flush()\n"
        "from fastload.cli.script import become_python\n"
        f"become_python(['-c', {script!r}], 'my_hook:called')\n"
    )
    pythonpath = path.format(places=places, root=ROOT, sep=os.pathsep)
    pid, plain_path, *lines = run(become, [], PYTHONPATH=pythonpath)
    both = ["hook True", "imported SourceFileLoader"]
    assert lines == [pid, plain_path, *both, *both]


@pytest.mark.parametrize(
    ("pid", "started_in", "rank", "speaks"),
    [
        (True, None, None, True),  # the script
        (True, "0", "0", True),  # a launcher started the command in each rank
        (True, "1", "1", False),
        (False, None, None, False),  # a child of the script
        (False, None, "0", True),  # a rank of a launcher
        (False, None, "1", False),
        (False, "0", "0", False),  # a child of a rank
    ],
)
def test_one_process_of_a_machine_speaks(
    pid: bool, started_in: str | None, rank: str | None, speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script, or the first rank of each machine; never the children of these."""
    settings = {"pid": os.getpid() if pid else 1, "rank": started_in, "own": 3}
    monkeypatch.setenv("FASTLOAD_RUN", json.dumps(settings))
    for variable in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
        if rank is not None:
            monkeypatch.setenv(variable, rank)
    assert settings_here() == (settings, speaks)
    assert json.loads(os.environ["FASTLOAD_RUN"]) == {**settings, "rank": rank}


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_a_script_that_sets_its_rank_are_silent(method: str, places: Path) -> None:
    """They inherit the variables, and are no ranks."""
    (places / "my_hook.py").write_text(
        "import os\nfrom fastload.integrations.bootstrap import settings_here\n"
        "def called():\n    print(settings_here()[1], flush=True)\n"
    )
    (places / "script.py").write_text(
        "import multiprocessing, os, torch\n"
        "if __name__ == '__main__':\n"
        "    os.environ.update(RANK='0', LOCAL_RANK='0')\n"
        f"    process = multiprocessing.get_context({method!r}).Process(target=print, args=('worker',))\n"
        "    process.start()\n"
        "    process.join()\n"
    )
    become = f"become_python([{str(places / 'script.py')!r}], 'my_hook:called')"
    code = f"from fastload.cli.script import become_python; {become}"
    assert run(code, [places, ROOT]) == ["True", "False", "worker"]
