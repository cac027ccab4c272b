"""What our iterators over host batches share: torch's own base iterator, without what it costs for nothing.

torch labels each batch in the profile, which takes 5 us though no profiler is on. Here a batch is labelled
while one is.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler
from torch.utils.data.dataloader import _BaseDataLoaderIter

if TYPE_CHECKING:
    from fastload.loader import DataLoader


class HostIterator(_BaseDataLoaderIter):
    """The base of the iterators with and without workers.

    Args:
        loader: Whose batches; not kept alive.
    """

    def __init__(self, loader: DataLoader) -> None:
        super().__init__(loader)
        self._loader = weakref.ref(loader)

    def __next__(self) -> Any:
        if profiler._is_profiler_enabled or self._IterableDataset_len_called is not None:
            return super().__next__()  # which labels the profile, and warns of lengths
        batch: Any = self._next_data()
        self._num_yielded += 1
        return batch

    def belongs_to(self, loader: DataLoader) -> bool:
        """Whether ``loader`` made this iterator."""
        return self._loader() is loader
