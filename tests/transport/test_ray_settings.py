"""`worker_type="ray"` where there is no Ray: which arguments go together, and what an error advises."""

from __future__ import annotations

import builtins
import pickle
import sys
import types
from typing import Any

import pytest

import fastload
from fastload.errors import WorkerStartError
from fastload.system.logs import say_once
from tests.kit import datasets

IMAGES = datasets.Made(datasets.image, 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"worker_type": "rays"},
            'worker_type should be "process", "thread", "ray" or fastload.RayWorkers(...), but got \'rays\'',
        ),
        (
            {"worker_type": "ray", "multiprocessing_context": "fork"},
            'multiprocessing_context is for worker processes, but worker_type="ray": omit one',
        ),
        ({"worker_type": "ray", "num_workers": "auto"}, "pass a number, such as the cluster's free CPUs"),
        (
            {"worker_type": fastload.RayWorkers(num_cpus=2), "num_workers": "auto"},
            "worker_type=fastload.RayWorkers(num_cpus=2)",
        ),
    ],
)
def test_arguments_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    """Each is an error that says what to change."""
    with pytest.raises(ValueError, match=r"ray|worker_type") as caught:
        iter(fastload.DataLoader(IMAGES, **{"num_workers": 1, **options}))

    assert message in str(caught.value)


def test_equal_options_make_equal_workers() -> None:
    """Also after a pickle."""
    workers = fastload.RayWorkers(name="reader", num_cpus=2)
    assert workers == pickle.loads(pickle.dumps(workers)) != fastload.RayWorkers(num_cpus=2)
    assert workers.options["num_cpus"] == 2


def test_what_needs_no_ray(recwarn: pytest.WarningsRecorder) -> None:
    """Reading without workers. Streams and more workers than CPUs are no mistake: actors run elsewhere."""
    assert len(list(fastload.DataLoader(IMAGES, 4, worker_type="ray"))) == 3
    assert fastload.DataLoader(datasets.Stream(), num_workers=500, worker_type="ray").worker_type == "ray"
    assert recwarn.list == []


def test_workers_of_ray_are_shown_as_they_are_written() -> None:
    """By repr(), and so in errors about a loader's arguments."""
    workers = fastload.RayWorkers(num_cpus=2)
    assert repr(workers) == "fastload.RayWorkers(num_cpus=2)"
    workers = fastload.RayWorkers(num_cpus=0, name="a")
    assert repr(workers) == "fastload.RayWorkers(num_cpus=0, name='a')"
    assert repr(fastload.RayWorkers()) == "fastload.RayWorkers()"


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The error names the extra, and no advice about actors comes before it."""
    say_once.cache_clear()
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.split(".")[0] == "ray":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)

    with pytest.raises(ImportError, match=r'pip install "fastload-torch\[ray\]"'):
        iter(fastload.DataLoader(IMAGES, num_workers=1, worker_type="ray"))
    assert caplog.text == ""


def _no_cluster(address: str | None, **options: Any) -> None:
    raise ConnectionError(address)


def test_there_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is started unasked, and the error says how to start one."""
    module: Any = types.ModuleType("ray")
    module.exceptions = types.ModuleType("ray.exceptions")
    module.is_initialized, module.init = bool, _no_cluster
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, "ray.exceptions", module.exceptions)

    with pytest.raises(WorkerStartError, match="no Ray cluster: start one with 'ray start --head', or call"):
        iter(fastload.DataLoader(IMAGES, num_workers=1, worker_type="ray"))


def test_an_actor_runs_no_other_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spec would be read wrongly; the error names both releases."""
    from fastload.workers.ray_pool import load_plan

    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))

    with pytest.raises(WorkerStartError, match=r"the consumer runs fastload 0\.0\.1, but .* has "):
        load_plan([None], "0.0.1")
