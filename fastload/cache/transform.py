"""Call the random part on read-only memory: conventions, refusals, aliases.

Called by `dataset` at each access, in any process. Rules:

1. The transform is given arrays over read-only memory, which costs no copy; most transforms only read.
2. If it refuses (an error that says so), it is called again with private copies, and is given copies from
   then on. torch refuses nothing: it would write to the read-only pages, which ends the process. So the first
   calls are trials on private memory that says it is read-only; a transform that was seen to write to it, or
   to make tensors over it, is given copies from then on too.
3. Nothing that it returns lies in the cache: what does is copied.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.cache.guard import is_albumentations
from fastload.cache.nests import leaves, map_leaves, private_copy
from fastload.cache.spec import is_namedtuple
from fastload.rng.sample_rng import mark, rewind

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.cache.leaves import Array

_TRIALS = 8  # in each process; a pipeline that tosses coins shows most of its ways in these
# NumPy: "assignment destination is read-only", "cannot set WRITEABLE flag"; OpenCV: "NumPy array marked as
# readonly", "Layout of the output array is incompatible with cv::Mat"; torch: "array is not writable".
_REFUSAL = re.compile(r"read-?only|writ(e)?able|cv::Mat", re.IGNORECASE)
_TORCH_WARNING = "The given NumPy array is not writ"


class TransformCaller:
    """Calls one transform, and remembers what it needs.

    Args:
        transform: An albumentations pipeline, or any callable that takes a sample.

    Attributes:
        transform: The same.
        needs_copies: Whether it is given private copies.
    """

    def __init__(self, transform: Callable[..., Any]) -> None:
        self.transform = transform
        self.needs_copies = False
        self._call = _convention(transform)
        self._trials_left = _TRIALS

    def __call__(self, fetch: Callable[[], Any]) -> Any:
        """The transform's output for the sample that `fetch()` gives; nothing in it lies in the cache.

        Args:
            fetch: Gives the sample: read-only arrays, private tensors. Called again after a refusal, because
                the transform may have changed its containers before.
        """
        if self.needs_copies:
            return self._call(self.transform, private_copy(fetch()))
        sample = fetch()
        # A call that is refused has drawn some numbers; the next one begins where it began.
        restore = mark() if self._trials_left else rewind
        try:
            if self._trials_left:
                self._trials_left -= 1
                return self._try(sample)
            arrays = _arrays(sample)
            return _detached(self._call(self.transform, sample), arrays)
        except Exception as error:
            if not _REFUSAL.search(str(error)):
                raise
        copy = private_copy(fetch())
        restore()
        output = self._call(self.transform, copy)
        self.needs_copies = True
        return output

    def _try(self, sample: Any) -> Any:
        originals = _arrays(sample)
        given = map_leaves(private_copy(sample), _sealed)
        arrays = _arrays(given)
        with warnings.catch_warnings():
            # An error here is a refusal above; torch would print it once, and nobody could make use of it.
            warnings.filterwarnings("error", message=_TORCH_WARNING)
            output = self._call(self.transform, given)
        makes_tensors = any(
            isinstance(leaf, torch.Tensor) and _lies_in(leaf, arrays) for leaf in leaves(output)
        )
        has_written = any(new.tobytes() != old.tobytes() for new, old in zip(arrays, originals, strict=True))
        self.needs_copies = makes_tensors or has_written
        return _detached(output, arrays)


# --- memory ----------------------------------------------------------------------------------------------


def _arrays(sample: Any) -> list[Array]:
    return [leaf for leaf in leaves(sample) if isinstance(leaf, np.ndarray)]


def _sealed(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        leaf.flags.writeable = False
    return leaf


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _lies_in(leaf: Any, arrays: list[Array]) -> bool:
    """Whether an array or tensor starts within the memory of one of these C-contiguous arrays."""
    if isinstance(leaf, np.ndarray):
        address = _address(leaf)
    elif isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type == "cpu":
        address = leaf.data_ptr()
    else:
        return False
    return any(start <= address < start + array.nbytes for array in arrays for start in (_address(array),))


def _detached(output: Any, arrays: list[Array]) -> Any:
    """The output with copies of those leaves that lie in the arrays' memory; their strides stay in order."""

    def detach(leaf: Any) -> Any:
        if not _lies_in(leaf, arrays):
            return leaf
        return leaf.copy(order="K") if isinstance(leaf, np.ndarray) else leaf.clone()

    return map_leaves(output, detach)


# --- conventions -----------------------------------------------------------------------------------------


def apply(transform: Callable[..., Any], sample: Any) -> Any:
    """The transform's output for a sample that is the caller's own."""
    return _convention(transform)(transform, sample)


def _convention(transform: Callable[..., Any]) -> Callable[[Callable[..., Any], Any], Any]:
    return _call_albumentations if is_albumentations(transform) else _call_plain


def _call_plain(transform: Callable[..., Any], sample: Any) -> Any:
    return transform(sample)


def _call_albumentations(transform: Callable[..., Any], sample: Any) -> Any:
    """The named targets of albumentations: a dict is these, an array is the image, a tuple starts with it.

    Raises:
        TypeError: The sample is none of these, or a tuple whose mask would miss the transform.
    """
    if isinstance(sample, dict):
        return transform(**sample)
    if isinstance(sample, np.ndarray):
        return transform(image=sample)["image"]
    if not isinstance(sample, (tuple, list)) or not sample or not isinstance(sample[0], np.ndarray):
        raise TypeError(
            f"an albumentations transform takes an image array, a tuple that starts with one, or a dict with "
            f'"image"; the dataset returned {_name(sample)}'
        )
    image, *rest = sample
    for position, other in enumerate(rest, start=1):
        if isinstance(other, np.ndarray) and other.ndim >= 2 and other.shape[:2] == image.shape[:2]:
            raise TypeError(
                f"element {position} of the sample has the image's height and width {image.shape[:2]}: a "
                'mask must be transformed with its image. Return {"image": ..., "mask": ...} from the dataset'
            )
    values = [transform(image=image)["image"], *rest]
    if is_namedtuple(sample):
        return type(sample)._make(values)  # type: ignore[union-attr]
    return tuple(values) if isinstance(sample, tuple) else values


def _name(sample: Any) -> str:
    if isinstance(sample, (tuple, list)) and sample:
        return f"a {type(sample).__name__} that starts with {type(sample[0]).__name__}"
    return f"a {type(sample).__name__}"
