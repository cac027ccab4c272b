"""The DataLoader class: torch's arguments and batches, over fastload's own transport.

The class has the settings. The iterators that `iter(loader)` makes (folder epochs/) own what must be stopped
or freed, and `epochs/runtime.py` has what is alive between them. So a loader is safe to copy, pickle,
drop, or re-create from its public attributes, as frameworks do.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import types
from multiprocessing import context as mp_context
from multiprocessing import current_process
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.utils.data

from fastload.batch.loader_collate import LoaderCollate, lost_in_torch, own_collate, unused_in_torch
from fastload.epochs import position
from fastload.epochs.epoch import Epoch
from fastload.epochs.iterator import EpochIterator
from fastload.epochs.on_device import DeviceIterator, choose_device
from fastload.epochs.runtime import explain_cache, look_at_cache, runtime_of
from fastload.epochs.stats import Clock, LoaderStats
from fastload.epochs.torch_path import torch_iterator
from fastload.readers import patches
from fastload.rng.generators import warn_of_unseeded
from fastload.system import cpus
from fastload.system.logs import log, say_once
from fastload.system.notes import add_note
from fastload.system.torch_private import is_data_pipe
from fastload.workers import process
from fastload.workers.settings import CHECKS, check_values, check_with, pool_type_of, shown_worker_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.context import BaseContext
    from typing import Self

    from torch.utils.data import Dataset, Sampler

    from fastload.batch.failures import FailedSample
    from fastload.device.devices import Backend
    from fastload.epochs.runtime import LoaderRuntime
    from fastload.workers.ray_pool import RayWorkers

T_co = TypeVar("T_co", covariant=True)  # of torch's class

# Modules that load the states of loaders for Lightning's Trainer.
_LIGHTNING = frozenset(
    f"{package}.utilities.combined_loader" for package in ("lightning.pytorch", "pytorch_lightning")
)
# While a hook of Lightning makes a loader, the constructors of all classes imported before note their
# arguments, and ranks build the loader again from those of the first one: torch's, if this class is new.
_LIGHTNINGS_NOTE = "__pl_saved_kwargs"
_KNOWN_CONTEXTS = (
    mp_context.DefaultContext,
    mp_context.ForkContext,
    mp_context.SpawnContext,
    mp_context.ForkServerContext,
)


_MAX_AUTO_WORKERS = 16


def _is_number_of_workers(value: Any) -> bool:
    """Whether torch's loader works with it: an int, NumPy's too, or 0.0."""
    return value == 0 or hasattr(type(value), "__index__")


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """`torch.utils.data.DataLoader` with a faster transport: same arguments, batches, order and errors.

    Only random transforms of albumentations and MONAI draw other numbers than under torch's loader; see
    `seeding`. docs/how-it-works.md lists all differences, and how to undo them.

    Workers write batches directly into reused shared memory, and your tensors are views of it. A batch stays
    valid and unchanged as long as any tensor or array made from it is alive.

    The first 17 arguments are torch's, in torch's order, with torch's checks.

    Args:
        num_workers: As in torch, or ``"auto"``: as many as this rank's share of the CPUs, at most 16. The
            attribute is always an int. With ``seeding="worker"`` the random streams depend on the number.
        memory_format: ``torch.channels_last`` returns batches of images as `(B, C, H, W)` with channels-last
            strides; `(B, H, W, C)` batches are permuted without a copy. Images are uint8 or floating-point
            leaves with 1, 3 or 4 channels and at least 8 x 8 pixels; all other leaves stay unchanged.
        max_prefetch_memory: Upper bound on the memory for batches in flight: ``"2GB"``, bytes, a share of
            free memory such as 0.5, or ``"auto"`` (a quarter of the free memory when an epoch starts).
        seeding: How random numbers are seeded. ``"worker"``: as in torch, each worker's generators continue
            from one sample to the next; and every albumentations pipeline is seeded separately in each
            worker, wherever it is kept, all random transforms of MONAI together. What a `worker_init_fn`
            seeds keeps its seed. Without workers, pipelines draw from the streams of worker 0 while batches
            are read. ``"torch"`` leaves both libraries alone, as torch does: albumentations 2.0.8 then draws
            the same "random" numbers in all workers, and without workers no seed controls its draws.
            ``"sample"``: before each ``dataset[i]``, the generators of `random`, `numpy.random`, torch,
            albumentations and MONAI, and generators that the dataset or the `collate_fn` keeps
            (`numpy.random.Generator` and `RandomState`, `random.Random`, `torch.Generator`), are seeded from
            the seed of `generator` (or of torch), the epoch, the index, and how often the index came before.
            Pixels are then the same for any number of workers and after a resume, and so are the draws of a
            `collate_fn`, which continue those of the last sample of its batch. A warning names generators
            that cannot be seeded. Needs a map-style dataset without `__getitems__`, and fastload's own
            workers, or none.
        worker_type: ``"process"``, or ``"thread"`` for datasets whose work releases the GIL and for Python
            without a GIL. Threads pickle and send nothing. The dataset must allow reads from several threads;
            each thread gets its own copies of the pipelines in the dataset and in the `collate_fn` (with
            ``seeding="sample"`` also of their generators), and `iter(loader)` raises ValueError if a pipeline
            is held by a function, a class or a set. All threads share the generators of `random`,
            `numpy.random` and torch, so their draws have no fixed order: use `fastload.sample_rng()` with
            ``seeding="sample"`` instead. ``"ray"`` starts actors on the machines of a Ray cluster (extra
            ``ray``), whose batches are those of worker processes; `fastload.RayWorkers` has options for them.
            Large arrays in the dataset are read-only in these actors.
        device: The device to deliver batches on: "cuda" (the current device at the first `iter(loader)`),
            "cuda:1" or the int 1, "cpu", or "auto": CUDA if available, else the CPU, with one log line. On
            CUDA, two batches are prefetched on a side stream, directly from the memory that workers write,
            and `pin_memory` has no effect. The caller owns the batches. None leaves batches on the host, as
            torch does.
        batch_transform: Called with each whole batch in the worker that made it, without gradients: one of
            `fastload.transforms`, any callable or module, or a list of these, applied in order. The caller
            gets its result. Many small images are transformed much faster together than one by one.
            fastload's own transforms draw the same numbers as in a `device_transform`. Others draw from the
            worker's generators, which ``seeding="sample"`` seeds for each batch.
        device_transform: Called with each whole batch on the device, without gradients, autocast or inference
            mode: one of `fastload.transforms`, any callable or module whose own tensors are on the device, or
            a list of these, applied in order. On CUDA it runs ahead on the side stream; it should not wait
            for the device or keep its input. The draws of fastload's own transforms depend on the seed, the
            epoch, the rank and the batch's number with ``seeding="worker"``, and on the sample with
            ``seeding="sample"``.
        on_error: What to do about a sample that cannot be read. ``"raise"``: raise its error, as torch does.
            ``"replace"``: use another sample instead, so batch sizes and order stay the same. Its index
            depends on the seed, the epoch and the position, so it is the same for any number of workers and
            after a resume. It comes from the sampler's indices if the sampler is torch's, else from the same
            batch. A function: called with a `FailedSample` where the sample was read; it returns the sample
            to use, or raises. Needs a map-style dataset. `failed_samples` lists all failures; the log names
            the first ones of each epoch.
        max_errors: With `on_error`, how many samples of an epoch can fail: a number (int) or a share of them
            (float). The batch with one more raises TooManyFailuresError.
        max_worker_restarts: How many dead processes or actors one iterator can replace; their unfinished
            batches are read again. 0: a worker's death raises an error. The cause is logged in both cases.
            With ``seeding="worker"`` the random streams of the new worker start over. Needs a map-style
            dataset.
        cache: ``"ram"`` remembers the pixels of files that the dataset decodes, in memory that all processes
            of this user share; ``"ram:32G"`` takes at most so much, and ``"lmdb:PATH"`` remembers them on
            disk, in the file PATH, whose folder must exist. The dataset can be any, its code runs in full on
            every access, and batches stay the same, bit for bit. None stores nothing, unless the environment
            variable ``FASTLOAD_CACHE`` names a cache. ``FASTLOAD_CACHE=off`` overrides this argument.

    Attributes:
        failed_samples: The samples that could not be read so far, of all epochs; see `on_error`.

    Raises:
        DeviceUnavailableError: From `iter(loader)`: the device named by `device` is not available.
        ValueError, TypeError: As torch's loader, and for the arguments above.
    """

    memory_format: torch.memory_format | None
    max_prefetch_memory: int | float | str
    seeding: str
    worker_type: str | RayWorkers
    device: str | int | torch.device | None
    batch_transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None
    device_transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None
    on_error: str | Callable[..., Any]
    max_errors: int | float
    max_worker_restarts: int
    cache: str | None

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: BaseContext | str | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        memory_format: torch.memory_format | None = None,
        max_prefetch_memory: int | float | str = "auto",
        seeding: Literal["worker", "sample", "torch"] = "worker",
        worker_type: Literal["process", "thread", "ray"] | RayWorkers = "process",
        device: str | int | torch.device | None = None,
        batch_transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        device_transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        on_error: Literal["raise", "replace"] | Callable[[FailedSample], Any] = "raise",
        max_errors: int | float = 0.01,
        max_worker_restarts: int = 0,
        cache: str | None = None,
    ) -> None:
        if isinstance(batch_size, str):  # torch's message would show it as if it were a number
            raise ValueError(f"batch_size should be an int, but got {batch_size!r}")
        if num_workers != "auto" and not _is_number_of_workers(num_workers):
            raise ValueError(f'num_workers should be an int or "auto", but got {num_workers!r}')
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(
                "generator should be a torch.Generator, such as torch.Generator().manual_seed(1), but got "
                f"{generator!r}"
            )
        options = {
            "memory_format": memory_format,
            "max_prefetch_memory": max_prefetch_memory,
            "seeding": seeding,
            "worker_type": worker_type,
            "device": device,
            "batch_transform": batch_transform,
            "device_transform": device_transform,
            "on_error": on_error,
            "max_errors": max_errors,
            "max_worker_restarts": max_worker_restarts,
            "cache": cache,
        }
        check_values(options)
        # torch's constructor warns if this machine has fewer CPUs than workers; Ray's are elsewhere. torch's
        # `__setattr__` refuses some names once its constructor has run, and subclasses have their own, so
        # what we set beside torch goes through vars(self).
        vars(self)["worker_type"] = worker_type
        has_note = _LIGHTNINGS_NOTE in vars(self)
        super().__init__(
            dataset=dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=_auto_workers(worker_type) if num_workers == "auto" else num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if not has_note and _LIGHTNINGS_NOTE in vars(self):
            vars(self)[_LIGHTNINGS_NOTE] |= options
        check_with(options, self)
        vars(self).update(options)

    def check_worker_number_rationality(self) -> None:
        """Warn, as torch does, if this machine has fewer CPUs."""
        if not pool_type_of(vars(self).get("worker_type", "process")).runs_elsewhere:
            super().check_worker_number_rationality()
            _warn_of_workers(self.num_workers)

    def __setattr__(self, name: str, value: Any) -> None:
        settings = vars(self)
        if name in CHECKS and settings.keys() >= CHECKS.keys():  # else a constructor is at work
            old = {option: settings[option] for option in CHECKS}
            try:
                check_values({**old, name: value})
                check_with({**old, name: value}, self)
            except (TypeError, ValueError) as error:
                add_note(
                    error,
                    f"raised when {type(self).__name__}.{name} was set, which is an argument of "
                    "fastload.DataLoader: give an attribute of your own a different name",
                )
                raise
            if (type(value), value) != (type(old[name]), old[name]):
                self._use_new(name)
        elif name == "num_workers" and not _is_number_of_workers(value):
            raise ValueError(
                f'num_workers should be set to an int, but got {value!r}; the constructor takes "auto"'
            )
        super().__setattr__(name, value)

    def _use_new(self, name: str) -> None:
        """Let the next `iter(loader)` begin with the new value of an option."""
        runtime = runtime_of(self)
        runtime.has_new_settings = True
        runtime.buffers = None  # their limit can be new
        if name == "cache":
            runtime.judged = None
            if runtime.file_cache is not None:
                runtime.file_cache.close()
                runtime.file_cache = None

    @property
    def failed_samples(self) -> list[FailedSample]:
        """The samples that could not be read so far, of all epochs; see `on_error`."""
        return list(runtime_of(self).failed_samples)

    def __class_getitem__(cls, item: Any) -> types.GenericAlias:
        # torch's class has one type parameter now and two in its next release; this one takes any number.
        return types.GenericAlias(cls, item)

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any]:
        """The function that makes a batch from samples: the argument, or torch's default.

        With arguments that torch's loader lacks, this is a wrapper around that function, which raises an
        error if torch's loader calls it and arguments would change the batches.
        `vars(loader)["collate_fn"]` is always the function itself.
        """
        try:
            own: Callable[[list[Any]], Any] = vars(self)["collate_fn"]
        except KeyError:
            raise AttributeError("this loader has no collate_fn yet") from None
        attributes, defaults = vars(self), default_options()
        settings = {name: attributes.get(name, default) for name, default in defaults.items()}
        if settings == defaults:
            return own
        lost, unused = lost_in_torch(settings), unused_in_torch(settings, defaults)
        return LoaderCollate(own, lost, unused, settings, attributes.get("dataset"))

    @collate_fn.setter
    def collate_fn(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        vars(self)["collate_fn"] = own_collate(collate_fn)

    def __getstate__(self) -> dict[str, Any]:
        # The persistent workers stay with this loader: a copy, or a loader from a checkpoint, starts its own.
        return {**vars(self), "_iterator": None}

    def __iter__(self) -> Any:
        runtime = runtime_of(self)
        with runtime.lock:
            return self._begin_epoch(runtime)

    def _begin_epoch(self, runtime: LoaderRuntime) -> Any:
        if runtime.skips_empty_rest:
            runtime.skips_empty_rest = False
            for _ in self:
                pass
        persistent: Any = self._iterator
        workers = getattr(persistent, "host_iterator", persistent)
        if isinstance(workers, Epoch) and not workers.is_ours:
            self._iterator = None  # these persistent workers belong to the process that forked this one
        elif isinstance(persistent, EpochIterator) and runtime.has_new_settings:
            persistent.close()
            self._iterator = None
        runtime.has_new_settings = False
        began_ns = time.perf_counter_ns()
        iterator = position.make_iterator(self, super().__iter__)
        # A subclass can make its own iterators, as LitData's loader does; they are not measured.
        if isinstance(iterator, EpochIterator):
            look = functools.partial(look_at_cache, runtime, self.dataset)
            iterator.clock = Clock(runtime.meter, iterator.num_workers, began_ns, look)
        return iterator

    def _get_iterator(self) -> Any:
        if self.device is None:
            return self._host_iterator()
        device = choose_device(self)  # before any worker is started
        host_iterator = self._host_iterator(None if device is None else device[0])
        if device is None and self.device_transform is None:
            return host_iterator
        iterator = DeviceIterator(self, host_iterator, device)
        runtime_of(self).iterators[iterator] = None
        return iterator

    def _host_iterator(self, backend: Backend | None = None) -> Any:
        runtime = runtime_of(self)
        if self.seeding == "sample" and not runtime.has_searched_generators:
            runtime.has_searched_generators = True
            warn_of_unseeded(self.dataset, vars(self)["collate_fn"])
        reason = self._why_torch()
        iterator: Any
        if reason is not None:
            self._reject_torch(reason)
            log.debug("this loader uses torch's own iterator: %s", reason)
            if is_data_pipe(self.dataset):
                return super()._get_iterator()
            iterator = torch_iterator(
                self, reason, default_options(), pins=backend is not None and backend.device.type == "cuda"
            )
        else:
            if self.num_workers:
                self.check_worker_number_rationality()
            iterator = Epoch(self, backend)
        runtime.iterators[iterator] = None
        return iterator

    def _reject_torch(self, reason: str) -> None:
        """Raise if this loader has a setting that torch's own iterator does not support."""
        refused = ["worker_type", "max_worker_restarts"]
        if is_data_pipe(self.dataset):
            refused += ["device", "memory_format", "batch_transform"]
        for name in refused:
            if (value := getattr(self, name)) != default_options()[name]:
                raise ValueError(
                    f"{name}={value!r:.80} does not work with torch's own iterator, used here: {reason}"
                )

    def _why_torch(self) -> str | None:
        """Why this loader must use torch's own iterator; None if it uses fastload's."""
        if is_data_pipe(self.dataset):
            return "the dataset is a DataPipe"
        if self.num_workers == 0:
            return None
        if not pool_type_of(self.worker_type).uses_multiprocessing:
            return None
        context = self.multiprocessing_context
        if context is not None and type(context) not in _KNOWN_CONTEXTS:
            return f"multiprocessing_context is a {type(context).__name__}"
        reason = process.why_no_processes()
        if reason is not None:
            say_once(f"workers use torch's own transport: {reason}")
        return reason

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, and pass it to every object that has a `set_epoch()`.

        These are the sampler, the batch sampler, the dataset, and its copies in persistent workers, but not
        what a wrapper such as `Subset` holds. Call it before `iter(loader)`, with the same number on every
        rank.
        """
        position.set_epoch(self, epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of this loader: a new, small dict of plain types, to save with a checkpoint.

        The position counts the batches that the caller has received, not those prefetched; with several
        iterators at a time, those of the one that began last. A batch that an error kept from the caller does
        not count before the next one is received. A copy of the loader has no position. The call
        takes microseconds at any moment and starts nothing. JSON and `torch.load(weights_only=True)` can read
        the dict if they can read the `state_dict()` of the samplers and iterable datasets, which it copies. A
        subclass whose iterators do not take their batches from this class needs its own method. Within an
        epoch of ``in_order=False``, whose batches have no order, the log says that it cannot be resumed.

        Raises:
            Exception: The error of such a `state_dict()` within this epoch; the batches were not affected.
        """
        return position.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state of `state_dict()` with the next `iter(loader)`.

        The rest of the epoch has the same samples in the same batches, for any number of workers. Resuming
        reads no samples, except from a stream without a state_dict(), whose batches are read again, with a
        warning. The loader needs the same dataset and kind of sampler, and within an epoch the same batch
        size. A sampler needs a generator (torch's own have one, or draw from torch's default one) or a
        state_dict(). torch's default generator does not change.

        Every rank can load the state that one rank saved; each skips that many batches of its own share.

        Nothing in the state is unpickled or run. After an error the loader, its workers, samplers
        and all generators are unchanged, and a state loaded before stays loaded.

        Raises:
            ResumeError: The state is damaged or not from such a loader. Raised by `iter(loader)`: the sampler
                gives different indices than before, another rank saved the state and draws from another
                seed, or the epoch cannot be resumed in the middle.
        """
        position.load(self, state_dict)
        caller = sys._getframe(1).f_globals.get("__name__")
        # Lightning takes an epoch for completed when it has trained on the last batch: a state of that moment
        # would make its next epoch an empty one. Loops that ask for the rest of the epoch get it, empty.
        runtime_of(self).skips_empty_rest = caller in _LIGHTNING and position.has_no_rest(self)

    def explain(self) -> str:
        """What `cache=` does and has done: files and memory, how many were found, and why others were not.

        Several lines, to print. Reasons come with what to do about them. The figures are those of `stats`.
        """
        return explain_cache(self)

    def stats(self, *, reset: bool = False) -> LoaderStats:
        """What this loader did so far: batches, waits, busy workers, cache hits and more.

        The counters are always on. They add up over all epochs and iterators of this loader object in this
        process: a copy, an unpickled loader and the loader of a forked process start at zero. Call it at any
        moment, from any thread.

        Args:
            reset: Start over at zero after this call.
        """
        return runtime_of(self).meter.stats(reset=reset)

    def close(self) -> None:
        """Stop all workers of this loader and free its memory; batches in use stay valid.

        You can iterate over the loader again. Open iterators raise LoaderClosedError.
        """
        runtime = runtime_of(self)
        for reference in runtime.iterators.keyrefs():  # a copy: other threads can make iterators meanwhile
            iterator = reference()
            if iterator is not None:
                iterator.close()
        self._iterator = None
        if runtime.file_cache is not None:
            runtime.file_cache.close()
            runtime.file_cache = None
        patches.release(runtime)
        runtime.buffers = None  # those that a loader without workers keeps between its epochs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@functools.cache
def default_options() -> dict[str, Any]:
    """The arguments that torch's loader lacks, and their defaults."""
    parameters = inspect.signature(DataLoader.__init__).parameters
    return {name: parameters[name].default for name in CHECKS}


def _auto_workers(worker_type: str | RayWorkers) -> int:
    if pool_type_of(worker_type).runs_elsewhere:
        shown = shown_worker_type(worker_type)
        raise ValueError(
            f'num_workers="auto" counts the CPUs of this machine, but {shown} starts workers on others: pass '
            "a number, such as the cluster's free CPUs (`fastload doctor` shows them)"
        )
    is_daemon = current_process().daemon  # such as a worker of another loader, which can start no process
    return 0 if is_daemon else min(cpus.rank_cpus(), _MAX_AUTO_WORKERS)


@functools.cache
def _warn_of_workers(num_workers: int) -> None:
    """Warn once about more workers than this rank's CPUs, if torch, which knows only the host, does not."""
    all_cpus = cpus.usable_cpus()
    if 1 < num_workers <= all_cpus and num_workers > cpus.rank_cpus():
        say_once(
            f"a DataLoader has more workers than CPUs: this rank's share is {cpus.rank_cpus()} of {all_cpus} "
            "CPUs, because of the host's other ranks or a CPU quota. Workers then compete for CPUs, unless "
            'samples wait for storage or a network. Use fewer workers, or num_workers="auto"'
        )
