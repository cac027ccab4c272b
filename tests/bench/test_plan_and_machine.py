"""Claims about the plan and the machine: samples within the time, interleaved rounds, a busy machine."""

from __future__ import annotations

import collections
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.bench.apart import RunFailedError
from fastload.bench.contenders import Contender, Sweep
from fastload.bench.machine import busy_warnings
from fastload.bench.measure import Epochs, spread_indices
from fastload.bench.plan import Costs, default_workers
from fastload.bench.rounds import order_of, run_rounds
from fastload.system import cpu_times
from fastload.system.cpu_times import CpuTimes, busy_share, others_share
from tests.bench.made_up import PLAIN, RAM, TORCH, row

CONTENDERS = Sweep((0, 2), (64,), ("fork",), ("none", "ram", "lmdb")).contenders()
COSTS = st.builds(
    Costs,
    rounds=st.integers(1, 5),
    sample_s=st.floats(1e-6, 1.0),
    transform_s=st.floats(0.0, 0.1),
    num_cpus=st.integers(1, 64),
)


class TestSamples:
    @given(budget_s=st.floats(0.0, 600.0), length=st.integers(1, 10**6), costs=COSTS)
    def test_the_number_of_samples_keeps_to_the_time_or_to_the_least(
        self, budget_s: float, length: int, costs: Costs
    ) -> None:
        """More than some batches are measured only where the whole benchmark then takes no longer."""
        count = costs.num_samples_within(budget_s, CONTENDERS, length)

        assert 1 <= count <= length
        least = min(length, 64 * 4)
        assert count >= least
        assert count == least or costs.seconds(CONTENDERS, count) <= budget_s * (1 + 1e-9)

    @given(st.integers(1, 10**6), st.data())
    def test_spread_indices_are_distinct_and_in_order(self, length: int, data: st.DataObject) -> None:
        """As many as asked for, all of them indices of the dataset."""
        count = data.draw(st.integers(1, min(length, 1000)))

        found = spread_indices(length, count)

        assert len(found) == count
        assert found == sorted(set(found))
        assert 0 <= found[0] <= found[-1] < length

    @pytest.mark.parametrize(
        ("num_cpus", "expected"), [(1, (0, 1)), (2, (0, 1, 2)), (9, (0, 5, 9)), (128, (0, 32))]
    )
    def test_default_workers_are_a_few_numbers_up_to_the_cpus(
        self, num_cpus: int, expected: tuple[int, ...]
    ) -> None:
        """None, half and all, but never hundreds."""
        assert default_workers(num_cpus) == expected


class TestRounds:
    @given(rounds=st.integers(1, 6), count=st.integers(1, 40))
    def test_each_round_runs_every_contender_once_from_another_start(self, rounds: int, count: int) -> None:
        """The order rotates, so that no contender is always the first."""
        orders = [order_of(number, rounds, count) for number in range(rounds)]

        assert all(sorted(order) == list(range(count)) for order in orders)
        assert len({order[0] for order in orders}) >= min(rounds, count)

    def test_a_contender_that_fails_is_left_out_and_the_others_go_on(self) -> None:
        """Its row has the reason; it is not tried again."""
        rows = [row(TORCH), row(PLAIN), row(RAM)]
        runs: list[Contender] = []

        def measure(contender: Contender) -> Epochs:
            runs.append(contender)
            if contender == PLAIN:
                raise RunFailedError("it broke")
            return Epochs(1.0, 2.0)

        run_rounds(rows, 3, measure)

        assert [one.problem for one in rows] == ["", "failed: it broke", ""]
        assert [len(one.later) for one in rows] == [3, 0, 3]
        assert [runs.count(one.contender) for one in rows] == [3, 1, 3]

    def test_an_interruption_leaves_what_was_measured(self) -> None:
        """Rows are filled as the runs end."""
        rows = [row(TORCH), row(PLAIN)]

        def measure(contender: Contender) -> Epochs:
            if contender == PLAIN:
                raise KeyboardInterrupt
            return Epochs(1.0, 2.0)

        with pytest.raises(KeyboardInterrupt):
            run_rounds(rows, 3, measure)

        assert [one.later for one in rows] == [[2.0], []]


class TestBusy:
    @pytest.mark.parametrize(
        ("busy_s", "own_s", "share"), [(8.0, 8.0, 0.0), (8.0, 4.0, 0.2), (20.0, 0.0, 1.0), (1.0, 3.0, 0.0)]
    )
    def test_the_share_of_others_is_the_cpu_time_that_is_not_ours(
        self, busy_s: float, own_s: float, share: float
    ) -> None:
        """Of two CPUs over ten seconds."""
        before, after = CpuTimes(100.0, 50.0, 7.0), CpuTimes(110.0, 50.0 + busy_s, 7.0 + own_s)

        assert others_share(before, after, num_cpus=2) == pytest.approx(share)
        assert busy_share(before, after, num_cpus=2) == pytest.approx(min(busy_s / 20, 1.0))

    def test_the_clocks_are_those_of_our_cpus_without_idle_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """CPU 1 is not ours; idle and iowait are no work, and the time of guests is counted already."""
        names = "user nice system idle iowait irq softirq steal guest guest_nice"
        times = collections.namedtuple("times", names)  # type: ignore[misc]
        readings = [times(1.0, 0.2, 0.3, 9.9, 9.9, 0.04, 0.05, 0.41, 0.7, 0.7), times(*[9.0] * 10)]
        monkeypatch.setattr(cpu_times.psutil, "cpu_times", lambda percpu: readings)
        monkeypatch.setattr(cpu_times.os, "sched_getaffinity", lambda pid: {0})

        assert CpuTimes.now().busy_s == pytest.approx(2.0)

    def test_children_are_ours_while_they_live(self) -> None:
        """Workers of a loader may live on after the last reading."""
        burn = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); sys.stdin.read()"
        command = [sys.executable, "-S", "-c", burn]
        before = CpuTimes.now()
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            during = CpuTimes.now()
            child.communicate()

        assert during.own_s - before.own_s >= 0.15
        assert CpuTimes.now().own_s >= during.own_s

    def test_without_proc_the_share_is_unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is no error."""

        def fail(percpu: bool) -> None:
            raise FileNotFoundError(2, "No such file or directory", "/proc/stat")

        monkeypatch.setattr(cpu_times.psutil, "cpu_times", fail)
        reading = CpuTimes.now()

        assert reading.busy_s is None
        assert others_share(reading, reading) is None

    @pytest.mark.parametrize(
        ("share", "load", "count"), [(None, None, 0), (0.05, 0.3, 0), (0.4, 0.3, 1), (0.4, 2.0, 2)]
    )
    def test_a_busy_machine_is_told_with_the_figure(
        self, share: float | None, load: float | None, count: int
    ) -> None:
        """A quiet one, or one without figures, is not."""
        said = busy_warnings(share, load)

        assert len(said) == count
        assert not said or "40% of the CPUs" in said[0]
