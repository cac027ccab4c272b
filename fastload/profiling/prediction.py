"""A model of a loader and its consumer, which predicts the time of a step after a change of the loader.

The prediction is the slower of two limits: the order of events, which `simulate` replays from the recorded
times of making batches and of computing; and the CPUs, because all processes together get at most `num_cpus`
seconds of CPU per second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fastload.profiling.timeline import mean, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastload.profiling.timeline import Timeline

_OWN_SHARE = 0.7  # of all CPU time, above which a loop is limited by the CPUs
_NUM_STEPS = 400  # simulated


@dataclass(frozen=True)
class LoaderModel:
    """A loader and its consumer, as times of recorded batches.

    Attributes:
        computes: Seconds that the consumer is busy with each batch, including receiving it.
        makes: Seconds that making each batch takes, by worker.
        num_workers: The number of workers; 0: the consumer makes the batches.
        prefetch_factor: Batches in flight per worker.
        make_cpu_s: CPU seconds of making a batch.
        consumer_cpu_s: CPU seconds of the consumer's process per step, without making batches.
        num_cpus: Usable CPUs.
        is_saturated: Whether CPUs were the limit: then recorded times contain waits for a CPU.
    """

    computes: Sequence[float]
    makes: Sequence[Sequence[float]]
    num_workers: int
    prefetch_factor: int
    make_cpu_s: float
    consumer_cpu_s: float
    num_cpus: float
    is_saturated: bool = False

    @classmethod
    def of(cls, timeline: Timeline) -> LoaderModel:
        """The model of what was recorded."""
        info = timeline.info
        num_workers = info["num_workers"]
        makes = [[batch.make_s for batch in batches[1:] or batches] for batches in timeline.batches.values()]
        receiving_s = timeline.receiving_s
        computes = [compute_s + receiving_s for compute_s in timeline.computes]
        make_cpu_s = timeline.make_cpu_s
        consumer_cpu_s = timeline.consumer_cpu_s
        if not num_workers:  # with the threads of libraries that help to make a batch, and that spin after it
            consumer_cpu_s -= max(
                make_cpu_s, mean([seconds(batch.process_cpu_ns) for batch in timeline.warm])
            )
        consumer_cpu_s = max(consumer_cpu_s, 0.0)
        # No change of the loader frees CPUs that other programs keep busy.
        is_limit = make_cpu_s + consumer_cpu_s > _OWN_SHARE * timeline.machine.num_cpus * timeline.step_s
        return cls(
            computes or [0.0],
            makes or [[0.0]],
            num_workers,
            info["prefetch_factor"] or 2,
            make_cpu_s,
            consumer_cpu_s,
            timeline.machine.num_cpus,
            timeline.machine.is_saturated and is_limit,
        )

    def scaled(self, wall: float, cpu: float) -> LoaderModel:
        """The same, with making a batch at these shares of its time and of its CPU time."""
        makes = [[make_s * wall for make_s in makes] for makes in self.makes]
        return replace(self, makes=makes, make_cpu_s=self.make_cpu_s * cpu)

    def with_workers(self, num_workers: int) -> LoaderModel:
        """The same, with a different number of workers."""
        all_makes = [make_s for makes in self.makes for make_s in makes]
        computes = self.computes
        if self.num_workers == 0:
            computes = [compute_s + 50e-6 for compute_s in computes]  # receiving a batch
        return replace(self, makes=[all_makes], num_workers=num_workers, computes=computes)

    @property
    def cpu_s(self) -> float:
        """CPU seconds per step, of all processes."""
        return self.make_cpu_s + self.consumer_cpu_s

    def step_s(self) -> float:
        """The mean time of a step by the order of events, but not less than the CPUs allow."""
        simulated_s = simulate(self.computes, self.makes, self.num_workers, self.prefetch_factor)
        return max(simulated_s, self.cpu_s / max(self.num_cpus, 0.1))

    def gain_to(self, other: LoaderModel) -> float:
        """The speed-up of steps in a different model of the same loader."""
        before_s, after_s = self.step_s(), other.step_s()
        if self.is_saturated and self.cpu_s > 0:
            # Recorded times contain waits for CPUs, which become shorter with the CPU time.
            min_s = other.consumer_cpu_s / max(self.num_cpus, 0.1)
            after_s = max(min(after_s, before_s * other.cpu_s / self.cpu_s), min_s)
        return before_s / after_s if after_s > 0 else 1.0


def simulate(
    computes: Sequence[float], makes: Sequence[Sequence[float]], num_workers: int, prefetch_factor: int
) -> float:
    """The mean seconds of a step, when recorded times follow one another in the loader's order.

    Batches go to the workers in turn, `prefetch_factor` batches per worker are in flight, and the consumer
    takes them in order, as in torch.

    Args:
        computes: Seconds of the consumer per batch; repeated as needed.
        makes: Seconds per batch of each worker; repeated as needed, also for more workers than were recorded.
        num_workers: The number of workers.
        prefetch_factor: Batches in flight per worker.
    """
    if num_workers == 0:
        return mean(list(computes)) + mean([make_s for worker in makes for make_s in worker])
    num_ahead = num_workers * prefetch_factor
    num_first = 2 * num_ahead  # steps until the pipeline is in its steady state
    requested_s = [0.0] * num_ahead  # when each batch was given to its worker
    free_s = [0.0] * num_workers
    now_s = start_s = 0.0
    for number in range(_NUM_STEPS + num_first):
        if number == num_first:
            start_s = now_s
        worker = number % num_workers
        worker_makes = makes[worker % len(makes)]
        turn = number // num_workers + worker // len(makes) * 7  # recorded times for further workers
        make_s = worker_makes[turn % len(worker_makes)]
        free_s[worker] = max(free_s[worker], requested_s[number]) + make_s
        now_s = max(now_s, free_s[worker])
        requested_s.append(now_s)
        now_s += computes[number % len(computes)]
    return (now_s - start_s) / _NUM_STEPS
