"""The common base of fastload's iterators over host batches: torch's base iterator with less overhead.

torch labels each batch in the profile, which takes 5 us even without a profiler. This class labels batches
only while a profiler is on.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler
from torch.utils.data.dataloader import _BaseDataLoaderIter

if TYPE_CHECKING:
    from fastload.workers.auto_workers import AutoWorkers
    from fastload.workers.settings import LoaderSettings


class HostIterator(_BaseDataLoaderIter):
    """The base of the iterators with and without workers.

    Args:
        loader: The loader whose batches it returns; not kept alive.
    """

    def __init__(self, loader: LoaderSettings) -> None:
        super().__init__(loader)
        self._loader = weakref.ref(loader)
        self._auto_workers = loader._auto_workers
        self._step_s = self._wait_s = 0.0  # seconds that the consumer computed and waited in this epoch
        self._returned_s: float | None = None

    def __next__(self) -> Any:
        if self._auto_workers is None:
            return self._next()
        return self._timed_next(self._auto_workers)

    def _timed_next(self, auto_workers: AutoWorkers) -> Any:
        """The next batch; measures how long the consumer computes and waits."""
        called_s = time.perf_counter()
        try:
            batch = self._next()
        except StopIteration:
            num_steps = self._num_yielded - 1
            if num_steps > 0:
                auto_workers.note_epoch(self._num_workers, self._step_s / num_steps, self._wait_s / num_steps)
            self._step_s, self._wait_s, self._returned_s = 0.0, 0.0, None
            raise
        now_s = time.perf_counter()
        if self._returned_s is not None:
            self._step_s += called_s - self._returned_s
            self._wait_s += now_s - called_s
        self._returned_s = now_s
        return batch

    def _next(self) -> Any:
        if profiler._is_profiler_enabled or self._IterableDataset_len_called is not None:
            return super().__next__()  # labels the profile, and warns about wrong lengths
        batch: Any = self._next_data()
        self._num_yielded += 1
        return batch

    def belongs_to(self, loader: LoaderSettings) -> bool:
        """Whether ``loader`` made this iterator."""
        return self._loader() is loader
