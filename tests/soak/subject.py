"""The dataset and the loaders of a case, and a reader that compares each batch with the expected one."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils.data as tud
from torch.utils._pytree import tree_leaves

import fastload
from fastload.cache.build import build_lmdb
from tests.soak import datasets, order
from tests.soak.compare import SoakError, difference, with_channels_last, wrong_strides

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from pathlib import Path

    from tests.soak.case import Case


class Subject:
    """The dataset of a case, its loaders and their epochs; files are in an empty folder."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self._folder = folder
        self.dataset = self._make_dataset()
        self._num_reads = 0
        self._loaders: list[fastload.DataLoader] = []
        # The random numbers of seeding="sample", by epoch, index and occurrence of the index in the epoch.
        self.noise: dict[tuple[int, int, int], np.ndarray[Any, Any]] = {}

    def _make_dataset(self) -> Any:
        case = self.case
        if case.is_stream:
            return datasets.Stream(case)
        kind = datasets.BulkSamples if case.source == "bulk" else datasets.Samples
        margin = datasets.SUBSET_MARGIN if case.source == "subset of ram" else 0
        samples = kind(case, case.num_samples + margin, with_transform=not case.is_cached)
        dataset: Any = self._cached(samples) if case.is_cached else samples
        if case.is_cached and case.is_filled:
            dataset.fill(num_workers=case.num_workers % 2, progress=False)
        return tud.Subset(dataset, range(case.num_samples)[::-1]) if margin else dataset

    def _cached(self, samples: Any) -> fastload.CachedDataset:
        case = self.case
        transform = datasets.TRANSFORMS[case.transform].make(case)
        max_memory: Any = case.max_memory
        if max_memory == "half":
            sizes = [leaf.nbytes for leaf in tree_leaves(samples[0]) if hasattr(leaf, "nbytes")]
            max_memory = f"{max(1, (sum(sizes) + 64) * len(samples) // 2)}B"
        options: dict[str, Any] = {"max_memory": max_memory}
        if case.source in ("ram", "keyed ram", "subset of ram"):
            key = {"cache_key": f"soak-{case.seed}"} if case.source == "keyed ram" else {}
            return fastload.CachedDataset(samples, transform, **key, **options)
        path = self._folder / "samples.lmdb"
        num_workers = case.seed % 2  # half of the builds have a worker
        build_lmdb(samples, path, num_workers=num_workers, progress=False).close()
        if case.source == "from_cache":
            return fastload.CachedDataset.from_cache(path, transform)
        return fastload.CachedDataset(samples, transform, cache=f"lmdb:{path}", **options)

    def loader(self, **changes: Any) -> fastload.DataLoader:
        """A new loader with the settings of the case and with these changes; `close` closes it."""
        case = dataclasses.replace(self.case, **changes)
        generator = torch.Generator().manual_seed(case.seed)
        has_workers = case.num_workers > 0
        is_thread = has_workers and case.method == "thread"
        loader = fastload.DataLoader(
            self.dataset,
            num_workers=case.num_workers,
            collate_fn=datasets.COLLATES[case.collate].given,
            pin_memory=case.is_pinned,
            timeout=case.timeout_s,
            multiprocessing_context=case.method if has_workers and not is_thread else None,
            prefetch_factor=case.prefetch_factor if has_workers else None,
            persistent_workers=case.is_persistent,
            in_order=case.in_order,
            memory_format=torch.channels_last if case.channels_last else None,
            max_prefetch_memory=case.max_prefetch_memory,
            seeding=case.seeding,  # type: ignore[arg-type]
            worker_type="thread" if is_thread else "process",
            **order.sampling(case, generator),
        )
        loader.case = case  # type: ignore[attr-defined]
        loader.has_resumed = False  # type: ignore[attr-defined]
        loader.own_generator = generator  # type: ignore[attr-defined]
        self._loaders.append(loader)
        return loader

    def read(self, loader: fastload.DataLoader, goes_on_from: Reader | None = None) -> Reader:
        """Begin the next epoch of a loader, or go on with a reader's epoch after `load_state_dict()`."""
        if goes_on_from is not None:
            return Reader(self, loader, goes_on_from.epoch, goes_on_from.due)
        # With random numbers only two epoch numbers take turns, so that most epochs have to repeat numbers.
        epoch = 1 + self._num_reads % 2 if self.case.kind == "draws" else 1 + self._num_reads
        self._num_reads += 1
        loader.set_epoch(epoch)
        return Reader(self, loader, epoch)

    def close(self) -> None:
        """Close all loaders."""
        for loader in self._loaders:
            loader.close()
        datasets.kept.__dict__.clear()

    def expected(self, due: order.Due, *, channels_last: bool) -> Any:
        """The expected batch, made from the formulas, without random numbers."""
        collate = datasets.COLLATES[self.case.collate]
        samples = [self.expected_sample(index) for index in due.indices]
        if due.is_single:
            batch = samples[0] if collate.given else tud.default_convert(samples[0])
        else:
            batch = collate.known(samples)
        return with_channels_last(batch) if channels_last else batch

    def expected_sample(self, index: int) -> Any:
        """The expected sample at an index of the loader, made from the formulas, without random numbers."""
        fresh = datasets.known_sample(self.case, order.source_index(self.case, index))
        return datasets.TRANSFORMS[self.case.transform].known(fresh)

    def samples(self, number: int, rng: random.Random) -> Iterator[Received]:
        """Some samples of the dataset, read here."""
        for index in (rng.randrange(self.case.num_samples) for _ in range(number)):
            if not (self.case.raises and datasets.raises_at(index)):
                yield Received(self.dataset[index], self.expected_sample(index), f"sample {index}")


@dataclasses.dataclass
class Received:
    """One batch from a loader, the expected one in its own memory, and its number and indices in words."""

    batch: Any
    expected: Any
    place: str

    def check(self, when: str = "when it came") -> None:
        """Compare the two; raise SoakError if they differ."""
        found = difference(self.expected, self.batch)
        if found is not None:
            raise SoakError(f"{self.place} is wrong {when}: {found}")


class Reader:
    """An iterator over one epoch of a loader; it compares each batch with the one that is due."""

    def __init__(
        self, subject: Subject, loader: fastload.DataLoader, epoch: int, due: list[order.Due] | None = None
    ) -> None:
        self.subject = subject
        self.case: Case = loader.case  # type: ignore[attr-defined]
        self.epoch = epoch
        self._generator: torch.Generator = loader.own_generator  # type: ignore[attr-defined]
        self._sampler = loader.sampler
        self._due = None if due is None else list(due)
        has_workers = self.case.num_workers > 0
        if due is None and has_workers:  # the sampler draws as soon as the iterator is made
            # Persistent workers get their base seed once, perhaps in the loader that was saved.
            is_new = loader._iterator is None and not (self.case.is_persistent and loader.has_resumed)  # type: ignore[attr-defined]
            self._due = order.due_batches(self.case, epoch, self._generator, draws_base_seed=is_new)
        self.iterator = iter(loader)
        self.num_received = 0
        self.has_ended = False
        self.cycle: Reader | None = None  # itself, if only the garbage collector shall free it
        self.raises_timeouts = False  # as TimeoutError; else the reader goes on

    @property
    def due(self) -> list[order.Due]:
        """The batches that are still due, in order; callers may change the list."""
        if self._due is None:  # without workers the sampler draws with the first batch
            # Another reader of this loader may have set the epoch of their sampler since.
            # Where it gives single samples, torch's DistributedSampler draws at once.
            is_late = self.case.batch_size is not None
            epoch = getattr(self._sampler, "epoch", self.epoch) if is_late else self.epoch
            self._due = order.due_batches(self.case, epoch, self._generator, draws_base_seed=False)
        return self._due

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Received:
        """The next batch; errors that are due are passed over, any other is raised."""
        while True:
            _ = self.due  # before the sampler draws
            try:
                batch = next(self.iterator)
            except StopIteration:
                if self.due:
                    raise SoakError(f"epoch {self.epoch} ended {len(self.due)} batches early") from None
                self.has_ended = True
                raise
            except ValueError as error:
                self.take_error(error)
                continue
            except RuntimeError as error:
                if "timed out after" not in str(error) or self.case.timeout_s != 0.2:
                    raise
                if self.raises_timeouts:
                    raise TimeoutError from None
                continue
            return self.take(batch)

    def take(self, batch: Any) -> Received:
        """Compare a batch of the iterator with the one that is due; raise SoakError if they differ."""
        place = f"batch {self.num_received} of epoch {self.epoch}"
        self.num_received += 1
        if not self.due:
            raise SoakError(f"{place} came after the end")
        shared = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.is_shared()]
        if shared:
            raise SoakError(f"{place} came through torch's transport: is_shared() is True")
        if self.case.channels_last and self.case.kind != "strided" and (wrong := wrong_strides(batch)):
            raise SoakError(f"{place}: {wrong}")
        found = None
        for due in self.due[:1] if self.case.in_order else self.due:
            received = Received(batch, self._expected(due, batch), f"{place}, indices {due.indices},")
            try:
                received.check()
            except SoakError as error:
                found = found or error
                continue
            if due.error is not None:
                found = SoakError(f"{place} came where the error of sample {due.error} was expected")
                continue
            self.due.remove(due)
            self._compare_noise(due, batch)
            return received
        raise found or SoakError(f"{place} came in the place of another one")

    def _expected(self, due: order.Due, batch: Any) -> Any:
        expected = self.subject.expected(due, channels_last=self.case.channels_last)
        # _compare_noise looks at the random numbers.
        return _with_noise_of(expected, batch) if self.case.kind == "draws" else expected

    def _compare_noise(self, due: order.Due, batch: Any) -> None:
        if self.case.kind != "draws":
            return
        rows = _noise_rows(batch, due)
        for row, index, occurrence in zip(rows, due.indices, due.occurrences, strict=True):
            place = (self.epoch, index, occurrence)
            before = self.subject.noise.setdefault(place, row.copy())
            if not np.array_equal(before, row):
                raise SoakError(f"epoch, index, occurrence {place} drew {row} now, and {before} before")

    def take_error(self, error: ValueError) -> None:
        """Note that an error came in place of a batch; raise it if it is not due."""
        for due in self.due[:1] if self.case.in_order else self.due:
            if due.error is not None and str(error).rstrip().endswith(f"sample {due.error}"):
                self.due.remove(due)
                return
        raise error


def _with_noise_of(expected: Any, got: Any) -> Any:
    """The expected batch with a copy of the random numbers in the batch that came."""
    if isinstance(expected, dict) and isinstance(got, dict):
        return {**expected, "noise": copy.deepcopy(got.get("noise"))}
    if isinstance(expected, list) and isinstance(got, list):
        return [_with_noise_of(one, other) for one, other in zip(expected, got, strict=False)]
    return expected


def _noise_rows(batch: Any, due: order.Due) -> list[np.ndarray[Any, Any]]:
    if due.is_single:
        return [np.asarray(batch["noise"])]
    if isinstance(batch, list):
        return [np.asarray(sample["noise"]) for sample in batch]
    return list(batch["noise"].numpy())
