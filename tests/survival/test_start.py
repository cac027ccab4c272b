"""How workers start: quiet, with torch's seeds and settings, and with clear words when they cannot."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import fastload
from tests.kit import datasets
from tests.kit.processes import AS_A_SCRIPT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.processes import Interpreter


def settings_of_worker(index: int) -> Any:
    """Before and after OpenCV, which reads its variable, is imported."""
    variable = os.environ["OPENCV_FOR_THREADS_NUM"]
    import cv2

    return torch.get_num_threads(), cv2.getNumThreads(), variable, os.environ["NO_ALBUMENTATIONS_UPDATE"]


@pytest.mark.parametrize(("method", "users"), [("fork", None), ("fork", "3"), ("forkserver", None)])
def test_a_worker_has_one_thread(method: str, users: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch and OpenCV have one, unless the user says more to a later OpenCV; nobody asks the network."""
    monkeypatch.delenv("NO_ALBUMENTATIONS_UPDATE")
    monkeypatch.delenv("OPENCV_FOR_THREADS_NUM", raising=False)
    if users is not None:
        monkeypatch.setenv("OPENCV_FOR_THREADS_NUM", users)
    dataset = datasets.Made(settings_of_worker, 1)

    (found,) = fastload.DataLoader(dataset, None, num_workers=1, multiprocessing_context=method)

    assert found[:1] + found[2:] == [1, users or "1", "1"]
    assert users or found[1] == 1


_INTERACTIVE = """
import fastload

class Typed:
    def __len__(self): return 2
    def __getitem__(self, index): return index

try:
    list(fastload.DataLoader(Typed(), num_workers=1, multiprocessing_context="spawn"))
except (fastload.errors.WorkerStartError, fastload.errors.WorkerDiedError) as error:
    print(error)

print([int(x) for x in fastload.DataLoader(Typed(), num_workers=1, multiprocessing_context="fork")])
"""


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (
            "sys.modules['cloudpickle'] = None",
            ["cannot unpickle the dataset", "in a notebook", 'multiprocessing_context="fork"'],
        ),
        (  # as Python has it for a script on standard input
            "sys.modules['__main__'].__file__ = '<stdin>'",
            ["exited with code 1", "could not start: see stderr"],
        ),
    ],
    ids=["notebook", "standard input"],
)
def test_a_dataset_that_no_worker_can_import_is_refused(
    before: str, told: Any, interpreter: Interpreter
) -> None:
    """One that was typed, or a script that a worker could not run again; under fork it works."""
    out = interpreter.run(before + _INTERACTIVE, exits=False).stdout

    assert all(text in out for text in told)
    assert "[0, 1]" in out


def test_a_missing_main_guard_under_spawn_is_explained(tmp_path: Path, interpreter: Interpreter) -> None:
    """The error in the parent points to the guard, and the child says so itself, and blames no attribute."""
    script = tmp_path / "unguarded.py"
    options = "num_workers=1, multiprocessing_context='spawn'"
    script.write_text(f"import fastload\nlist(fastload.DataLoader([1, 2, 3], {options}))\n")
    done = interpreter.run(AS_A_SCRIPT, str(script))

    assert done.returncode == 1
    assert "if __name__ == '__main__':" in done.stderr.rstrip().splitlines()[-1]
    assert "bootstrapping phase" in done.stderr
    assert "cannot be sent" not in done.stderr


_PRELOAD = """
import multiprocessing.forkserver as server
from fastload.workers import process

server.ensure_running = lambda: None
process.start_helpers("forkserver")
print(server._forkserver._preload_modules)
"""


@pytest.mark.parametrize(
    ("before", "preloaded"),
    [
        ("", ["__main__", "fastload.workers.preload"]),
        ("import multiprocessing\nmultiprocessing.set_forkserver_preload(['json'])", ["json"]),
        (
            "import fastload\nfastload.CachedDataset",
            ["__main__", "fastload.cache.dataset", "fastload.workers.preload"],
        ),
    ],
    ids=["ours", "the user's", "caches"],
)
def test_what_a_new_fork_server_is_to_import(
    interpreter: Interpreter, before: str, preloaded: list[str]
) -> None:
    """And the caches, if this process has them; one that the user has set up is left as it is."""
    assert interpreter.run(before + _PRELOAD, exits=False).stdout == f"{preloaded}\n"


def test_workers_start_from_a_fork_server_that_was_not_running(interpreter: Interpreter) -> None:
    """It is started, with what it is to import."""
    options = "num_workers=1, multiprocessing_context='forkserver'"
    program = f"import fastload\nprint([*fastload.DataLoader([1, 2], None, {options})])"

    assert interpreter.run(program, exits=False).stdout == "[1, 2]\n"


class Refusing:
    """An object that cannot be unpickled."""

    def __getstate__(self) -> Any:
        return 1

    def __setstate__(self, state: Any) -> None:
        raise FileNotFoundError(2, "No such file", "/data/index.bin")


@pytest.mark.slow
def test_what_a_worker_cannot_unpickle_is_told_with_the_ways_out() -> None:
    """The error is that of a worker that cannot start, not of a batch."""
    dataset: Any = datasets.Made(settings_of_worker, 4)
    dataset.held = Refusing()
    loader = fastload.DataLoader(dataset, num_workers=1, multiprocessing_context="forkserver")

    with pytest.raises(fastload.errors.WorkerStartError) as caught:
        list(loader)

    ways_out = ("top level of a module", "__setstate__", 'multiprocessing_context="fork"')
    for told in ("FileNotFoundError: ", "/data/index.bin", *ways_out):
        assert told in str(caught.value)
    assert caught.value.__notes__[-1] == "fastload: worker 0, at its start"


def test_workers_inside_a_worker_are_refused_as_by_torch() -> None:
    """Daemonic processes have no children."""
    nested = datasets.Made(lambda _: next(iter(fastload.DataLoader([1, 2], num_workers=1))))

    with pytest.raises(AssertionError, match="daemonic processes are not allowed to have children"):
        next(iter(fastload.DataLoader(nested, num_workers=1)))


class Counted(datasets.Made):
    """Counts, through a file, how often it is pickled."""

    path: Any = None

    def __getstate__(self) -> dict[str, Any]:
        with self.path.open("a") as file:
            file.write(".")
        return self.__dict__


@pytest.mark.parametrize(("method", "times"), [("fork", 0), ("forkserver", 1)])
def test_the_dataset_is_pickled_once_for_all_workers(tmp_path: Path, method: str, times: int) -> None:
    """Two workers, one pickle."""
    dataset = Counted(int, 4)
    dataset.path = tmp_path / "count"
    dataset.path.touch()

    got = list(fastload.DataLoader(dataset, None, num_workers=2, multiprocessing_context=method))

    assert got == [0, 1, 2, 3]
    assert len(dataset.path.read_text()) == times
