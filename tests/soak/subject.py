"""What a case is about: its dataset and its loaders, and a reader that checks each batch as it comes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
import torch.utils.data as tud

import fastload
from fastload.cache.disk.build import build_lmdb
from tests.soak import datasets, order
from tests.soak.compare import SoakError, difference, leaves, with_channels_last, wrong_strides

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.soak.case import Case


class Subject:
    """The dataset of a case and everything that is made from it.

    Args:
        case: The settings.
        folder: An empty folder of this case alone.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.key = f"soak-{case.seed}"
        self._folder = folder
        self.dataset = self._make_dataset()
        self._num_reads = 0
        self._loaders: list[fastload.DataLoader] = []
        # What was drawn at random for (epoch, index, how often the index came before), with rng="sample".
        self.noise: dict[tuple[int, int, int], np.ndarray[Any, Any]] = {}

    def open_again(self) -> None:
        """Forget the dataset, and make it anew from what others hold of it; no loader may be there yet."""
        self.dataset = None
        self.dataset = self._make_dataset()

    def _make_dataset(self) -> Any:
        case = self.case
        if case.is_stream:
            return (datasets.StatefulStream if case.source == "stateful stream" else datasets.Stream)(case)
        kind = datasets.BulkSamples if case.source == "bulk" else datasets.Samples
        margin = datasets.SUBSET_MARGIN if "subset" in case.source else 0
        samples = kind(case, case.num_samples + margin, with_transform=not case.is_cached)
        dataset: Any = self._cached(samples) if case.is_cached else samples
        if case.is_cached and case.is_filled:
            dataset.fill(num_workers=case.num_workers % 2, progress=False)
        return tud.Subset(dataset, range(case.num_samples)[::-1]) if margin else dataset

    def _cached(self, samples: Any) -> fastload.CachedDataset:
        case = self.case
        transform = datasets.TRANSFORMS[case.transform].make(case)
        budget: Any = case.budget
        if budget == "half":
            sizes = [leaf.nbytes for leaf in leaves(samples[0]) if hasattr(leaf, "nbytes")]
            budget = max(1, (sum(sizes) + 64) * len(samples) // 2)
        options = {"budget": budget, "progress": False, "num_workers": 0}
        if case.source in ("ram", "subset of ram"):
            return fastload.CachedDataset(samples, transform, **options)
        if case.source == "keyed ram":
            return fastload.CachedDataset(samples, transform, key=self.key, **options)
        path = self._folder / "samples.lmdb"
        codec = "png" if case.source == "png lmdb" else None
        shards = 3 if case.source == "shards" else 1
        # Some builds have workers, too.
        num_workers = case.seed % 2
        built = build_lmdb(samples, path, codec=codec, shards=shards, num_workers=num_workers, progress=False)
        built.close()
        if case.source == "tiers":
            return fastload.CachedDataset(samples, transform, cache=["ram", f"lmdb:{path}"], **options)
        if case.source.startswith("from_cache"):
            in_ram = case.source == "from_cache in ram"
            return fastload.CachedDataset.from_cache(path, transform, ram=in_ram, budget=budget)
        return fastload.CachedDataset(samples, transform, cache=f"lmdb:{path}", **options)

    # --- loaders ------------------------------------------------------------------------------------------

    def loader(self, **changes: Any) -> fastload.DataLoader:
        """A new loader of this dataset, with some other settings; closed with the subject."""
        case = dataclasses.replace(self.case, **changes)
        generator = torch.Generator()
        generator.manual_seed(case.seed)
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
            ring_bytes=case.ring_bytes,
            rng=case.rng,  # type: ignore[arg-type]
            worker_method="thread" if is_thread else "process",
            device=case.device,
            device_transform=datasets.on_device if case.device else None,
            **order.sampling(case, generator),
        )
        loader.case = case  # type: ignore[attr-defined]
        loader.own_generator = generator  # type: ignore[attr-defined]
        self._loaders.append(loader)
        return loader

    def read(self, loader: fastload.DataLoader, goes_on_from: Reader | None = None) -> Reader:
        """Begin the next epoch of a loader, or go on where a state of another loader was loaded."""
        if goes_on_from is not None:
            return Reader(self, loader, goes_on_from.epoch, goes_on_from.due)
        # Where random numbers follow from it there are two: an epoch repeats those of the last but one.
        epoch = 1 + self._num_reads % 2 if self.case.kind == "draws" else 1 + self._num_reads
        self._num_reads += 1
        loader.set_epoch(epoch)
        return Reader(self, loader, epoch)

    def close(self) -> None:
        """Close all loaders."""
        for loader in self._loaders:
            loader.close()
        datasets.forget_kept_batches()

    # --- what is expected ---------------------------------------------------------------------------------

    def expected(self, due: order.Due, *, channels_last: bool) -> Any:
        """The batch, from the formulas alone; random numbers are left out."""
        collate = datasets.COLLATES[self.case.collate]
        samples = [self.expected_sample(index) for index in due.indices]
        if due.is_single:
            batch = samples[0] if collate.given else tud.default_convert(samples[0])
        else:
            batch = collate.known(samples)
        return with_channels_last(batch) if channels_last else batch

    def expected_sample(self, index: int) -> Any:
        """One sample, from the formulas alone."""
        fresh = datasets.known_sample(self.case, order.source_index(self.case, index))
        return datasets.TRANSFORMS[self.case.transform].known(fresh)


class Received:
    """One batch that came, beside the one that was expected.

    Attributes:
        batch: As the loader gave it.
        expected: The same from the formulas.
        place: Where it came.
    """

    def __init__(self, batch: Any, expected: Any, place: str) -> None:
        self.batch = batch
        self.expected = expected
        self.place = place

    def check(self, when: str = "when it came") -> None:
        """Compare the two.

        Raises:
            SoakError: They differ.
        """
        found = difference(self.expected, self.batch)
        if found is not None:
            raise SoakError(f"{self.place} is wrong {when}: {found}")


class Reader:
    """An iterator over one epoch that knows what has to come.

    Args:
        subject: Whose epoch.
        loader: That brings it.
        epoch: Its number.
        due: What it brings; None to follow from the loader's generators.

    Attributes:
        iterator: The loader's.
    """

    def __init__(
        self, subject: Subject, loader: fastload.DataLoader, epoch: int, due: list[order.Due] | None = None
    ) -> None:
        self.subject = subject
        self.case: Case = loader.case  # type: ignore[attr-defined]
        self.epoch = epoch
        self._generator: torch.Generator = loader.own_generator  # type: ignore[attr-defined]
        self._due = None if due is None else list(due)
        has_workers = self.case.num_workers > 0
        if due is None and has_workers:  # the sampler draws when workers are given their first tasks
            is_new = loader._iterator is None
            self._due = order.due_batches(self.case, epoch, self._generator, draws_base_seed=is_new)
        self.iterator = iter(loader)
        self.num_received = 0
        self.has_ended = False
        self.may_skip = 0  # batches that signals have cost
        self.cycle: Reader | None = None  # itself, where the garbage collector shall end it
        self.raises_timeouts = False  # else it waits again

    @property
    def due(self) -> list[order.Due]:
        """What is still to come, in order."""
        return self._draw()

    def _draw(self) -> list[order.Due]:
        if self._due is None:  # without workers the sampler draws when the first batch is asked for
            self._due = order.due_batches(self.case, self.epoch, self._generator, draws_base_seed=False)
        return self._due

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Received:
        """The next batch, compared.

        Raises:
            StopIteration: The epoch has ended, at its end.
            SoakError: It has not, or the batch is wrong, or an error came that should not.
        """
        while True:
            self._draw()
            try:
                batch = next(self.iterator)
            except StopIteration:
                self.expect_end()
                raise
            except ValueError as error:
                self.take_error(error)
                continue
            except RuntimeError as error:
                if "timed out after" not in str(error) or self.case.mode != "times out":
                    raise
                if self.raises_timeouts:
                    raise TimeoutError from None
                continue
            return self.take(batch)

    def expect_end(self) -> None:
        """The epoch has ended; raises if it should not have."""
        if len(self.due) > self.may_skip:
            raise SoakError(f"epoch {self.epoch} ended {len(self.due)} batches early")
        self.has_ended = True

    def take(self, batch: Any) -> Received:
        """A batch that this epoch's iterator gave, compared."""
        place = f"batch {self.num_received} of epoch {self.epoch}"
        self.num_received += 1
        if not self.due:
            raise SoakError(f"{place} came after the end")
        shared = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.is_shared()]
        if shared:
            raise SoakError(f"{place} came through torch's transport: is_shared() is True")
        if self.case.channels_last and self.case.kind != "strided" and (wrong := wrong_strides(batch)):
            raise SoakError(f"{place}: {wrong}")
        candidates = self.due[: 1 + self.may_skip]
        if not self.case.in_order:
            candidates = [due for due in self.due if due.error is None]
        found = None
        for due in candidates:
            received = Received(batch, self._expected(due, batch), f"{place}, indices {due.indices},")
            try:
                received.check()
            except SoakError as error:
                found = found or error
                continue
            if due.error is not None:
                break
            if self.may_skip:
                skipped = self.due.index(due)
                self.may_skip -= skipped
                del self.due[:skipped]
            self.due.remove(due)
            self._compare_noise(due, batch)
            return received
        raise found or SoakError(f"{place} came where the error of sample {due.error} was expected")

    def _expected(self, due: order.Due, batch: Any) -> Any:
        expected = self.subject.expected(due, channels_last=self.case.channels_last)
        if self.case.kind == "draws":  # what came is looked at by itself
            expected = _with_noise_of(expected, batch["on device"] if self.case.device else batch)
        return {"on device": expected} if self.case.device else expected

    def _compare_noise(self, due: order.Due, batch: Any) -> None:
        if self.case.kind != "draws":
            return
        rows = _noise_rows(batch["on device"] if self.case.device else batch, due)
        for row, index, occurrence in zip(rows, due.indices, due.occurrences, strict=True):
            place = (self.epoch, index, occurrence)
            before = self.subject.noise.setdefault(place, row.copy())
            if not np.array_equal(before, row):
                raise SoakError(f"epoch, index, occurrence {place} drew {row} now, and {before} before")

    def take_error(self, error: ValueError) -> None:
        """An error came in the place of a batch; raises it again if it should not have."""
        expected = self.due[:1] if self.case.in_order else self.due
        for due in expected:
            if due.error is not None and str(error).rstrip().endswith(f"sample {due.error}"):
                self.due.remove(due)
                return
        raise error


def _with_noise_of(expected: Any, got: Any) -> Any:
    """The expected batch with the random numbers of the one that came, which nobody can know."""
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


@contextlib.contextmanager
def pretended_accelerator(case: Case) -> Iterator[None]:
    """Let loaders that ask for it pin their batches, where pinning is a copy into plain memory."""
    base = tud.dataloader._BaseDataLoaderIter
    begin = base.__init__

    def init(self: Any, loader: Any) -> None:
        begin(self, loader)
        self._pin_memory = loader.pin_memory

    def pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        return tensor.clone()

    if not case.is_pinned:
        yield
        return
    with mock.patch.object(base, "__init__", init), mock.patch.object(torch.Tensor, "pin_memory", pin):
        yield
