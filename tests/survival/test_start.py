"""How workers start: quiet, with torch's seeds and settings, and with clear words when they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

import fastload
from tests.kit import datasets

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.processes import Interpreter


def settings_of_worker(index: int) -> Any:
    """Before and after OpenCV, which reads its variable, is imported."""
    variable = os.environ["OPENCV_FOR_THREADS_NUM"]
    import cv2

    return torch.get_num_threads(), cv2.getNumThreads(), variable, os.environ["NO_ALBUMENTATIONS_UPDATE"]


@pytest.mark.parametrize(
    ("method", "users", "variable"),
    [("fork", None, "1"), ("fork", "3", "3"), pytest.param("forkserver", None, "1", marks=pytest.mark.slow)],
)
def test_a_worker_has_one_thread_and_asks_no_network(
    method: str, users: str | None, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch and OpenCV run on the worker's own core, unless the user says more to a later OpenCV."""
    monkeypatch.delenv("NO_ALBUMENTATIONS_UPDATE")
    monkeypatch.delenv("OPENCV_FOR_THREADS_NUM", raising=False)
    if users is not None:
        monkeypatch.setenv("OPENCV_FOR_THREADS_NUM", users)
    loader = fastload.DataLoader(
        datasets.Made(settings_of_worker, 1), None, num_workers=1, multiprocessing_context=method
    )

    (found,) = loader
    assert found[:1] + found[2:] == [1, variable, "1"]
    assert users or found[1] == 1


_INTERACTIVE = """
import fastload

class Typed:
    def __len__(self): return 2
    def __getitem__(self, index): return index

try:
    list(fastload.DataLoader(Typed(), num_workers=1, multiprocessing_context="spawn"))
except fastload.errors.WorkerStartError as error:
    print(error)

print([int(x) for x in fastload.DataLoader(Typed(), num_workers=1, multiprocessing_context="fork")])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("notebook", ["cannot unpickle the dataset", "in a notebook", 'multiprocessing_context="fork"']),
        ("standard input", ["there is no file", "multiprocessing_context='fork'"]),
    ],
)
def test_a_dataset_that_no_worker_can_import_is_refused_under_spawn_with_the_way_out(
    place: str, told: list[str], interpreter: Interpreter
) -> None:
    """One that was typed, or a script that a worker could not run again; under fork it works."""
    if place == "notebook":
        out = interpreter.run(_INTERACTIVE).stdout
    else:
        out = subprocess.run(
            [sys.executable], input=_INTERACTIVE, capture_output=True, text=True, timeout=100, check=True
        ).stdout

    assert all(text in out for text in told)
    assert "[0, 1]" in out


@pytest.mark.slow
def test_a_missing_main_guard_under_spawn_is_explained(tmp_path: Path) -> None:
    """The error in the parent points to the guard, and the child says so itself."""
    script = tmp_path / "unguarded.py"
    options = "num_workers=1, multiprocessing_context='spawn'"
    script.write_text(f"import fastload\nlist(fastload.DataLoader([1, 2, 3], {options}))\n")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False
    )

    assert done.returncode == 1
    assert "if __name__ == '__main__':" in done.stderr.rstrip().splitlines()[-1]
    assert "bootstrapping phase" in done.stderr


_PRELOAD = """
import multiprocessing.forkserver as server
import fastload

loader = fastload.DataLoader([1, 2], num_workers=1, multiprocessing_context="forkserver")
print([int(x) for x in loader], server._forkserver._preload_modules)
"""


class Holder(datasets.Made):
    """A dataset that holds an object."""

    held: Any = None


def _made_here() -> type:
    """A class that pickle finds in this module, but only in this process."""
    kind = type("MadeHere", (), {"__module__": __name__})
    globals()["MadeHere"] = kind
    return kind


def _in_a_module_made_here() -> type:
    """A class in a module that exists in this process alone."""
    module = sys.modules["made_here"] = types.ModuleType("made_here")
    module.Kind = kind = type("Kind", (), {"__module__": "made_here"})  # type: ignore[attr-defined]
    return kind


class Refusing:
    """An object that cannot be unpickled."""

    def __getstate__(self) -> Any:
        return 1

    def __setstate__(self, state: Any) -> None:
        raise FileNotFoundError(2, "No such file", "/data/index.bin")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "make", "cause", "advice"),
    [
        ("spawn", _made_here, "AttributeError: .*MadeHere", "top level of a module"),
        ("forkserver", _in_a_module_made_here, "ModuleNotFoundError: .*'made_here'", "top level of a module"),
        ("forkserver", lambda: Refusing, "FileNotFoundError: .*/data/index.bin", "__setstate__"),
    ],
    ids=["class", "module", "state"],
)
def test_what_a_worker_cannot_unpickle_is_told_with_the_way_out(
    method: str, make: Any, cause: str, advice: str
) -> None:
    """The error is that of a worker that cannot start, not of a batch."""
    dataset = Holder(settings_of_worker, 4)
    dataset.held = make()()
    loader = fastload.DataLoader(dataset, num_workers=1, multiprocessing_context=method)

    with pytest.raises(fastload.errors.WorkerStartError, match=cause) as caught:
        list(loader)

    assert advice in str(caught.value)
    assert 'multiprocessing_context="fork"' in str(caught.value)
    assert caught.value.__notes__[-1] == "fastload: worker 0, at its start"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "preloaded"),
    [
        ("", "['__main__', 'fastload.workers.preload']"),
        ("import multiprocessing\nmultiprocessing.set_forkserver_preload(['json'])\n", "['json']"),
        (
            "import fastload\nfastload.CachedDataset\n",
            "['__main__', 'fastload.cache.dataset', 'fastload.workers.preload']",
        ),
    ],
    ids=["ours", "the user's", "caches"],
)
def test_a_fork_server_that_is_not_running_yet_imports_torch_once(
    interpreter: Interpreter, before: str, preloaded: str
) -> None:
    """And the caches, if this process has them; one that the user has set up is left as it is."""
    assert interpreter.run(before + _PRELOAD, exits=False).stdout == f"[1, 2] {preloaded}\n"


def test_workers_inside_a_worker_are_refused_as_by_torch() -> None:
    """Daemonic processes have no children."""
    loader = fastload.DataLoader(datasets.Made(_nested, 1), num_workers=1)

    with pytest.raises(AssertionError, match="daemonic processes are not allowed to have children"):
        next(iter(loader))


def _nested(index: int) -> Any:
    return next(iter(fastload.DataLoader([1, 2], num_workers=1)))


class Counted(datasets.Made):
    """Counts, through a file, how often it is pickled."""

    def __init__(self, path: Any) -> None:
        super().__init__(int, 4)
        self.path = str(path)

    def __getstate__(self) -> dict[str, Any]:
        with open(self.path, "a") as file:
            file.write(".")
        return self.__dict__


@pytest.mark.parametrize(
    ("method", "times"), [("fork", 0), pytest.param("forkserver", 1, marks=pytest.mark.slow)]
)
def test_the_dataset_is_pickled_once_for_all_workers_and_not_at_all_under_fork(
    tmp_path: Any, method: str, times: int
) -> None:
    """Two workers, one pickle."""
    count = tmp_path / "count"
    count.touch()

    got = [int(x) for x in fastload.DataLoader(Counted(count), num_workers=2, multiprocessing_context=method)]

    assert got == [0, 1, 2, 3]
    assert len(count.read_text()) == times
