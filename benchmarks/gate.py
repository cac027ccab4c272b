"""Is the new code as fast as the old one? Two checkouts, in turn, on the rows that must not get slower.

Question: on each row of gate_rows.py, what is the rate of NEW divided by that of OLD? Above 1, NEW is faster.

A checkout is a folder or a revision of this repository. Each measurement is a process of its own that imports
one of the two; both read datasets of this folder. After one run of each that does not count, they take turns,
and who begins alternates. The ratio is that of the medians; its range is that of the pairs. The photographs
are copied first, so nobody else's cache has them and the page cache does.

The CPU time that other processes take meanwhile is measured; programs that were disturbed run once more at
the end, and the less disturbed runs count. Rows that still were have a mark.

Held out: disks (all files come from the page cache), the GPU, and torchvision's compiled part. Where
torchvision is not installed, its rows make the calls that its transforms make.

The exit status is 1 if a median is below its floor, or a row could not be measured.

Command: python benchmarks/gate.py OLD NEW [--photos build/photos] [--only PATTERN] [--runs 3] [--save [PATH]]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gate_rows
from gate_rows import PROGRAMS, Program, Row, Settings
from harness import RESULTS, commit, machine
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
DISTURBED_CPUS = 0.1  # that others use, above which a run is disturbed
SETTLED_S = 3  # files that were just written are not remembered
TIMEOUT_S = 300
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Measured:
    """A program's runs on both checkouts.

    Attributes:
        old: For each run, a figure for each row.
        new: The same of the other checkout.
        other_cpus: The CPUs that other processes used, during the most disturbed run.
        error: Why there are no figures, if there are none.
    """

    old: Sequence[Sequence[float]] = ()
    new: Sequence[Sequence[float]] = ()
    other_cpus: float = 0.0
    error: str | None = None

    @property
    def is_disturbed(self) -> bool:
        """Whether others used the CPUs."""
        return self.other_cpus > DISTURBED_CPUS

    def answer(self, number: int, row: Row) -> dict[str, Any]:
        """The figures and ratios of one row, as plain data."""
        head = {
            "unit": row.unit,
            "floor": row.floor,
            "other_cpus": round(self.other_cpus, 3),
            "is_disturbed": self.is_disturbed,
        }
        if self.error is not None:
            return {**head, "error": self.error, "passes": False}
        old, new = ([figures[number] for figures in runs] for runs in (self.old, self.new))
        if min(old) <= 0:
            return {**head, "old": old, "new": new, "error": "OLD has a rate of 0", "passes": False}
        pairs = [ours / theirs for theirs, ours in zip(old, new, strict=True)]
        ratio = statistics.median(new) / statistics.median(old)
        ratios = {"ratio": ratio, "lowest": min(pairs), "highest": max(pairs)}
        return {**head, "old": old, "new": new, **ratios, "passes": ratio >= row.floor}


# --- checkouts --------------------------------------------------------------------------------------------


def checkout_of(text: str, stack: contextlib.ExitStack) -> Path:
    """A folder with fastload in it; that of a revision is removed at the end.

    Raises:
        SystemExit: It is neither.
    """
    folder = Path(text).resolve()
    if (folder / "fastload" / "__init__.py").is_file():
        return folder
    git = ("git", "-C", str(ROOT))
    found = subprocess.run(
        (*git, "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}"),
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise SystemExit(f"{text}: expected a folder with fastload/ in it, or a revision of {ROOT}")
    path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastload-gate-"))) / "checkout"
    subprocess.run(
        (*git, "worktree", "add", "--quiet", "--detach", str(path), found.stdout.strip()), check=True
    )
    stack.callback(subprocess.run, (*git, "worktree", "remove", "--force", str(path)), check=True)
    return path


def copied_photos(source: Path, dest: Path, count: int) -> None:
    """Copy so many JPEGs, equally many of each class."""
    folders = [sorted(folder.glob("*.jpg")) for folder in sorted(source.iterdir()) if folder.is_dir()]
    share, rest = divmod(count, max(1, len(folders)))
    paths = [path for place, folder in enumerate(folders) for path in folder[: share + (place < rest)]]
    if len(paths) < count:
        raise SystemExit(
            f"{source}: expected {count} JPEGs in folders of equal size, got {len(paths)}: make photos"
        )
    for path in paths:
        target = dest / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    time.sleep(SETTLED_S)


# --- measuring --------------------------------------------------------------------------------------------


def used_s() -> tuple[float, float]:
    """CPU seconds used so far on our CPUs: by all, and by this process and the children that have ended."""
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in ours:  # without idle (3), iowait (4) and what guests (8, 9) have in user and nice already
            ticks += sum(int(field) for place, field in enumerate(fields[:8]) if place not in (3, 4))
    return ticks / _TICKS_PER_S, sum(os.times()[:4])


def run(checkout: Path, program: Program, settings: Settings) -> tuple[list[float], float]:
    """The figures of a program in a process of its own, and the CPUs that others used meanwhile.

    Raises:
        subprocess.SubprocessError: It failed, or did not end.
    """
    environment = {**os.environ, "NO_ALBUMENTATIONS_UPDATE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="fastload-gate-") as scratch:
        words = json.dumps({**asdict(settings), "scratch": scratch})
        command = [sys.executable, gate_rows.__file__, str(checkout), str(PROGRAMS.index(program)), words]
        all_s, own_s = used_s()
        began_s = time.monotonic()
        done = subprocess.run(
            command,
            cwd=scratch,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        )
        elapsed_s = time.monotonic() - began_s
        all_after_s, own_after_s = used_s()
    others_s = all_after_s - all_s - (own_after_s - own_s)
    return json.loads(done.stdout.splitlines()[-1]), max(0.0, others_s / elapsed_s)


def measure(program: Program, old: Path, new: Path, settings: Settings, runs: int) -> Measured:
    """Both checkouts in turn, after one run of each that does not count."""
    figures: dict[Path | str, list[list[float]]] = {"old": [], "new": []}
    sides = [("old", old), ("new", new)]
    most_cpus = 0.0
    try:
        for _, checkout in sides:
            run(checkout, program, Settings(**{**asdict(settings), "seconds": 0.0}))
        for number in range(runs):
            for side, checkout in sides[:: -1 if number % 2 else 1]:
                found, other_cpus = run(checkout, program, settings)
                figures[side].append(found)
                most_cpus = max(most_cpus, other_cpus)
    except subprocess.CalledProcessError as error:
        return Measured(error=(error.stderr.strip().splitlines() or [str(error)])[-1])
    except subprocess.TimeoutExpired as error:
        return Measured(error=f"did not end in {error.timeout:.0f} s")
    return Measured(figures["old"], figures["new"], most_cpus)


def measure_all(
    programs: Sequence[Program], old: Path, new: Path, settings: Settings, runs: int
) -> list[Measured]:
    """All programs, and those once more that others disturbed; the less disturbed runs count."""
    console = Console(stderr=True)
    found = []
    for program in programs:
        console.print(
            f"[{len(found) + 1}/{len(programs)}] {program.rows[0].name} ...", highlight=False, markup=False
        )
        found.append(measure(program, old, new, settings, runs))
    for place, program in enumerate(programs):
        if found[place].is_disturbed:
            console.print(f"once more, undisturbed if possible: {program.rows[0].name} ...", highlight=False)
            again = measure(program, old, new, settings, runs)
            if again.error is not None or again.other_cpus < found[place].other_cpus:
                found[place] = again
    return found


# --- results ----------------------------------------------------------------------------------------------


def show(answers: dict[str, dict[str, Any]]) -> None:
    """Print the table, and below it what went wrong."""
    console = Console()
    if not console.is_terminal:
        console.width = 120  # in a log, names stay whole
    table = Table(title="NEW / OLD")
    table.add_column("row")
    for column in ("old", "new", "new / old", "range", "floor", "other CPUs"):
        table.add_column(column, justify="right")
    for name, answer in answers.items():
        cpus = f"{answer['other_cpus']:.2f}{' ~' if answer['is_disturbed'] else ''}"
        if "error" in answer:
            table.add_row(name, "", "", "-- !", "", f"{answer['floor']:.2f}", cpus)
            continue
        medians = (statistics.median(answer[side]) for side in ("old", "new"))
        figures = (f"{median:,.0f}" if median > 10 else f"{median:.3f}" for median in medians)
        mark = "" if answer["passes"] else " !"
        spread = f"{answer['lowest']:.2f} to {answer['highest']:.2f}"
        ratios = (f"{answer['ratio']:.2f}{mark}", spread, f"{answer['floor']:.2f}")
        table.add_row(name, *figures, *ratios, cpus)
    console.print(table)
    if any(answer["is_disturbed"] for answer in answers.values()):
        console.print("~ other processes used the CPUs: measure again on a quiet machine", highlight=False)
    for name, answer in answers.items():
        if not answer["passes"]:
            why = answer.get("error") or f"{answer.get('ratio'):.3f} is below {answer['floor']:.2f}"
            console.print(f"! {name}: {why}", highlight=False, markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("old", help="a checkout, or a revision")
    parser.add_argument("new", help="the same")
    parser.add_argument(
        "--photos", type=Path, default=ROOT / "build" / "photos", help="as `make photos` draws it"
    )
    parser.add_argument("--num-photos", type=int, default=400, help="how many of them are read")
    parser.add_argument("--only", default="", help="programs with a row that this regular expression finds")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="that each row's epochs take at least")
    parser.add_argument("--save", type=Path, nargs="?", const=RESULTS / "gate.json", help="write the results")
    args = parser.parse_args(arguments)
    programs = [
        program for program in PROGRAMS if any(re.search(args.only, row.name) for row in program.rows)
    ]
    if not programs:
        parser.error(f"--only {args.only}: expected a pattern of a row's name")
    if args.save and not args.save.parent.is_dir():
        parser.error(f"--save {args.save}: expected a path in a folder that exists")
    load, began_s = os.getloadavg(), time.monotonic()
    with contextlib.ExitStack() as stack:
        old, new = checkout_of(args.old, stack), checkout_of(args.new, stack)
        photos = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastload-gate-")))
        if any(program.needs_photos for program in programs):
            if not args.photos.is_dir():
                parser.error(f"--photos {args.photos}: expected a folder of photographs: make photos")
            copied_photos(args.photos, photos, args.num_photos)
        settings = Settings(str(photos), args.num_photos, "", args.seconds)
        commits = {"old": commit(old), "new": commit(new)}
        found = measure_all(programs, old, new, settings, args.runs)
    answers = {
        row.name: measured.answer(number, row)
        for program, measured in zip(programs, found, strict=True)
        for number, row in enumerate(program.rows)
        if re.search(args.only, row.name)
    }
    show(answers)
    names = f"OLD {commits['old'] or args.old}, NEW {commits['new'] or args.new}"
    print(f"{names}: {time.monotonic() - began_s:.0f} s")
    if args.save:
        results = {
            "command": f"python benchmarks/gate.py OLD NEW --runs {args.runs} --save",
            "seconds": args.seconds,
            "num_photos": args.num_photos,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "commits": commits,
            "machine": machine(),
            "load": load,
            "torchvision": importlib.util.find_spec("torchvision") is not None,
            "rows": answers,
        }
        args.save.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(answer["passes"] for answer in answers.values()) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary worktrees are removed
    sys.exit(main())
