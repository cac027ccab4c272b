"""The soak as a command: run random cases until the time is over, and report the failures."""

from __future__ import annotations

import argparse
import collections
import ctypes
import gc
import random
import sys
import time
from typing import TYPE_CHECKING

import psutil

from tests.soak.case import draw
from tests.soak.run import Soak, replay

if TYPE_CHECKING:
    from tests.soak.case import Case

MAX_FAILURES = 10
WARM_CASES = 30  # after these the memory of this process is measured for the first time
MAX_GROWTH_BYTES = 256 << 20


def main() -> int:
    options = _parse()
    soak = Soak(options.limit)
    try:
        if options.case is not None:
            return _one(soak, draw(options.case).changed(options.changes), options.times)
        return Round(soak, options).run()
    finally:
        soak.close()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to draw cases")
    parser.add_argument("--seed", type=int, help="the first case; the next ones follow (default: random)")
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument(
        "--with", dest="changes", nargs="+", default=[], help="change its settings: name=value"
    )
    parser.add_argument("--times", type=int, default=1, help="how often to run that case")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a case hangs")
    return parser.parse_args()


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)  # noqa: T201  # a command's own output


def _one(soak: Soak, case: Case, times: int) -> int:
    say(str(case))
    for _ in range(times):
        failure = soak.run(case)
        if failure is not None:
            say(f"FAILED {failure}")
            return 1
    say("passed")
    return 0


class Round:
    """Runs cases one after another until the time is over."""

    def __init__(self, soak: Soak, options: argparse.Namespace) -> None:
        self._soak = soak
        self._seconds = 60 * options.minutes
        self._first = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
        self._num_cases = 0
        self._failed: list[Case] = []
        self._counts: collections.Counter[str] = collections.Counter()
        self._warm_bytes = 0

    def run(self) -> int:
        """Run the cases; gives the exit code of the command."""
        start_s = time.monotonic()
        say(f"soak: cases from seed {self._first} on for {self._seconds:.0f} s")
        seed = self._first
        while time.monotonic() < start_s + self._seconds and len(self._failed) < MAX_FAILURES:
            self._run_case(draw(seed))
            seed += 1
        return self._conclude(time.monotonic() - start_s)

    def _run_case(self, case: Case) -> None:
        say(f"{case} ... ", end="")
        start_s = time.monotonic()
        failure = self._soak.run(case)
        seconds = time.monotonic() - start_s
        say(f"{seconds:.1f} s" if failure is None else f"FAILED after {seconds:.1f} s")
        if failure is not None:
            self._failed.append(case)
            say(f"{failure}\n{replay(case)}")
        self._num_cases += 1
        if self._num_cases == WARM_CASES:
            self._warm_bytes = _resident_bytes()
        self._counts.update(
            [case.mode, case.kind, case.source, case.method if case.num_workers else "no workers"]
        )

    def _conclude(self, seconds: float) -> int:
        say("cases with " + ", ".join(f"{name}: {count}" for name, count in self._counts.most_common()))
        has_grown = False
        if self._warm_bytes:
            end_bytes = _resident_bytes()
            has_grown = end_bytes - self._warm_bytes > MAX_GROWTH_BYTES
            told = f"{self._warm_bytes >> 20} MB after {WARM_CASES} cases, {end_bytes >> 20} MB now"
            say(f"FAILED: memory has grown: {told}" if has_grown else f"memory: {told}")
        for case in self._failed:
            say(f"FAILED {case}")
        say(f"soak: {self._num_cases} cases in {seconds:.0f} s, {len(self._failed)} failed")
        return 1 if self._failed or has_grown else 0


def _resident_bytes() -> int:
    """The resident memory of this process, after the allocator has given back the memory that is free."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    sys.exit(main())
