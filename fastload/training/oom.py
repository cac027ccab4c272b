"""Out of memory on the device: the same step again on smaller pieces, and the largest batch that fits.

1. Only torch.OutOfMemoryError counts, which torch's caching allocators raise. Any other error passes through.
2. The next try starts outside the except clause: there the error's traceback, and with it the failed
   step's frames and their tensors, are gone.
3. Gradients are put back as they were at entry before every further try, and before the error is given up to
   the caller: a step is repeated as a whole, never continued.
4. Random numbers are not put back: dropout draws anew in a second try, as it would in the next step.
"""

from __future__ import annotations

import gc
import itertools
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fastload.nested.device_tree import map_leaves

Result = TypeVar("Result")
Split = Callable[[Any, int], Sequence[tuple[Any, int]]]


def retry_on_oom(
    step: Callable[[Any, float], Result],
    batch: Any,
    *,
    model: nn.Module | Iterable[torch.Tensor] | None,
    min_size: int = 1,
    split: Split | None = None,
) -> list[Result]:
    """Run ``step(batch, 1.0)``; if the device's memory runs out, run it on ever smaller parts instead.

    ``step(part, weight)`` does forward and backward only; ``weight`` is the part's share of the batch, so
    that with ``(loss * weight).backward()`` the gradients of a mean over the batch add up::

        optimizer.zero_grad()
        losses = fastload.retry_on_oom(step, batch, model=model)
        optimizer.step()

    Parts are views of the batch, of sizes that differ by one at most: 2 parts, then 4, 8, ... What a step
    changes besides gradients (running statistics of batch norm, counters of its own) keeps the changes of
    failed tries, batch norm sees smaller batches, and dropout draws anew. Gradients that exist at entry are
    copied first, which takes memory: ``zero_grad(set_to_none=True)``, torch's default, leaves none. With
    DistributedDataParallel a failing rank would leave the others waiting: give it the module inside, and
    average the gradients after.

    Every call starts from the whole batch again, and each failure costs the step's time until then, a
    ``gc.collect()`` and a ``torch.cuda.empty_cache()``, which waits for the device and has memory asked for
    anew. This is for the rare batch: if most fail, take a size from `find_batch_size`, or divide each batch
    yourself by as many parts as a call gave results. Only torch.OutOfMemoryError counts, not a RuntimeError
    of cuDNN or cuBLAS for lack of memory, nor MemoryError. After any other error gradients are as the step
    left them.

    Args:
        step: Called once for each part, in order. Keep no tensor of a failed try outside of it.
        batch: A tensor, or a nest of dicts, lists, tuples, ... All tensors with dimensions have the batch's
            size first and are split there; so are lists of that length without tensors in them, and tuples
            of that many strings. Everything else, NumPy arrays too, goes whole into each part.
        model: Whose gradients the step adds to: a module, or its parameters; None if there are none.
        min_size: Parts are never smaller than this many samples.
        split: For batches of another kind: ``split(batch, num_parts)`` gives that many parts in order, each
            with its number of samples: a list of ``(part, size)``. It is asked for one part first, and never
            for more than the samples.

    Returns:
        What the steps returned, in the order of the parts: one result if memory sufficed.

    Raises:
        torch.OutOfMemoryError: The smallest allowed parts do not fit either; a note has the sizes tried.
        ValueError: ``min_size`` is below 1; the tensors of the batch do not agree on its size; or ``split``
            gave other parts than it was asked for.
        TypeError: There is no tensor in the batch, or an object with a ``to(device)`` of its own; ``model``
            is neither a module nor parameters; or ``min_size`` is no int.
    """
    _check_size("min_size", min_size)
    divide = split or split_batch
    entry = _Gradients(model)
    parts = _checked(divide(batch, 1), 1)
    num_samples = sum(size for _, size in parts)
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
                entry.restore()
                error.add_note(_tried(tried, num_samples, min_size))
                raise
        del results, parts, part  # or this frame would keep what the failed try gave
        entry.restore()
        _free_cached_memory()
        parts = _checked(divide(batch, num_parts), num_parts, num_samples)


def find_batch_size(
    step: Callable[[Any], Any], make_batch: Callable[[int], Any], *, start: int = 1, limit: int = 4096
) -> int:
    """The largest batch size, up to ``limit``, whose step does not run out of the device's memory.

    Sizes are doubled from ``start`` until one does not fit, then the gap is halved until it is closed: about
    ``2 * log2(limit)`` steps. A ``start`` that does not fit is halved. Let ``step`` do what training does,
    the optimizer's step too (its state takes memory), on a model that may be thrown away. Leave some room
    below the answer: memory fragments, and other shapes come. Device memory that the tries reserved is given
    back at the end.

    Args:
        step: ``step(batch)``; what it returns is dropped.
        make_batch: ``make_batch(size)`` gives a batch of that many samples. Running out of the device's
            memory here counts as well.
        start: The first size to try.
        limit: The last one; the answer if it fits.

    Raises:
        torch.OutOfMemoryError: One sample does not fit.
        ValueError: Not ``1 <= start <= limit``.
        TypeError: ``start`` or ``limit`` is no int.
    """
    for name, size in (("start", start), ("limit", limit)):
        _check_int(name, size)
    if not 1 <= start <= limit:
        raise ValueError(f"start should be from 1 to limit, but got start={start} and limit={limit}")
    fits, size, too_large = 0, start, limit + 1
    while too_large - fits > 1:
        if _fits(step, make_batch, size):
            fits = size
        else:
            too_large = size
            _free_cached_memory()
        is_open_ended = too_large > limit
        size = min(2 * size, limit) if is_open_ended else (fits + too_large) // 2
    _free_cached_memory()
    return fits


def _check_size(name: str, value: int) -> None:
    _check_int(name, value)
    if value < 1:
        raise ValueError(f"{name} should be at least 1 sample, but got {value}")


def _check_int(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} should be an int, a number of samples, but got {value!r}")


def _fits(step: Callable[[Any], Any], make_batch: Callable[[int], Any], size: int) -> bool:
    try:
        step(make_batch(size))
    except torch.OutOfMemoryError as error:
        if size == 1:
            error.add_note("find_batch_size: a batch of one sample does not fit")
            raise
        return False
    return True


def _tried(sizes: list[int], num_samples: int, min_size: int) -> str:
    return (
        f"retry_on_oom: a batch of {num_samples} samples does not fit in parts of "
        f"{', '.join(str(size) for size in sizes)} samples, and min_size={min_size} allows no smaller ones"
    )


def _free_cached_memory() -> None:
    """Give the allocator back what nobody uses: frames of a failed step may be part of a cycle."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class _Gradients:
    """The gradients of a model at one moment. Restored into the same tensors, where there were any."""

    def __init__(self, model: nn.Module | Iterable[torch.Tensor] | None) -> None:
        self._saved: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []
        for parameter in _parameters(model):
            gradient = parameter.grad
            self._saved.append((parameter, gradient, None if gradient is None else gradient.detach().clone()))

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, gradient, values in self._saved:
                if gradient is not None and values is not None:
                    gradient.copy_(values)
                parameter.grad = gradient


def _parameters(model: Any) -> list[torch.Tensor]:
    if isinstance(model, nn.Module):
        return list(model.parameters())
    # A lone tensor is an iterable too, of rows that have no gradients.
    is_iterable = isinstance(model, Iterable) and not isinstance(model, torch.Tensor)
    found = [] if model is None else list(model) if is_iterable else [model]
    strangers = [item for item in found if not isinstance(item, torch.Tensor)]
    if strangers or not (is_iterable or model is None):
        what = _kind(model)
        if is_iterable:
            what = f"{what} with {_kind(strangers[0])} in it"
        raise TypeError(
            f"model should be a module, its parameters, or None if the step computes no gradients, "
            f"but got {what}; several modules go into an nn.ModuleList"
        )
    return found


# --- parts of a batch ------------------------------------------------------------------------------------


def split_batch(batch: Any, num_parts: int) -> list[tuple[Any, int]]:
    """The batch in ``num_parts`` parts along the first dimension, each with its number of samples.

    Parts are views; see `retry_on_oom` for what is split and what is shared. One part is the batch itself.

    Raises:
        ValueError: The tensors do not agree on the batch's size.
        TypeError: There is no tensor in the batch, or an object with a ``to(device)`` of its own.
    """
    num_samples = _count_samples(batch)
    if num_parts == 1:
        return [(batch, num_samples)]
    bounds = [number * num_samples // num_parts for number in range(num_parts + 1)]
    return [
        (_slice(batch, slice(first, last), num_samples), last - first)
        for first, last in itertools.pairwise(bounds)
    ]


def _checked(parts: Any, num_parts: int, num_samples: int | None = None) -> list[tuple[Any, int]]:
    """``parts`` if they are what a split should give, of so many samples together if that is known."""
    if isinstance(parts, (list, tuple)) and len(parts) == num_parts and all(map(_is_pair, parts)):
        sizes = [int(size) for _, size in parts]
        if num_samples is None or (min(sizes) > 0 and sum(sizes) == num_samples):
            return [(part, size) for (part, _), size in zip(parts, sizes, strict=True)]
    together = "" if num_samples is None else f", none empty, {num_samples} samples together"
    raise ValueError(
        f"split should give {num_parts} parts, each a pair (part, number of samples){together}, "
        f"but gave {_kind(parts)}"
    )


def _is_pair(value: Any) -> bool:
    is_pair = isinstance(value, (list, tuple)) and len(value) == 2
    return is_pair and isinstance(value[1], numbers.Integral) and int(value[1]) >= 0


def _kind(value: Any, depth: int = 2) -> str:
    """A value for a message: types, lengths and numbers, never what is in tensors."""
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        return f"{name} of shape {tuple(value.shape)}"
    if isinstance(value, (bool, int, float)):
        return f"{name} {value}"
    if isinstance(value, (list, tuple)):
        shown = [_kind(item, depth - 1) for item in value[:4]] if depth else []
        shown += ["..."] * (depth > 0 and len(value) > 4)
        return f"{name} of {len(value)}" + (f" ({', '.join(shown)})" if shown else "")
    return f"{name} of {len(value)}" if isinstance(value, (str, bytes, dict)) else name


def _count_samples(batch: Any) -> int:
    leaves = _leaves(batch)
    foreign = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    if foreign:
        raise TypeError(f"retry_on_oom cannot divide a {foreign[0]}; split= can say how to divide the batch")
    shapes = [tuple(leaf.shape) for leaf in leaves if leaf.ndim]
    if not shapes:
        raise TypeError(
            f"retry_on_oom expects a batch with tensors, but got {type(batch).__name__} without any; "
            "split= can say how to divide it"
        )
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            f"the tensors of the batch do not agree on its size: shapes {', '.join(map(str, shapes))}; "
            "split= can say how to divide it"
        )
    return int(shapes[0][0])


def _leaves(value: Any) -> list[Any]:
    """Tensors, and objects that move themselves and hold we do not know what."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(value, note)
    return found


def _slice(batch: Any, samples: slice, num_samples: int) -> Any:
    def is_per_sample(value: Any) -> bool:
        if type(value) not in (list, tuple) or len(value) != num_samples:
            return False
        if type(value) is tuple:  # as default_collate gives strings; (height, width) is no such tuple
            return all(isinstance(item, (str, bytes)) for item in value)
        return not _leaves(value)

    def cut(leaf: Any) -> Any:
        return leaf[samples] if not isinstance(leaf, torch.Tensor) or leaf.ndim else leaf

    return map_leaves(batch, cut, is_per_sample)
