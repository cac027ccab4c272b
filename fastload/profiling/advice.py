"""What to change, and what each change would gain, from the numbers that the table shows.

A step takes as long as the slowest of three: the loop's computing, making a batch, shared by the workers,
and the CPU time of all processes, shared by the CPUs that other programs leave. Without workers, the loop
computes and makes in turn. A gain is the time of all epochs by this bound, divided by that after the change
alone. Epochs begin with a wait for their first batch, which one worker makes: what spares making shortens it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastload.profiling.stages import CACHE, CODE, COLLATE, DECODE, LOCK, OPEN, READ, RESIZE, TRANSFORM
from fastload.system.humanize import readable_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastload.profiling.measures import LoaderReport

MIN_DATA_SHARE = 0.05  # a loop that waits less for data has no bottleneck, and gets no advice
MIN_GAIN = 1.05  # of a suggestion
_MAX_WORKERS = 32  # that are advised
_MIN_SHARE = 0.3  # of making a batch, from which on a line of the user's is worth a suggestion

STAGE_NAMES = {
    OPEN: "opening files",
    READ: "reading files",
    DECODE: "decoding",
    RESIZE: "resizing",
    TRANSFORM: "transforms",
    COLLATE: "collating",
    CACHE: "reading the cache",
    LOCK: "waiting for a lock",
    CODE: "your own code",
}


@dataclass(frozen=True)
class Suggestion:
    """A change and its predicted gain.

    Attributes:
        change: Its name, for programs: "cache", "workers", "persistent_workers", "device" or "code".
        text: The change in words.
        gain: The predicted speed-up of training.
    """

    change: str
    text: str
    gain: float


def step_s(
    of: LoaderReport,
    saved_s: float = 0,
    saved_cpu_s: float = 0,
    copy_s: float = 0,
    workers: int | None = None,
) -> float:
    """The least time of a step, with less work on a batch, less copying, or other workers."""
    num_workers = of.settings["num_workers"] if workers is None else workers
    compute_s, make_s = max(of.compute_s - copy_s, 0.0), max(of.make_s - saved_s, 0.0)
    loop_s = max(compute_s, make_s / num_workers) if num_workers else compute_s + make_s
    return max(loop_s, (of.cpu_s - saved_cpu_s) / of.machine.free_cpus, 1e-6)


def gain_of(of: LoaderReport, changed_step_s: float, saved_start_s: float = 0) -> float:
    """How much faster training becomes with steps of that length, and first batches earlier by that.

    At most as if loading were free: where epochs are short, their steps are not yet as slow as the bound.
    """
    num_starts = of.num_epochs - 1  # the very first is not counted
    num_steps = of.num_batches - of.num_epochs if of.num_steady else 0
    starts_s = of.start_s * num_starts
    # Computing with the first batches. Where no step was steady, it is all that is left.
    rest_s = of.compute_s * of.num_epochs if of.num_steady else of.total_s - starts_s
    now_s = starts_s + rest_s + num_steps * step_s(of)
    saved_s = min(saved_start_s, of.start_s) * num_starts + num_steps * (step_s(of) - changed_step_s)
    return now_s / max(now_s - saved_s, now_s * (1 - of.data_share), 1e-6)


def suggest(of: LoaderReport, available_bytes: int) -> list[Suggestion]:
    """What would gain something, the largest gain first; `available_bytes` of host memory are free."""
    makers = (_cache(of, available_bytes), _workers(of), _code(of)) if of.make_s else ()
    found = [one for maker in (_start(of), _copies(of), *makers) for one in maker]
    return sorted((one for one in found if one.gain >= MIN_GAIN), key=lambda one: -one.gain)


def _cache(of: LoaderReport, available_bytes: int) -> Iterator[Suggestion]:
    if of.settings["has_cache"] or not of.known_share:
        return
    shares = {READ: 1 - of.memory_share, DECODE: 1.0, RESIZE: of.resized_share}
    parts = [(of.part(stage), share * of.known_share) for stage, share in shares.items()]
    spared_s = sum(part.wall_s * share for part, share in parts)
    saved_cpu_s = sum(part.cpu_s * share for part, share in parts) - of.lookup_cpu_s
    place, room = "ram", "how much memory it needs is unknown"
    if of.file_bytes is not None:
        place = "ram" if of.file_bytes <= available_bytes else "lmdb:PATH"
        where = f"of RAM; {readable_size(available_bytes)} are free" if place == "ram" else "on disk"
        room = f"it needs {readable_size(of.file_bytes)} {where}"
    what = "reading and decoding" + " and resizing" * (of.resized_share > 0.5)
    what += f", {spared_s / of.make_s:.0%} of making a batch"
    if of.lookup_s >= 0.005 * of.make_s:
        what += f", less {of.lookup_s / of.make_s:.0%} to look up the files"
    yield Suggestion(
        "cache",
        f'remember decoded files: fastload.DataLoader(dataset, cache="{place}"), or fastload run --cache '
        f"{place}. It saves {what}, from the second epoch on; {room}",
        gain_of(of, step_s(of, spared_s - of.lookup_s, saved_cpu_s), spared_s - of.lookup_s),
    )


def _workers(of: LoaderReport) -> Iterator[Suggestion]:
    now = of.settings["num_workers"]
    if of.share(LOCK) > _MIN_SHARE:
        return  # more of them would wait for it
    steps = {number: step_s(of, workers=number) for number in range(now + 1, max(_MAX_WORKERS, now + 1) + 1)}
    best = next(number for number, each_s in steps.items() if each_s <= 1.02 * min(steps.values()))
    text = f"num_workers={best} instead of {now}"
    if of.settings["is_stream"]:
        text += ", if each worker reads its own part of the stream"
    yield Suggestion("workers", text, gain_of(of, steps[best]))


def _start(of: LoaderReport) -> Iterator[Suggestion]:
    if of.settings["num_workers"] and not of.settings["persistent_workers"] and of.start_share:
        spared_s = max(of.start_s - max(of.make_s, of.wait_s), 0.0)
        yield Suggestion(
            "persistent_workers",
            f"persistent_workers=True: later epochs begin after {of.start_s:.2f} s",
            gain_of(of, step_s(of), spared_s),
        )


def _copies(of: LoaderReport) -> Iterator[Suggestion]:
    if of.copy_s and of.settings["device"] is None:
        yield Suggestion(
            "device",
            'fastload.DataLoader(dataset, device="cuda"): batches are copied ahead, while the loop computes; '
            f"it copies for {of.copy_s * 1e3:.1f} ms per batch",
            step_s(of) / step_s(of, copy_s=of.copy_s),
        )


def _code(of: LoaderReport) -> Iterator[Suggestion]:
    code = next((each for each in of.stages if each.stage == CODE), None)  # the slowest function
    if code is not None and code.wall_s > _MIN_SHARE * of.make_s:
        lines = [line for line, _ in of.lines]
        line = next((line for line in lines if line.endswith(f" in {code.name}")), code.name)
        text = f"a cheaper {line}, whose function is {code.wall_s / of.make_s:.0%} of making a batch; if its "
        text += 'result depends on a file alone, @fastload.remember(version="1") keeps it'
        yield Suggestion("code", text, gain_of(of, step_s(of, code.wall_s, code.cpu_s), code.wall_s))


def bottleneck_of(of: LoaderReport) -> tuple[str, str]:
    """What limits loading, and a sentence about it: "start", "cpus", the largest stage, or "" if nothing."""
    if of.data_share < MIN_DATA_SHARE or not of.num_batches:
        return "", ""
    if of.start_share > of.data_share / 2 and of.settings["num_workers"]:  # else a start is making a batch
        made = f", {min(of.make_s / of.start_s, 1):.0%} of it to make them" if of.make_s else ""
        return "start", f"Epochs begin slowly: first batches take {of.start_s:.2f} s{made}."
    if not of.make_s:
        return "", "Nothing was recorded of the workers: they ran too briefly, or began before the profile."
    stage = max({part.stage for part in of.stages}, key=lambda each: of.share(each))
    text = f"{STAGE_NAMES[stage]} is {of.share(stage):.0%} of making a batch"
    waiting = 1 - of.part(stage).cpu_s / of.part(stage).wall_s
    is_limited = of.cpu_s > 0.8 * of.machine.free_cpus * of.step_s
    if waiting > 0.5 and not of.machine.is_busy:
        text += f", {waiting:.0%} of it waiting"
    if stage in of.stage_lines:
        text += f", most of all in {of.stage_lines[stage]}"
    num_workers = of.settings["num_workers"]
    if num_workers > of.machine.num_cpus and is_limited:
        return (
            "cpus",
            f"The CPUs are the limit: {num_workers} workers share {of.machine.num_cpus:g} CPUs; {text}.",
        )
    return stage, f"{text[0].upper()}{text[1:]}."
