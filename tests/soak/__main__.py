"""The soak as a command: run random cases until the time is over, and report the failures."""

from __future__ import annotations

import argparse
import collections
import ctypes
import gc
import itertools
import math
import random
import sys
import time
from typing import TYPE_CHECKING

import psutil

from tests.soak.case import draw
from tests.soak.run import Soak, replay

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.soak.case import Case

MAX_FAILURES = 10
WARM_CASES = 30  # after these the memory of this process is measured for the first time
MAX_GROWTH_BYTES = 64 << 20
M_ARENA_MAX = -8  # of mallopt(3)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to draw cases")
    parser.add_argument("--seed", type=int, help="the first case; the next ones follow (default: random)")
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--with", dest="changes", nargs="+", default=[], help="its settings: name=value")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a case hangs")
    options = parser.parse_args()
    import albumentations  # noqa: F401  # a case that is the first to import it looks like a leak

    # Arenas of threads that have ended keep free memory, which would hide a leak.
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc's
        libc.mallopt(M_ARENA_MAX, 1)
    soak = Soak(options.limit)
    try:
        if options.case is not None:
            return run_cases(soak, [draw(options.case).changed(options.changes)])
        first = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
        return run_cases(soak, map(draw, itertools.count(first)), 60 * options.minutes)
    finally:
        soak.close()


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)  # noqa: T201  # a command's own output


def run_cases(soak: Soak, cases: Iterable[Case], limit_s: float = math.inf) -> int:
    """Run cases one after another until the time is over; gives the exit code of the command."""
    start_s, number, warm_bytes = time.monotonic(), 0, 0
    failed: list[Case] = []
    counts: collections.Counter[str] = collections.Counter()
    for number, case in enumerate(cases, start=1):
        say(f"{case} ... ", end="")
        case_s = time.monotonic()
        failure = soak.run(case)
        say(f"{'FAILED after ' if failure else ''}{time.monotonic() - case_s:.1f} s")
        if failure is not None:
            failed.append(case)
            say(f"{failure}\n{replay(case)}")
        method = case.method if case.num_workers else "no workers"
        counts.update([case.mode, case.kind, case.source, method])
        if number == WARM_CASES:
            warm_bytes = _written_bytes()
        if time.monotonic() > start_s + limit_s or len(failed) == MAX_FAILURES:
            break
    say("cases with " + ", ".join(f"{name}: {count}" for name, count in counts.most_common()))
    has_grown = False
    if warm_bytes:
        end_bytes = _written_bytes()
        has_grown = end_bytes - warm_bytes > MAX_GROWTH_BYTES
        told = f"{warm_bytes >> 20} MB after {WARM_CASES} cases, {end_bytes >> 20} MB now"
        say(f"FAILED: memory has grown: {told}" if has_grown else f"memory: {told}")
    for case in failed:
        say(f"FAILED {case}")
    say(f"soak: {number} cases in {time.monotonic() - start_s:.0f} s, {len(failed)} failed")
    return 1 if failed or has_grown else 0


def _written_bytes() -> int:
    """The memory that this process has written to, after the allocator has given back what is free.

    Pages of files are not in it: libraries read them as their code is first used.
    """
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc's
        libc.malloc_trim(0)
    maps = psutil.Process().memory_maps()
    return sum(one.private_dirty + one.shared_dirty for one in maps)


if __name__ == "__main__":
    sys.exit(main())
