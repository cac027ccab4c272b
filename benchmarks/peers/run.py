"""How many images a second other loaders deliver: the same images, crop, output, batch size and workers.

Question: for images in memory, for images in memory with a random crop, and for a folder of JPEGs, how fast
is fastload beside FFCV, DALI, SPDL, Grain, WebDataset, LitData, MosaicML Streaming and torchdata, each
configured as its own documentation advises for the task? The files `*_loader.py` beside this one are the
configurations, and name the pages.

Held out: start-up and conversion to a contender's own format. Each run is a fresh process of the contender's
environment (`make bench-peers` makes them from requirements/*.txt); its first epoch is checked and not
counted. The contenders run in turn. All have two workers, processes or threads. Batches end as uint8 tensors
on the host, `(B, H, W, 3)`, which nobody reads. "In memory" is the contender's own way to it: an array in the
process, or, for FFCV, WebDataset, LitData and MosaicML Streaming, their files in the page cache, which holds
them before each run. A contender that cannot do a task has a row that says why.

Command: python benchmarks/peers/run.py PHOTOS [--only TASK ...] [--contenders TEXT ...] [--runs 5] [--quick]
    [--save]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from common import TASKS, Job, Task  # noqa: E402 (it lies beside this file)
from harness import RESULTS, Contender, commit, machine, report, save  # noqa: E402 (it lies above)

BUILD = HERE.parents[1] / "build" / "peers"
RUN_LIMIT_S = 600
QUICK_SHARE = 4
CACHED = ("cached_224", "cached_32", "cached_crop", "small_images")


@dataclass
class Peer:
    """A way to do the tasks.

    Attributes:
        label: What the table calls it.
        group: Rows of a group compete for its best.
        module: Its file in this folder.
        environment: Folder of its environment below build/peers; empty for this process's own.
        variant: Given to its file.
        tasks: The tasks that it has a row for; None for all.
        version: Its release, once a run has told.
        failure: Why it cannot do the task at hand.
    """

    label: str
    group: str
    module: str
    environment: str = ""
    variant: str = ""
    tasks: tuple[str, ...] | None = None
    version: str = ""
    failure: str = ""
    figures: list[float] = field(default_factory=list)

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return BUILD / self.environment / "bin" / "python" if self.environment else Path(sys.executable)


PEERS = [
    Peer("torch", "torch", "torch_loader"),
    Peer("torch, bulk", "torch bulk", "torch_loader", variant="bulk", tasks=("cached_224", "cached_32")),
    Peer("fastload, import only", "fastload, import only", "fastload_loader"),
    Peer(
        "fastload, regions", "fastload, regions", "fastload_loader", variant="regions", tasks=("jpeg_folder",)
    ),
    Peer(
        "fastload, batch_transform",
        "fastload, batch_transform",
        "fastload_loader",
        variant="batches",
        tasks=("small_images",),
    ),
    Peer("fastload, cached", "fastload, cached", "fastload_loader", variant="cached"),
    Peer("fastload, cached, threads", "fastload, cached", "fastload_loader", variant="threads", tasks=CACHED),
    Peer("FFCV", "FFCV", "ffcv_loader", "ffcv"),
    Peer("DALI, CPU", "DALI", "dali_loader", "dali"),
    Peer("SPDL, threads", "SPDL", "spdl_loader", "shared", "threads"),
    Peer("SPDL, processes", "SPDL", "spdl_loader", "shared", "processes"),
    Peer("SPDL, spdl.io", "SPDL", "spdl_loader", "shared", "spdl.io", ("jpeg_folder",)),
    Peer("Grain, threads", "Grain", "grain_loader", "shared", "threads"),
    Peer("Grain, processes", "Grain", "grain_loader", "shared", "processes"),
    Peer("WebDataset", "WebDataset", "webdataset_loader", "shared"),
    Peer("LitData", "LitData", "litdata_loader", "shared"),
    Peer("MosaicML Streaming", "MosaicML Streaming", "mosaic_loader", "mosaic"),
    Peer("torchdata, threads", "torchdata", "torchdata_loader", "shared"),
]


def fewer(task: Task) -> Task:
    """The task with fewer images, still whole batches for each of two workers."""
    step = 2 * task.batch_size
    return dataclasses.replace(task, num_images=task.num_images // QUICK_SHARE // step * step)


def some_photos(folder: Path, count: int) -> list[tuple[str, int]]:
    """The first photographs of each class, equally many, and the numbers of their classes."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    each, rest = divmod(count, len(classes))
    found = [
        (str(photo.resolve()), label)
        for label, name in enumerate(classes)
        for photo in sorted(name.glob("*.jpg"))[: each + (label < rest)]
    ]
    if len(found) != count:
        raise ValueError(f"{folder} has too few photographs: {count} are needed, as `make photos` draws them")
    return found


def job_of(task: Task, photos: Path) -> Job:
    """The job of a task, with its images made."""
    store = BUILD / "data" / f"{task.name}-{task.num_images}"
    store.mkdir(parents=True, exist_ok=True)
    images = store / "images.npy"
    if task.side and not images.exists():
        shape = (task.num_images, task.side, task.side, 3)
        partial = images.with_suffix(".partial.npy")
        np.save(partial, np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
        partial.rename(images)
    return Job(task, images, [] if task.side else some_photos(photos, task.num_images), store)


def ask(peer: Peer, job: Job, seconds: float) -> dict[str, Any]:
    """Run a contender in its own process and give its answer."""
    own = dataclasses.replace(job, work=job.work / peer.module)
    if not (own.work / ".ready").exists():
        shutil.rmtree(own.work, ignore_errors=True)  # what an interrupted conversion left
        own.work.mkdir()
    if not peer.python.exists():
        return {"cannot": "its environment could not be made"}
    path = own.work / "job.json"
    own.save(path)
    command = [str(peer.python), str(HERE / "contender.py"), peer.module, str(path)]
    command += ["--variant", peer.variant, "--seconds", str(seconds)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=os.environ | ({} if peer.environment else {"PYTHONPATH": str(HERE.parents[1])}),  # this checkout
    )
    try:
        out, err = process.communicate(timeout=RUN_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"cannot": f"one run took more than {RUN_LIMIT_S} s"}
    (own.work / "log.txt").write_text(f"{out}\n{err}")
    try:
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"cannot": f"its process ended with code {process.returncode}"}
    return found


def bring_into_page_cache(job: Job, module: str) -> None:
    """Read all files of a contender in sequence, so no run waits for the disk."""
    files = [path for path in (job.work / module).rglob("*") if path.is_file()]
    for path in [*files, job.images, *(Path(name) for name, _ in job.photos)]:
        if path.exists():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass


def objection(answer: dict[str, Any], job: Job) -> str:
    """What is wrong with what a contender delivered; empty if nothing is."""
    if "cannot" in answer:
        return str(answer["cannot"])
    side = job.task.out_side
    expected = {"num_images": job.task.num_images, "labels_sum": sum(job.labels), "dtype": "torch.uint8"}
    if not job.task.is_random:
        expected["pixels_sum"] = pixels_sum(job)
    for name, value in expected.items():
        if answer[name] != value:
            return f"{name} is {answer[name]} instead of {value}"
    if sorted(answer["shape"]) != sorted((side, side, 3)):
        return f"images are of the shape {answer['shape']}"
    return ""


def pixels_sum(job: Job) -> int:
    """The sum of all bytes of the images, which is kept beside them."""
    kept = job.images.with_suffix(".sum")
    if not kept.exists():
        images = np.load(job.images, mmap_mode="r")
        kept.write_text(str(sum(int(image.sum(dtype=np.int64)) for image in images)))
    return int(kept.read_text())


def question(task: Task, peers: list[Peer], photos: Path, runs: int, seconds: float) -> dict[str, Any]:
    """All contenders at one task."""
    job = job_of(task, photos)
    peers = [
        dataclasses.replace(peer, figures=[], failure="")
        for peer in peers
        if (peer.tasks is None or task.name in peer.tasks)
        and (not task.modules or peer.module in task.modules)
    ]
    for peer in peers:
        peer.failure = str(ask(peer, job, 0).get("cannot", ""))  # converts, where nothing is timed
    layouts: dict[str, str] = {}
    for run in range(runs):
        for peer in peers:
            if peer.failure:
                continue
            bring_into_page_cache(job, peer.module)
            answer = ask(peer, job, seconds)
            peer.failure = objection(answer, job)
            if peer.failure:
                continue
            peer.version = answer["version"]
            layouts[peer.label] = "NHWC" if answer["shape"][-1] == 3 else "NCHW"
            peer.figures.append(answer["images_per_s"])
            print(
                f"{task.name}, run {run + 1}: {peer.label}: {answer['images_per_s']:,.0f} images/s",
                flush=True,
            )
    able = [peer for peer in peers if not peer.failure]
    rows = [Contender(peer.label, peer.group, lambda: 0.0, figures=peer.figures) for peer in able]
    answer = report(task.title, "images/s", rows, ratios(task, able))
    for peer in able:
        answer["rows"][peer.label] |= {"version": peer.version, "layout": layouts[peer.label]}
    unable = {peer.label: peer.failure for peer in peers if peer.failure}
    for label, reason in unable.items():
        print(f"  {label}: cannot: {reason}")
        answer["rows"][label] = {"cannot": reason}
    groups = {peer.group for peer in able}
    answer["cannot"] = {
        f"{ours(task)} / {peer.group}": peer.failure
        for peer in peers
        if peer.failure and peer.group not in groups
    }
    return answer


def ours(task: Task) -> str:
    """Which row of fastload's does the job that the task asks for: decoding each epoch, or keeping images."""
    return "fastload, cached" if task.name in CACHED else "fastload, regions"


def ratios(task: Task, able: list[Peer]) -> dict[str, tuple[float, float]]:
    """Our median over the best median of each other contender."""
    best: dict[str, tuple[float, str]] = {}
    for peer in able:
        median = float(np.median(peer.figures))
        name = (
            peer.group
            if peer.module in ("torch_loader", "fastload_loader")
            else f"{peer.group} {peer.version}"
        )
        best[peer.group] = max(best.get(peer.group, (0.0, "")), (median, name))
    if ours(task) not in best:
        return {}
    base = best[ours(task)][0]
    found = {
        f"{ours(task)} / {name}": (base / median, 1.0)
        for group, (median, name) in best.items()
        if not group.startswith("fastload")
    }
    if task.name not in CACHED:
        for other in ("fastload, import only", "fastload, cached"):
            if other in best and "torch" in best:
                found[f"{other} / torch"] = (best[other][0] / best["torch"][0], 1.0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("photos", type=Path, help="a folder of photographs, as `make photos` draws it")
    parser.add_argument("--only", nargs="+", choices=[task.name for task in TASKS], default=[])
    parser.add_argument(
        "--contenders", nargs="+", metavar="TEXT", help="those whose label contains one of these"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="how long a run counts epochs at least")
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of the images and one run: does it work?"
    )
    parser.add_argument(
        "--save",
        action="store_true",
        help="write benchmarks/results/peers.json; with --only, its other tasks stay as they are",
    )
    args = parser.parse_args()
    if args.quick and args.save:
        parser.error("--quick only shows whether all contenders work: its figures are not saved")
    tasks = [task for task in TASKS if not args.only or task.name in args.only]
    runs, seconds = args.runs, args.seconds
    if args.quick:
        tasks = [fewer(task) for task in tasks]
        runs, seconds = 1, min(seconds, 1.0)
    wanted = [text.lower() for text in args.contenders or [""]]
    peers = [peer for peer in PEERS if any(text in peer.label.lower() for text in wanted)]
    answers = [question(task, peers, args.photos, runs, seconds) for task in tasks]
    if args.save:
        path = RESULTS / "peers.json"
        found = {answer["title"]: answer | {"commit": commit()} for answer in answers}
        if args.only and path.exists():
            before = json.loads(path.read_text())
            if before["machine"] != machine():
                raise SystemExit(f"{path} has figures of another machine: run all tasks")
            found = {old["title"]: {"commit": before["commit"]} | old for old in before["questions"]} | found
        answers = [found[task.title] for task in TASKS if task.title in found]
        save("peers", f"python benchmarks/peers/run.py PHOTOS --runs {runs} --save", answers)


if __name__ == "__main__":
    main()
