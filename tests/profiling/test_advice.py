"""Measures, gains and verdicts that can be worked out by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest

import fastload
from fastload.profiling.advice import step_s, suggest
from fastload.profiling.loader_info import LoaderRecord, Step
from fastload.profiling.measures import LoaderReport, Machine, Stage, measured
from fastload.profiling.report import ProfileReport
from fastload.profiling.sampler import Sums

MS, EIGHT_CPUS = 1_000_000, Machine(8)
SETTINGS: dict[str, Any] = {
    "dataset": "Photos",
    "num_samples": 400,
    "is_stream": False,
    "batch_size": 4,
    "num_workers": 2,
    "worker_type": "process",
    "prefetch_factor": 2,
    "persistent_workers": True,
    "device": None,
    "has_cache": False,
}


def record(num_steps: int = 100, wait_ms: int = 30, compute_ms: int = 10, **settings: Any) -> LoaderRecord:
    """One epoch whose steps are all alike."""
    made = LoaderRecord(0, "loader", {**SETTINGS, **settings}, [[0, num_steps * (wait_ms + compute_ms) * MS]])
    for number in range(num_steps):
        start_ms = number * (wait_ms + compute_ms)
        made.steps.append(Step(0, start_ms * MS, (start_ms + wait_ms) * MS, start_ms * MS // 10))
    made.num_steps = num_steps
    return made


def sums(*work: tuple[str, str, str, int, int], start_ms: int = 1000, loader: int = 0) -> Sums:
    return Sums(loader, start_ms * MS, sum(each[4] for each in work), list(work))


def report(machine: Machine = EIGHT_CPUS, counts: Any = (), **settings: Any) -> LoaderReport:
    """Of two workers that make a batch in 80 ms: half of it decoding, and a quarter in a line that waits."""
    work = (
        ("decode", "cv2.imread", "train.py:3 in f", 3560 * MS, 3560 * MS),
        ("code", "g", "train.py:9 in g", 1780 * MS, 178 * MS),
        ("collate", "collate", "", 1780 * MS, 1780 * MS),
        ("idle", "", "", 356 * MS, 0),
    )
    return measured(record(**settings), [sums(*work), sums(*work, loader=1)], counts, machine)


def test_the_numbers() -> None:
    """After the warm-up, of this loader alone, per batch; the idle time is no part of making one."""
    found = report()
    assert (found.num_epochs, found.num_batches, found.num_steady) == (1, 100, 89)
    assert (found.wait_s, found.compute_s) == (pytest.approx(0.030), pytest.approx(0.010))
    assert found.make_s == pytest.approx(0.080)
    assert found.worker_utilization == pytest.approx(0.952, abs=0.001)
    assert found.data_share == pytest.approx(0.75)
    assert [each.stage for each in found.stages] == ["decode", "code", "collate"]
    assert found.stages[0] == Stage("decode", "cv2.imread", pytest.approx(0.040), pytest.approx(0.040))
    assert found.lines == [("train.py:3 in f", pytest.approx(0.5)), ("train.py:9 in g", pytest.approx(0.25))]
    assert found.cpu_s == pytest.approx(0.004 + 0.062)


def test_without_workers_the_wait_is_making() -> None:
    """Samples only tell the shares."""
    found = report(num_workers=0)
    assert (found.make_s, found.worker_utilization) == (pytest.approx(0.030), None)
    assert found.share("decode") == pytest.approx(0.5)


def test_reading_a_cache_that_the_loader_lacks_is_ours() -> None:
    """The files are counted by the readers, and their time is no time of the user's."""
    work = ("cache", "identify", "", 500 * MS, 0), ("decode", "imread", "", 500 * MS, 0)
    for has_cache, share in (True, 0.5), (False, 1.0):
        found = measured(record(has_cache=has_cache), [sums(*work)], [], Machine(2))
        assert found.share("decode") == pytest.approx(share)


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({}, 0.040),  # 80 ms of two workers
        ({"saved_s": 0.040}, 0.020),
        ({"workers": 4}, 0.020),
        ({"workers": 100}, 0.010),  # the loop
        ({"workers": 0}, 0.090),
        ({"workers": 8, "copy_s": 0.005}, 0.010),
    ],
)
def test_the_bound(changes: dict[str, Any], step: float) -> None:
    """The loop, or making by all workers; they share the CPUs."""
    assert step_s(report(), **changes) == pytest.approx(step)
    assert step_s(report(Machine(1)), **changes) == pytest.approx(max(step, 0.066))


def changes(found: LoaderReport, free_bytes: int = 1 << 40) -> dict[str, float]:
    return {one.change: round(one.gain, 2) for one in suggest(found, free_bytes)}


def test_gains_are_those_of_the_bound_the_largest_first() -> None:
    """With the share that the table shows."""
    found = report(counts=[[0, 10, 0, 0, 0, {"a": 5_000_000}]])
    assert changes(found) == {"workers": 3.97, "cache": 1.99}  # of 99 steps: the first batch is none
    (workers, cache) = suggest(found, 1 << 40)
    assert workers.text == "num_workers=8 instead of 2"
    assert "50% of making a batch" in cache.text
    assert "it needs 5.0 MB of RAM" in cache.text
    text = str(ProfileReport([found], Machine(8), 1 << 40))
    assert "Decoding is 50% of making a batch, most of all in train.py:3 in f." in text
    assert re.search(r"\n +50% +40.0 ms  decoding: cv2.imread\n", text)
    assert re.search(r"\n +25% +20.0 ms  your own code: g  \(90% of it waiting\)\n", text)


@pytest.mark.parametrize(
    ("counts", "free_bytes", "said"),
    [
        ([], 1 << 40, "how much memory it needs is unknown"),
        ([[0, 4, 0, 0, 0, {"a": 9_000_000}]], 1, 'cache="lmdb:PATH"'),
        (
            [[0, 4, 0, 0, 0, {"a": 9_000_000}], [0, 4, 0, 0, 0, {"a": 9_000_000, "b": 1}]],
            1 << 30,
            "9.0 MB of RAM",
        ),
        ([[0, 0, 0, 0, 4, {}]], 1 << 40, None),
    ],
)
def test_the_memory_of_a_cache(counts: Any, free_bytes: int, said: str | None) -> None:
    """Each file once; unknown if nothing was counted; and no cache of files that no reader knows."""
    texts = [one.text for one in suggest(report(counts=counts), free_bytes) if one.change == "cache"]
    assert bool(texts) == (said is not None)
    assert said is None or said in texts[0]


def test_a_part_of_an_epoch_is_extrapolated() -> None:
    """100 batches and 4 in flight of the 1,000 that the dataset has."""
    whole = report(counts=[[0, 4, 0, 0, 0, {"a": 1_040}]])
    part = record(num_samples=4_000)
    part.epochs[0][1] = 0
    found = measured(part, [], [[0, 4, 0, 0, 0, {"a": 1_040}]], Machine(2))
    assert (whole.file_bytes, found.file_bytes) == (1_040, 10_000)


def test_resizes_are_saved_if_their_results_are_kept() -> None:
    """And not where the first operation is a crop."""
    work = [("resize", "resize", "", 4000 * MS, 0), ("decode", "load", "", 3120 * MS, 0)]
    for resized, gain in (10, 3.97), (0, 1.78):
        found = measured(record(), [sums(*work)], [[0, 10, resized, 0, 0, {"a": 1}]], Machine(8))
        assert changes(found)["cache"] == pytest.approx(gain, abs=0.01)


def test_what_a_cache_does_too_is_not_saved() -> None:
    """To open the files, to know them, and to read those that the dataset reads to memory itself."""
    work = [(stage, stage, "", 1780 * MS, 0) for stage in ("open", "read", "decode", "collate")]
    for in_memory, looked_up_ms, left in (0, 0, 1 / 2), (10, 0, 3 / 4), (5, 0, 5 / 8), (0, 1000, 5 / 8):
        lookups = [("cache", "identity", "", looked_up_ms * MS, 0)] * (looked_up_ms > 0)
        counts = [[0, 10, 0, in_memory, 0, {"a": 1}]]
        found = measured(record(), [sums(*work, *lookups)], counts, Machine(8))
        assert changes(found)["cache"] == pytest.approx(1 / left, abs=0.02)


def test_what_a_cache_saves_is_what_the_table_shows() -> None:
    """The shares of the stages together, and what a look-up takes beside them."""
    work = [(stage, stage, "", 1780 * MS, 0) for stage in ("open", "read", "decode", "collate")]
    lookups = [("cache", "identity", "", 800 * MS, 0)]
    found = measured(record(), [sums(*work, *lookups)], [[0, 10, 0, 0, 0, {"a": 1}]], Machine(8))
    (text,) = (one.text for one in suggest(found, 10) if one.change == "cache")
    assert found.share("read", "decode") == 0.5
    assert "It saves reading and decoding, 50% of making a batch, less 10% to look up the files, from" in text


def test_a_lock_is_named_and_more_workers_are_not() -> None:
    """They would wait for it: the verdict alone says what limits."""
    work = [("lock", "SemLock.__enter__", "train.py:1 in f", 7120 * MS, 0)]
    found = measured(record(), [sums(*work)], [], Machine(8))
    assert ProfileReport([found], Machine(8), 0).bottleneck(found) == "lock"
    assert not changes(found)


def test_more_workers_must_share_a_stream() -> None:
    """Each of them would else read all of it."""
    (workers, *_) = suggest(report(is_stream=True), 0)
    assert workers.text == "num_workers=8 instead of 2, if each worker reads its own part of the stream"


def test_the_line_of_the_verdict_belongs_to_its_stage() -> None:
    """The slowest line of all is named by itself."""
    times = [("decode", "a.py:1 in f", 30), ("decode", "a.py:2 in f", 31), ("transform", "a.py:3 in f", 39)]
    work = [(stage, "x", line, ms * MS, ms * MS) for stage, line, ms in times]
    found = measured(record(), [sums(*work)], [], EIGHT_CPUS)
    text = str(ProfileReport([found], EIGHT_CPUS, 1 << 40))
    assert "Decoding is 61% of making a batch, most of all in a.py:2 in f." in text
    assert "your slowest line: a.py:3 in f, 39%" in text


def test_one_batch_of_each_iterator_is_a_loop() -> None:
    """next(iter(loader)) starts an epoch for each batch; the time until the next one is the loop's."""
    taken = record(0, num_workers=0)
    taken.epochs[:] = [[number * 100 * MS, 0] for number in range(20)]
    taken.steps.extend(Step(n, (n * 100 + 1) * MS, (n * 100 + 20) * MS, 0) for n in range(20))
    taken.num_steps = 20
    work = ("decode", "x", "a.py:1 in f", 380 * MS, 380 * MS)
    found = measured(taken, [sums(work, start_ms=0)], [], EIGHT_CPUS)
    assert found.data_share == pytest.approx(0.2, abs=0.01)
    assert found.make_s == pytest.approx(0.019)
    text = str(ProfileReport([found], EIGHT_CPUS, 1 << 40))
    assert "20% of the time. Decoding is 100% of making a batch, most of all in a.py:1 in f.\n" in text
    assert "making a batch takes 19.0 ms:\n    100%       19.0 ms  decoding: x\n" in text
    assert changes(found) == {"cache": 1.23}  # if it has no more to do
    assert "wait per batch" not in text
    assert "No known change" not in text  # there is no steady step to predict one of


def test_a_slow_function_is_all_of_its_lines() -> None:
    """And of no other function; the line that is named is its slowest."""
    lines = {"train.py:3 in slow": 1780, "train.py:4 in slow": 2670, "train.py:9 in quick": 890}
    work = [("code", line.split()[-1], line, ms * MS, ms * MS) for line, ms in lines.items()]
    found = measured(
        record(wait_ms=60, num_workers=8), [sums(*work, ("collate", "c", "", 1780 * MS, 0))], [], Machine(1)
    )
    (code,) = [one for one in suggest(found, 0) if one.change == "code"]
    assert code.text.startswith("a cheaper train.py:4 in slow, whose function is 62% of making a batch")
    now_s, then_s = (found.compute_s + 99 * step_s(found, saved_cpu_s=spared_s) for spared_s in (0, 0.050))
    assert code.gain == pytest.approx(now_s / then_s)


def test_cpus_that_other_programs_use_are_not_there() -> None:
    """The bound is that of the rest, so more workers gain nothing where there is none."""
    assert step_s(report(Machine(2))) == pytest.approx(0.040)
    assert step_s(report(Machine(2, 1.0, 0.75))) == pytest.approx(0.132)
    assert "workers" not in changes(report(Machine(2, 1.0, 0.75)))


def test_copies_of_the_loop_and_starts_of_epochs() -> None:
    """Both are in what the loop waits for, and have a setting each."""
    work = [("decode", "x", "", 10, 10), ("copy", "images.cuda", "", 1068 * MS, 0)]
    slow = record(wait_ms=1, compute_ms=13, persistent_workers=False)
    slow.epochs.append([10_000 * MS, 12_000 * MS])
    slow.steps.extend(Step(1, (10_000 + n) * MS, (11_000 + 13 * n) * MS, 0) for n in (0, 13))
    found = measured(slow, [sums(*work)], [], Machine(8))
    assert found.copy_s == pytest.approx(0.0118, abs=0.001)
    assert {"device", "persistent_workers"} <= changes(found).keys()


def test_epochs_of_one_batch_have_no_steady_step() -> None:
    """As those of a small validation set: only how they begin is known, and can change."""
    starts = record(1, persistent_workers=False)
    starts.epochs.append([1000 * MS, 2010 * MS])
    starts.steps.append(Step(1, 1990 * MS, 2000 * MS, 0))
    starts.num_steps = 2
    found = measured(starts, [sums(("decode", "x", "", 90 * MS, 80 * MS), start_ms=0)], [], EIGHT_CPUS)
    text = str(ProfileReport([found], EIGHT_CPUS, 1 << 40))
    assert "Epochs begin slowly: first batches take 1.00 s, 5% of it to make them." in text
    assert "making a batch takes 45.0 ms; workers are busy 100%:\n" in text
    assert changes(found).keys() == {"persistent_workers"}
    assert "x: persistent_workers=True" in text


@pytest.mark.parametrize(("num_batches", "gain"), [(1, 0.43 / 0.27), (4, 1.15 / 0.63)])
def test_what_spares_making_shortens_first_batches(num_batches: int, gain: float) -> None:
    """Three epochs: 200 ms to the first batch, 160 of them to make it; then one every 80 ms."""
    made = LoaderRecord(0, "loader", SETTINGS)
    for epoch, start_ms in enumerate((0, 10_000, 20_000)):
        ends_ms = [start_ms + 200 + 80 * number for number in range(num_batches)]
        made.epochs.append([start_ms * MS, (ends_ms[-1] + 10) * MS])
        starts_ms = [start_ms, *(end_ms + 10 for end_ms in ends_ms)]
        made.steps.extend(
            Step(epoch, begin_ms * MS, end_ms * MS, 0)
            for begin_ms, end_ms in zip(starts_ms, ends_ms, strict=False)
        )
    made.num_steps = 3 * num_batches
    half_ns = 80 * (made.num_steps - 1) * MS
    work = [(stage, stage, "", half_ns, half_ns) for stage in ("decode", "collate")]
    found = measured(made, [sums(*work)], [[0, 10, 0, 0, 0, {"a": 1}]], EIGHT_CPUS)
    assert (found.start_s, found.make_s) == (pytest.approx(0.2), pytest.approx(0.16))
    assert changes(found)["cache"] == pytest.approx(gain, abs=0.01)


def test_no_change_gains_more_than_free_loading() -> None:
    """Four batches an epoch, which are made at once: later steps wait less than those of long epochs."""
    made = LoaderRecord(0, "loader", SETTINGS)
    for epoch, start_ms in enumerate((0, 10_000, 20_000)):
        ends_ms = [start_ms + 200 + 100 * number for number in range(4)]
        made.epochs.append([start_ms * MS, (ends_ms[-1] + 100) * MS])
        starts_ms = [start_ms, *ends_ms[1:]]
        made.steps.extend(
            Step(epoch, *(ms * MS for ms in times), 0) for times in zip(starts_ms, ends_ms, strict=True)
        )
    made.num_steps = 12
    work = ("decode", "x", "", 11 * 500 * MS, 0)
    found = measured(made, [sums(work)], [[0, 10, 0, 0, 0, {"a": 1}]], EIGHT_CPUS)
    assert step_s(found) == pytest.approx(0.25)
    assert (
        changes(found)["cache"] == pytest.approx(1 / (1 - found.data_share), abs=0.01) == pytest.approx(4 / 3)
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (report(wait_ms=1, compute_ms=100), "Data is not your bottleneck: training waits for it 1.0%"),
        (report(Machine(1), num_workers=9), "The CPUs are the limit: 9 workers share 1 CPUs; decoding"),
        (measured(record(), [], [], Machine(1)), "Nothing was recorded of the workers"),
        (measured(record(1), [], [], Machine(1)), "Too few batches for a verdict: 1,"),
        (measured(record(0), [], [], Machine(1)), "No batch was loaded."),
    ],
)
def test_verdicts(found: LoaderReport, said: str) -> None:
    """Without a limit of the loader, nothing is advised."""
    whole = ProfileReport([found], Machine(2, 0.95, 0.6), 1 << 40)
    assert whole.verdict(found).partition(said)[1] == said or said in whole.verdict(found)
    assert bool(whole.bottleneck(found)) == ("limit" in said)
    assert whole.bottleneck(found) or not whole.suggestions(found)
    assert "60% of them with other processes" in str(whole)
    assert whole.as_dict()["loaders"][0]["verdict"] == whole.verdict(found)


def test_public_names() -> None:
    """What a report consists of can be imported."""
    assert {"LoaderReport", "Profile", "ProfileReport", "profile"} <= set(fastload.profiling.__all__)
