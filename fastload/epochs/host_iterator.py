"""The common base of fastload's iterators over host batches: torch's base iterator with less overhead.

torch labels each batch in the profile, which takes 5 us even without a profiler. This class labels batches
only while a profiler is on.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fastload.epochs.stats import MeasuredIterator

if TYPE_CHECKING:
    from fastload.workers.settings import LoaderSettings


class HostIterator(MeasuredIterator, _BaseDataLoaderIter):
    """The base of the iterators with and without workers.

    Args:
        loader: The loader whose batches it returns; not kept alive.
    """

    def __init__(self, loader: LoaderSettings) -> None:
        super().__init__(loader)
        self._loader = weakref.ref(loader)
        self.num_measured_workers = self._num_workers

    def _next(self) -> Any:
        if profiler._is_profiler_enabled or self._IterableDataset_len_called is not None:
            # torch's method labels the profile, and warns about wrong lengths.
            return super(MeasuredIterator, self).__next__()
        batch: Any = self._next_data()
        self._num_yielded += 1
        return batch

    def belongs_to(self, loader: LoaderSettings) -> bool:
        """Whether ``loader`` made this iterator."""
        return self._loader() is loader
