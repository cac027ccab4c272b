"""Values that are computed once for each instance, without a lock that all instances share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from fastload.system.cached_property import cached_property


class Meeting:
    """Both instances compute at the same time, or not at all."""

    barrier = threading.Barrier(2)

    @cached_property
    def value(self) -> list[int]:
        """The number of those that have met."""
        self.barrier.wait(timeout=20)
        return [2]


def test_instances_do_not_wait_for_each_other() -> None:
    """Two threads compute the values of two instances at the same time."""
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda one: one.value, [Meeting(), Meeting()])) == [[2], [2]]


def test_a_value_is_computed_once() -> None:
    """The second access of an instance gives the same object; the class gives the property itself."""

    class Counter:
        made = 0

        @cached_property
        def value(self) -> list[int]:
            """How often it was made."""
            self.made += 1
            return [self.made]

    counter = Counter()
    assert counter.value is counter.value
    assert counter.made == 1
    assert Counter.value.__doc__ == "How often it was made."
