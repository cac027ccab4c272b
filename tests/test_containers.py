"""In a container: as an unprivileged user, on a read-only disk, with a small /dev/shm, a filter, and limits.

bubblewrap makes it, and Docker where a daemon runs: `docker run --read-only --tmpfs /tmp --cap-drop ALL`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.kit.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kit.processes import Interpreter

pytestmark = pytest.mark.slow

SHM_BYTES = 16 << 20
MB = 1 << 20
NOT_MOUNTED = {"dev", "mnt", "proc", "run", "sys", "tmp"}
# What Docker's default profile denies to users without capabilities, by the numbers of x86-64.
DENIED = """
acct 163 add_key 248 bpf 321 clock_settime 227 delete_module 176 finit_module 313 fsopen 430 init_module 175
io_uring_setup 425 ioperm 173 iopl 172 kexec_load 246 keyctl 250 mbind 237 mount 165 mount_setattr 442
move_mount 429 move_pages 279 name_to_handle_at 303 open_by_handle_at 304 perf_event_open 298 pivot_root 155
quotactl 179 reboot 169 request_key 249 set_mempolicy 238 setns 308 swapon 167 syslog 103 umount2 166
unshare 272 userfaultfd 323
"""
DENIED_AS_MISSING = [435]  # clone3, which libraries then do without

_PROGRAM = """
import errno, json, os, sys
from tests.kit.faults import log_lines, refuse_numbers
if FILTERED:
    refuse_numbers(DENIED, errno.EPERM)
    refuse_numbers(MISSING, errno.ENOSYS)
import numpy as np
from PIL import Image
import fastload

lines = log_lines()
shm = os.statvfs("/dev/shm")
found = {"shm": shm.f_blocks * shm.f_frsize, "uid": os.getuid(), "writable": []}
for folder in ("/", "/tmp", "/mnt"):
    try:
        with open(os.path.join(folder, "fastload-test"), "w"):
            found["writable"].append(folder)
    except OSError:
        pass

photos = os.environ["TMPDIR"] + "/photos"
for index in range(96):
    os.makedirs(f"{photos}/{index % 2}", exist_ok=True)
    image = Image.fromarray(np.full((384, 384, 3), index, np.uint8))
    image.save(f"{photos}/{index % 2}/{index:02}.jpg")
cached = fastload.CachedDataset(fastload.ImageFolder(photos))
for _ in range(2):
    batches = list(fastload.DataLoader(cached, 48, num_workers=2, multiprocessing_context="fork"))
    found["values"] = sorted(int(image[0, 0, 0]) for images, _ in batches for image in images)
    found["batch_bytes"] = batches[0][0].nbytes
    del batches
found["layout"] = cached.cache_info().layout
found["cached"] = cached.cache_info().num_cached
print(json.dumps([found, lines]))
"""


def _in_bubblewrap(writable: str) -> list[str]:
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        pytest.skip("bubblewrap is not installed")
    return [
        *(bubblewrap, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"),
        *("--uid", "1000", "--gid", "1000"),
        *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"),
        *("--size", str(SHM_BYTES), "--tmpfs", "/dev/shm", "--tmpfs", writable, "--clearenv"),
    ]


def _in_docker(writable: str) -> list[str]:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode:
        pytest.skip("there is no Docker here")
    no_files = bytes(10240)  # an archive of none; the folders of this machine are mounted
    made = subprocess.run([docker, "import", "-"], input=no_files, capture_output=True, check=True)
    folders = [path for path in Path("/").iterdir() if path.is_dir() and path.name not in NOT_MOUNTED]
    return [
        *(docker, "run", "--rm", "--network=none", "--read-only", "--cap-drop=ALL"),
        *("--security-opt=no-new-privileges", f"--user={os.getuid()}", f"--shm-size={SHM_BYTES}"),
        *(f"--tmpfs={writable}:mode=1777", *(f"--volume={path}:{path}:ro" for path in [*folders, ROOT])),
        *("--workdir=/", made.stdout.decode().strip()),
    ]


@pytest.mark.parametrize("engine", [_in_bubblewrap, _in_docker])
@pytest.mark.parametrize("writable", ["/tmp", "/mnt"])
def test_loaders_and_caches_work_in_a_container(writable: str, engine: Any, request: Any) -> None:
    """Batches of 20 MB come through with 16 MB of /dev/shm, on a read-only disk, without privileges."""
    command = engine(writable)
    if engine is _in_docker:
        image = command[-1]
        request.addfinalizer(lambda: subprocess.run([command[0], "image", "rm", "-f", image], check=True))
    is_filtered = engine is _in_bubblewrap and platform.machine() == "x86_64"  # Docker has its own filter
    denied = [int(word) for word in DENIED.split()[1::2]]
    settings = f"FILTERED, DENIED, MISSING = {is_filtered}, {denied}, {DENIED_AS_MISSING}"
    path = os.pathsep.join([str(ROOT), *sys.path])
    variables = (f"TMPDIR={writable}", "HOME=/nonexistent", "PYTHONDONTWRITEBYTECODE=1", f"PYTHONPATH={path}")
    run = [*command, "/usr/bin/env", *variables, sys.executable, "-c"]
    options = {"capture_output": True, "text": True, "timeout": 100}
    trial = subprocess.run([*run, "import tests.kit"], **options)
    if trial.returncode:
        pytest.skip(f"this machine makes no containers: {trial.stderr.strip()}")
    done = subprocess.run([*run, f"{settings}\n{_PROGRAM}"], **options)
    assert done.returncode == 0, done.stderr
    found, lines = json.loads(done.stdout)
    assert found["shm"] == SHM_BYTES < found["batch_bytes"]
    assert found["uid"] == (1000 if engine is _in_bubblewrap else os.getuid())
    assert found["writable"] == [writable]
    assert len(found["values"]) == found["cached"] == 96
    assert all(abs(value - index) <= 2 for index, value in enumerate(found["values"]))  # they were JPEGs
    assert found["layout"] == "uniform"
    assert bool(lines) == (writable != "/tmp")  # without a place for the registry, a line says so
    assert all("no registry of shared caches" in line for line in lines)


# --- limits -----------------------------------------------------------------------------------------------

_LIMITED = """
import json, os, sys
for file in sys.argv[1:]:
    with open(file, "w") as procs:
        procs.write(str(os.getpid()))
from fastload.system.budget import available_bytes, cgroup_limit_bytes
from fastload.system.cpus import cpu_quota, worthwhile_cpus
print(json.dumps([cgroup_limit_bytes(), available_bytes(), cpu_quota(), worthwhile_cpus()]))
"""


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    """Groups of processes with 512 MB of memory and half a CPU, of the version that this system has."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    made: list[Path] = []
    try:
        for controller, v1, v2 in (
            ("memory", {"memory.limit_in_bytes": 512 * MB}, {"memory.max": 512 * MB}),
            ("cpu", {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": 50_000}, {"cpu.max": "50000 100000"}),
        ):
            own = [(names, path) for _, names, path in lines if controller in names.split(",")]
            names, path = own[0] if own else ("", next(path for _, names, path in lines if not names))
            group = Path("/sys/fs/cgroup", names, path.lstrip("/"), f"fastload-test-{os.getpid()}")
            if group not in made:
                group.mkdir()
                made.append(group)
            for file, limit in (v1 if names else v2).items():
                (group / file).write_text(str(limit))
    except (OSError, StopIteration) as error:
        for group in made:
            group.rmdir()
        pytest.skip(f"this user makes no groups of processes: {error}")
    yield made
    for group in made:
        group.rmdir()


def test_limits_of_real_groups_are_found(groups: list[Path], interpreter: Interpreter) -> None:
    """A limit on memory and half a CPU, as the kernel writes them in the files of its version."""
    done = interpreter.run(_LIMITED, *(str(group / "cgroup.procs") for group in groups))
    assert done.returncode == 0, done.stderr
    limit, free, quota, cpus = json.loads(done.stdout)
    assert limit == 512 * MB
    assert 0 < free <= 512 * MB
    assert (quota, cpus) == (0.5, 1)


_FILLED = """
import json, os, signal, sys
for file in sys.argv[1:]:
    with open(file, "w") as procs:
        procs.write(str(os.getpid()))
import numpy as np
import fastload
from fastload.system.budget import available_bytes


class Zeros:
    def __len__(self):
        return num_samples

    def __getitem__(self, index):
        return np.full((256, 256, 3), index % 251, np.uint8), index


def child(keeps):
    made = os.fork()
    if made == 0:
        ds = fastload.CachedDataset(Zeros())
        os.read(start[0], 1)
        ds.fill(num_workers=0, progress=False)
        os.write(done[1], b"%12d" % ds.cache_info().nbytes)
        if keeps:
            signal.pause()
        os._exit(0)
    return made


before = available_bytes()
num_samples = int(0.75 * before) // (256 * 256 * 3)
start, done = os.pipe(), os.pipe()
children = [child(keeps=True) for _ in range(2)]
os.write(start[1], b"12")
together = [int(os.read(done[0], 12)) for _ in children]
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
sets = [fastload.CachedDataset(Zeros()) for _ in range(2)]
for ds in sets:
    ds.fill(num_workers=2, progress=False)
print(json.dumps([before, together, [ds.cache_info().nbytes for ds in sets]]))
"""


def test_caches_that_fill_at_the_same_time_stay_within_a_real_limit(
    groups: list[Path], interpreter: Interpreter
) -> None:
    """Two processes that start together and are killed, and two datasets; each could take 75%."""
    files = [str(group / "cgroup.procs") for group in groups]
    done = interpreter.run(_FILLED, *files, exits=False)  # a CUDA build would copy 200 MB when it is unloaded
    assert done.returncode == 0, done.stderr
    before, *sums = [json.loads(done.stdout)[0], *map(sum, json.loads(done.stdout)[1:])]
    assert [nbytes for nbytes in sums if not 0.6 * before < nbytes < 0.9 * before] == []
