"""Devices that run out of memory: retries a step on smaller parts, and finds the largest batch that fits.

Only torch.OutOfMemoryError counts, which torch's caching allocators raise. Before every retry, and before the
error is raised to the caller, gradients are restored to their values at entry: a step is repeated as a whole,
never continued.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from fastload.nested.tree import map_device_leaves

Result = TypeVar("Result")


def retry_on_oom(
    step: Callable[[Any, float], Result],
    batch: Any,
    *,
    model: nn.Module | Iterable[torch.Tensor] | None,
    min_size: int = 1,
) -> list[Result]:
    """Run ``step(batch, 1.0)``; if the device runs out of memory, run it on ever smaller parts.

    ``step(part, weight)`` does forward and backward only; ``weight`` is the part's share of the batch, so
    with ``(loss * weight).backward()`` the gradients of a mean over the batch add up::

        optimizer.zero_grad()
        losses = fastload.training.retry_on_oom(step, batch, model=model)
        optimizer.step()

    Parts are views of the batch, and their sizes differ by at most one: 2 parts, then 4, 8, ... Other side
    effects of a failed try remain (running statistics of batch norm, your own counters); batch norm sees
    smaller batches, and dropout draws new numbers. Existing gradients are copied first, which takes memory:
    ``zero_grad(set_to_none=True)``, torch's default, leaves none. With DistributedDataParallel, a failing
    rank would leave the other ranks waiting: pass the module inside it, and average the gradients afterwards.

    Every call starts with the whole batch again. Each failure takes the time of the step until then, a
    ``gc.collect()`` and a ``torch.cuda.empty_cache()``, which waits for the device and makes torch allocate
    its memory again. Use this for rare large batches: if most batches fail, take a size from
    `find_batch_size`, or divide each batch yourself into as many parts as a call returned results. Only
    torch.OutOfMemoryError counts, not a RuntimeError of cuDNN or cuBLAS for lack of memory, nor MemoryError.
    After any other error the gradients stay as the step left them.

    Args:
        step: Called once for each part, in order. Keep no tensor of a failed try outside of it.
        batch: A tensor, or nested dicts, lists, tuples, ... All tensors with dimensions have the batch's size
            first and are split there; so are lists of that length without tensors, and tuples of that many
            strings. Each part gets everything else whole, also NumPy arrays.
        model: The module to whose gradients the step adds, or its parameters; None without gradient
            accumulation.
        min_size: The minimum number of samples in a part.

    Returns:
        The results of the steps, in the order of the parts: one result if memory sufficed.

    Raises:
        torch.OutOfMemoryError: The smallest allowed parts do not fit either; a note lists the sizes tried.
        ValueError: ``min_size`` is below 1, or the tensors of the batch do not agree on its size.
        TypeError: The batch has no tensor, or has an object with its own ``to(device)``; ``model`` is neither
            a module nor parameters; or ``min_size`` is not an int.
    """
    _check_sizes(min_size=min_size)
    at_entry = _gradients(model)
    num_samples = _count_samples(batch)
    parts = [(batch, num_samples)]
    tried: list[int] = []
    while True:
        tried.append(max(size for _, size in parts))
        num_parts = min(2 * len(parts), num_samples // min_size)
        results: list[Result] = []
        try:
            for part, size in parts:
                results.append(step(part, size / max(num_samples, 1)))
            return results
        except torch.OutOfMemoryError as error:
            if num_parts <= len(parts):
                _restore(at_entry)
                error.add_note(
                    f"retry_on_oom: a batch of {num_samples} samples does not fit in parts of "
                    f"{', '.join(map(str, tried))} samples, and min_size={min_size} allows no smaller parts"
                )
                raise
        # Outside the except clause, the error's traceback is gone, and with it the failed step's frames and
        # their tensors; this frame would keep the results.
        del results, parts, part
        _restore(at_entry)
        _free_cached_memory()
        parts = split_batch(batch, num_parts)


def find_batch_size(
    step: Callable[[Any], Any], make_batch: Callable[[int], Any], *, start: int = 1, limit: int = 4096
) -> int:
    """Find the largest batch size, up to ``limit``, whose step does not run out of the device's memory.

    The size is doubled from ``start`` until it does not fit, then the gap is halved until it is closed: about
    ``2 * log2(limit)`` steps. If ``start`` does not fit, it is halved. Let ``step`` do everything that
    training does, including the optimizer's step (its state takes memory), on a disposable model. Use
    somewhat less than the result: memory fragments, and shapes vary. The device memory that the tries
    reserved is freed at the end.

    Args:
        step: ``step(batch)``; its result is dropped.
        make_batch: ``make_batch(size)`` returns a batch of that many samples. Running out of the device's
            memory here counts as well.
        start: The first size to try.
        limit: The largest size to try; the result if it fits.

    Raises:
        torch.OutOfMemoryError: One sample does not fit.
        ValueError: Not ``1 <= start <= limit``.
        TypeError: ``start`` or ``limit`` is not an int.
    """
    _check_sizes(start=start, limit=limit)
    if start > limit:
        raise ValueError(f"start should be from 1 to limit, but got start={start} and limit={limit}")
    fits, size, too_large = 0, start, limit + 1
    while too_large - fits > 1:
        try:
            step(make_batch(size))
            fits = size
        except torch.OutOfMemoryError as error:
            if size == 1:
                error.add_note("find_batch_size: a batch of one sample does not fit")
                raise
            too_large = size
        if too_large == size:  # here, the frames of the failed step are gone
            _free_cached_memory()
        is_open_ended = too_large > limit
        size = min(2 * size, limit) if is_open_ended else (fits + too_large) // 2
    _free_cached_memory()
    return fits


def _check_sizes(**sizes: Any) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} should be an int, a number of samples, but got {value!r}")
        if value < 1:
            raise ValueError(f"{name} should be at least 1 sample, but got {value}")


def _free_cached_memory() -> None:
    """Free unused memory of the allocator, after collecting cycles that frames of a failed step can form."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _gradients(model: Any) -> list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]:
    """The parameters of a model, their gradients, and the values that these have now."""
    pairs = ((parameter, parameter.grad) for parameter in _parameters(model))
    return [(parameter, grad, None if grad is None else grad.detach().clone()) for parameter, grad in pairs]


@torch.no_grad()
def _restore(gradients: Iterable[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]) -> None:
    for parameter, gradient, values in gradients:
        if gradient is not None and values is not None:
            gradient.copy_(values)
        parameter.grad = gradient


def _parameters(model: Any) -> list[torch.Tensor]:
    if isinstance(model, nn.Module):
        return list(model.parameters())
    # A single tensor is an iterable too, but its rows have no gradients.
    is_iterable = isinstance(model, Iterable) and not isinstance(model, torch.Tensor)
    parameters = list(model) if is_iterable else [] if model is None else [model]
    others = [type(item).__name__ for item in parameters if not isinstance(item, torch.Tensor)]
    if others or not (is_iterable or model is None):
        raise TypeError(
            "model should be a module, its parameters, or None if the step computes no gradients, but got "
            f"{', '.join(others) or type(model).__name__}; several modules go into an nn.ModuleList"
        )
    return parameters


# --- parts of a batch ------------------------------------------------------------------------------------


def split_batch(batch: Any, num_parts: int) -> list[tuple[Any, int]]:
    """The batch in ``num_parts`` parts along the first dimension, each with its number of samples.

    Parts are views; see `retry_on_oom` for what is split and what is shared.

    Raises:
        ValueError: The tensors do not agree on the batch's size.
        TypeError: There is no tensor in the batch, or an object with its own ``to(device)``.
    """
    num_samples = _count_samples(batch)
    bounds = itertools.pairwise(number * num_samples // num_parts for number in range(num_parts + 1))
    return [(_slice(batch, slice(first, last), num_samples), last - first) for first, last in bounds]


def _count_samples(batch: Any) -> int:
    leaves = _leaves(batch)
    foreign = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    shapes = [tuple(leaf.shape) for leaf in leaves if not foreign and leaf.ndim]
    if not shapes:
        found = f"with a {foreign[0]}" if foreign else "without any"
        text = f"retry_on_oom divides batches of tensors, but got {type(batch).__name__} {found}"
        raise TypeError(f"{text}: pass the tensors alone, or divide the batch yourself")
    if len({shape[0] for shape in shapes}) > 1:
        listed = ", ".join(map(str, shapes))
        raise ValueError(f"the tensors of the batch should agree on its size, but have the shapes {listed}")
    return int(shapes[0][0])


def _leaves(value: Any) -> list[Any]:
    """The tensors of a batch, and its objects with their own ``to``, whose contents are unknown."""
    leaves: list[Any] = []

    def note(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    map_device_leaves(value, note)
    return leaves


def _slice(batch: Any, samples: slice, num_samples: int) -> Any:
    def is_per_sample(value: Any) -> bool:
        if type(value) not in (list, tuple) or len(value) != num_samples:
            return False
        if type(value) is tuple:  # default_collate returns strings so; (height, width) must not be split
            return all(isinstance(item, (str, bytes)) for item in value)
        return not _leaves(value)

    def cut(leaf: Any) -> Any:
        return leaf[samples] if not isinstance(leaf, torch.Tensor) or leaf.ndim else leaf

    return map_device_leaves(batch, cut, is_per_sample)
