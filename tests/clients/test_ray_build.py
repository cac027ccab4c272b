"""Caches that a Ray cluster of two nodes builds: nodes and drivers that die, a full disk, one report."""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from fastload.cache.build.build import build_lmdb
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from tests.cache.build_zoo import BrokenImages
from tests.cache.test_on_executor import files_at
from tests.clients.harness import FIRST_LINES, Started, run

if TYPE_CHECKING:
    from pathlib import Path

NUM_SAMPLES = 64
LIMIT_S = 150.0

# Both nodes run on this machine. Workers of a node find the node's variables in their environment.
SETUP = """
import os, resource, signal, subprocess, sys, threading, time
import ray
from fastload.errors import CacheError, TooManyFailuresError
from fastload.integrations.ray import build_cache
from tests.cache.build_zoo import BrokenImages
from tests.clients.ray_checks import raised, two_nodes, wait_until


class Held(BrokenImages):
    '''Marks each node that reads; a node waits at its first sample while the file `hold-NODE` is there.'''

    def sample(self, index):
        node = os.environ.get("NODE", "head")
        (FOLDER / f"reads-{node}").write_text(str(os.getpid()))
        while (FOLDER / f"hold-{node}").exists():
            time.sleep(0.02)  # a test removes the file, or ends this process
        return super().sample(index)


def images():
    if "DISK_BYTES" in os.environ:  # the kernel refuses longer files, as on a full disk
        limit = int(os.environ["DISK_BYTES"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return Held(64, bad=[int(word) for word in os.environ.get("BAD", "").split()])


def start():
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
"""

# What the driver does on the cluster; the second node may wait.
ON_TWO_NODES = {
    "a node dies": """
(FOLDER / "hold-second").touch()

def kill():
    wait_until((FOLDER / "reads-second").exists, "the second node does not read")
    cluster.remove_node(node, allow_graceful=False)

threading.Thread(target=kill, daemon=True).start()
cache = build_cache(images, FOLDER / "cache", address=cluster.address, shards=6)
assert (FOLDER / "hold-second").exists()
""",
    "the driver dies": """
(FOLDER / "hold-second").touch()
driver = subprocess.Popen([sys.executable, sys.argv[0], cluster.address])
wait_until((FOLDER / "reads-second").exists, "the second node does not read")
wait_until(lambda: list((FOLDER / "cache.partial").glob("0*.lmdb")), "no shard is finished")
driver.send_signal(signal.SIGKILL)
driver.wait()
held = int((FOLDER / "reads-second").read_text())
wait_until(lambda: not os.path.exists(f"/proc/{held}"), "Ray has not ended the task of a driver that died")
finished = sorted(path.name for path in (FOLDER / "cache.partial").glob("0*.lmdb"))
assert 0 < len(finished) < 6, finished
inodes = {name: (FOLDER / "cache.partial" / name).stat().st_ino for name in finished}
(FOLDER / "hold-second").unlink()
cache = build_cache(images, FOLDER / "cache", address=cluster.address)
assert cache.description.num_shards == 6
assert inodes == {name: (FOLDER / "cache" / name).stat().st_ino for name in finished}
""",
    "a disk is full": """
cache = build_cache(images, FOLDER / "cache", address=cluster.address, shards=6, max_retries=20)
assert (FOLDER / "reads-second").exists()
""",
}

# What the driver does on one node.
FULL_EVERYWHERE = """
os.environ["DISK_BYTES"] = "5000"
start()
del os.environ["DISK_BYTES"]
text = raised(CacheError, lambda: build_cache(images, FOLDER / "cache", shards=2, max_retries=1))
assert text.startswith("2 of 2 shards were not built: shard 1/2 on "), text
assert text.count("cannot write the cache") == 2, text
assert "Traceback" not in text, text
"""
SKIPPING = """
os.environ["BAD"] = "3 40 63"
start()
options = {"shards": 4, "on_error": "skip", "max_errors": 2}
text = raised(CacheError, lambda: build_cache(images, FOLDER / "cache", shards=4))
assert text.startswith("3 of 4 shards were not built: shard 1/4 on "), text
assert text.count("ImageReadError: cannot read the image") == 3, text
text = raised(TooManyFailuresError, lambda: build_cache(images, FOLDER / "cache", **options))
assert text.startswith("3 samples could not be read"), text
build_cache(images, FOLDER / "cache", on_error="skip", max_errors=1.0)
"""
INTERRUPTED = """
start()
os.environ["NODE"] = "driver"  # its own reads are not held
try:
    build_cache(images, FOLDER / "cache", shards=4)
except KeyboardInterrupt:
    (FOLDER / "interrupted").touch()
    assert not (FOLDER / "cache.partial").exists()
(FOLDER / "hold-head").unlink()
assert build_cache(images, FOLDER / "cache").verify() == []
"""


def build_on_two_nodes(body: str, folder: Path, **second: str) -> None:
    """Run a script that starts a cluster, and builds on it if it has an argument."""
    body = f"cluster, node = two_nodes(1, 1, env_vars={second | {'NODE': 'second'}})\n{body}"
    body = textwrap.indent(f"{body}\nassert cache.verify() == []\ncluster.shutdown()", "    ")
    driver = 'build_cache(images, FOLDER / "cache", address=sys.argv[1], shards=6)'
    is_main = 'if __name__ == "__main__"'
    script = f"{SETUP}\n{is_main} and sys.argv[1:]:\n    {driver}\nel{is_main}:\n{body}\n"
    run(script, folder, "torch", limit_s=LIMIT_S).check()


def on_one_node(body: str) -> str:
    return SETUP + '\nif __name__ == "__main__":\n' + textwrap.indent(body + "ray.shutdown()\n", "    ")


def local_twin(folder: Path, **options: Any) -> Path:
    """The cache that one process builds with the id and the time of the cache in the folder."""
    plan = LMDBCache(folder / "cache").description
    partial = folder / "twin.partial"
    partial.mkdir()
    (partial / "plan.json").write_text(json.dumps({"version": 2, "plan": asdict(plan)}))
    bad = options.pop("bad", ())
    images, twin = BrokenImages(NUM_SAMPLES, bad=bad), folder / "twin"
    build_lmdb(images, twin, shards=plan.num_shards, num_workers=0, **options)
    return twin


@pytest.mark.parametrize("fault", ON_TWO_NODES)
def test_a_cluster_builds_the_cache_of_one_process(fault: str, tmp_path: Path) -> None:
    """Byte for byte; also if a node dies, the driver is killed and started again, or one disk is full."""
    second = {"DISK_BYTES": "5000"} if fault == "a disk is full" else {}
    build_on_two_nodes(ON_TWO_NODES[fault], tmp_path, **second)

    assert files_at(tmp_path / "cache") == files_at(local_twin(tmp_path))
    assert not (tmp_path / "cache.partial").exists()


def test_a_disk_that_is_full_everywhere_is_an_error(tmp_path: Path) -> None:
    """It names the shards, the machine and the reason, in one line each."""
    run(on_one_node(FULL_EVERYWHERE), tmp_path, "torch", limit_s=LIMIT_S).check()


def test_samples_that_cannot_be_read(tmp_path: Path) -> None:
    """Each fails its shard; too many end the build; otherwise one report lists them."""
    run(on_one_node(SKIPPING), tmp_path, "torch", limit_s=LIMIT_S).check()
    twin = local_twin(tmp_path, bad=[3, 40, 63], on_error="skip", max_errors=1.0)

    assert files_at(tmp_path / "cache") == files_at(twin)
    reports = [(tmp_path / f"{name}.errors.jsonl").read_text() for name in ("cache", "twin")]
    assert reports[0] == reports[1]


def test_ctrl_c_ends_the_tasks(tmp_path: Path) -> None:
    """They leave nothing of their unfinished shards, and the next run builds the cache."""
    (tmp_path / "hold-head").touch()
    started = Started(FIRST_LINES + on_one_node(INTERRUPTED), tmp_path)
    os.symlink(tmp_path / "reads-head", tmp_path / "ready-0")  # ready when a task reads
    started.signal_when_ready(2)
    started.end(LIMIT_S).check()

    assert (tmp_path / "interrupted").exists()
