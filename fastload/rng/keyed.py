"""`seeding="sample"` through torch's own iterator: the sampler returns keys, by which the dataset is read.

For loaders that use torch's iterator (see `DataLoader._why_torch`). In the parent, the sampler's indices
become keys; in a worker, the dataset sets the generators for a key, and reads its sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from fastload.rng.sample_rng import SampleSeeder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.rng.keys import SampleKey


class KeyedDataset(Dataset[Any]):
    """A wrapper that reads a dataset by keys; all other attributes are the dataset's own.

    Args:
        dataset: A map-style dataset.
        collate_fn: The function that collates its samples.
        with_transforms: Whether transforms of albumentations and MONAI are seeded too.
    """

    def __init__(self, dataset: Any, collate_fn: Any, *, with_transforms: bool) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._with_transforms = with_transforms
        self._seeder: SampleSeeder | None = None  # made in each worker

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look these up before _dataset is set
            raise AttributeError(name)
        return getattr(self.__dict__["_dataset"], name)

    def __getitem__(self, key: SampleKey) -> Any:
        if self._seeder is None:
            self._seeder = SampleSeeder(
                self._dataset, self._collate_fn, with_transforms=self._with_transforms, role="process"
            )
        self._seeder.begin(key)  # never ended: the collate_fn can draw, too
        return self._dataset[key.index]


class KeyedSampler:
    """A sampler that returns keys instead of the indices of the wrapped sampler.

    Args:
        sampler: Returns indices, or lists of them.
        auto_collation: Whether it returns lists.
        epoch: Returns the epoch that has begun, which counts indices; called when the first key is requested.
    """

    def __init__(self, sampler: Any, *, auto_collation: bool, epoch: Callable[[], Any]) -> None:
        self._sampler = sampler
        self._auto_collation = auto_collation
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return self._keys(iter(self._sampler))  # iter() can draw random numbers: torch calls it here, too

    def _keys(self, batches: Iterator[Any]) -> Iterator[Any]:
        epoch = self._epoch()
        for number, batch in enumerate(batches):
            index, key = epoch.keyed(batch, number)
            keys = list(key.of_samples(index if self._auto_collation else [index]))
            yield keys if self._auto_collation else keys[0]
