"""Calls the user's transform or pre_transform: calling conventions, private copies, and notes on errors.

Rules:

1. The transform gets private copies of the sample's arrays: it can write to them, and torch would write even
   to read-only memory, which kills the process.
2. Only an albumentations pipeline whose code is all known (see `zero_copy`) gets the cache's own read-only
   arrays, and only if they are uint8.
3. Its output shares no memory with the cache: arrays and tensors that lie in the cache's memory are copied.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.albumentations.crop import Pushdown
from fastload.albumentations.deferred_end import find_tail
from fastload.albumentations.read_only import keeps_read_only
from fastload.cache.format.undecoded import decode_images, decode_others
from fastload.errors import ImageReadError
from fastload.images.encoded import EncodedImage
from fastload.images.transform import is_albumentations
from fastload.nested.spec import is_namedtuple
from fastload.nested.tree import OpaqueLeafError, copy_views, private_copy, structure_of
from fastload.system.notes import add_note

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.albumentations.deferred_end import Tail

_IMAGES = (np.ndarray, EncodedImage)
_UINT8 = np.dtype(np.uint8)


class Call:
    """Calls a user's function by its convention, and notes its input on its errors.

    Args:
        role: The name of the function's argument: `"transform"` or `"pre_transform"`.
        function: An albumentations pipeline, or any callable that takes a sample.
        decode: How undecoded images in a sample are decoded for a pipeline that begins with a crop, `"exact"`
            or `"fast"` (see CachedDataset); None: samples hold no undecoded images.

    Raises:
        TypeError: The function is not callable.
    """

    def __init__(self, role: str, function: Callable[..., Any], decode: str | None = None) -> None:
        check_callable(role, function)
        if decode is not None:
            check_decode(decode)
        self._role = role
        self._function = function
        self._is_albumentations = is_albumentations(function)
        self._decode = decode
        # The pipeline that decodes the image itself; None if the function is not albumentations'.
        self.pushdown: Pushdown | None = None
        if decode is not None and self._is_albumentations:
            self.pushdown = Pushdown(function, reduces=decode == "fast")

    def __call__(self, sample: Any, given: Any, index: int, tail: Tail | None = None) -> Any:
        """The function's output for `given`.

        Args:
            sample: The sample, or the same sample without copies, for the note on an error.
            given: The sample as the function gets it; the function can change it.
            index: The sample's index, for the note.
            tail: Runs the function and returns the image as a `PendingImage`; None: the image is computed.

        Raises:
            Exception: An error of the function, with a note that describes its input.
        """
        function: Callable[..., Any] = self._function if tail is None else tail
        if self._decode is not None:
            if self.pushdown is not None and type(_image_of(given)) is EncodedImage:
                given = decode_others(given)
                function = self.pushdown if tail is None else tail.through(self.pushdown.run)
            else:
                given = decode_images(given)
        try:
            return _call_albumentations(function, given) if self._is_albumentations else function(given)
        except ImageReadError:
            raise  # of the image, not of the function
        except Exception as error:
            extent = "the image or the named targets of a" if self._is_albumentations else "the whole"
            looks_chw = self._is_albumentations and _looks_chw(_image_of(sample))
            cure = "; images should be (H, W, C): transpose them in the dataset" if looks_chw else ""
            add_note(
                error,
                f"fastload calls the {self._role} with {extent} sample; sample {index} is "
                f"{structure_of(sample)}{cure}",
            )
            raise


class TransformCaller:
    """Calls one transform on cached samples.

    Args:
        transform: An albumentations pipeline, or any callable that takes a sample.
        decode: As of `Call`.

    Attributes:
        transform: The same.
        decode: The same.

    Raises:
        TypeError: The transform is not callable.
    """

    def __init__(self, transform: Callable[..., Any], decode: str | None = None) -> None:
        self._call = Call("transform", transform, decode)
        self.transform = transform
        self.decode = decode
        self._keeps_read_only = keeps_read_only(transform)
        self._tail = find_tail(transform)
        self._steps = _steps_of(transform) if is_albumentations(transform) else None

    def serves(self, transform: Callable[..., Any], decode: str | None) -> bool:
        """Whether this calls ``transform``, with the steps that it has now; programs change pipelines."""
        if self.transform is not transform or self.decode != decode:
            return False
        return self._steps is None or _steps_of(transform) == self._steps

    def explain_decoding(self) -> str:
        """What is decoded of an undecoded image, in one clause."""
        pushdown = self._call.pushdown
        if pushdown is None:
            return "whole images are decoded: the transform is not an albumentations pipeline"
        return pushdown.explain()

    def __call__(self, fetch: Callable[[int], Any], index: int, *, pends: bool = False) -> Any:
        """The transform's output for the sample `fetch(index)`; it shares no memory with the cache.

        Args:
            fetch: Returns the sample: read-only arrays, private tensors.
            index: The sample's index.
            pends: Whether the image can be a `PendingImage`, which can read the memory of the cache.

        Raises:
            Exception: An error of the transform, with a note that describes its input.
        """
        sample = fetch(index)
        tail = self._tail if pends else None
        keeps = self._keeps_read_only if tail is None else tail.keeps_read_only
        if not keeps or not _is_uint8(sample):
            return self._call(sample, private_copy(sample), index, tail)
        output = self._call(sample, sample, index, tail)
        try:
            return copy_views(output, sample)
        except OpaqueLeafError:
            return copy.deepcopy(output)


def _steps_of(pipeline: Any) -> list[Any]:
    """The steps of an albumentations pipeline, and their probabilities; empty for a single transform."""
    steps = getattr(pipeline, "transforms", ())
    return [*steps, *[step.p for step in steps]]


def check_decode(decode: object) -> None:
    """Check the argument `decode` of a CachedDataset.

    Raises:
        ValueError: It is neither "exact" nor "fast".
    """
    if decode not in ("exact", "fast"):
        raise ValueError(f'decode should be "exact" or "fast", but got {decode!r}')


def check_callable(role: str, function: Any) -> None:
    """Check that a `transform` or `pre_transform` can be called.

    Raises:
        TypeError: It is not callable, or is a class of albumentations instead of an instance.
    """
    if isinstance(function, type) and is_albumentations(function):  # by its metaclass
        raise TypeError(
            f"{role} is the class {function.__name__}: pass an instance of it, such as "
            f"{role}={function.__name__}(p=0.5)"
        )
    if not callable(function):
        raise TypeError(
            f"{role}={function!r:.80} is of type {type(function).__name__}, which is not callable: pass an "
            "albumentations pipeline, a function that takes a sample, or None"
        )


def _is_uint8(sample: Any) -> bool:
    """Whether all images and masks of a sample are uint8 arrays, or undecoded."""
    if not isinstance(sample, dict):
        return getattr(_image_of(sample), "dtype", _UINT8) == _UINT8
    return all(
        not isinstance(value, np.ndarray) or value.dtype == _UINT8 or name in ("bboxes", "keypoints")
        for name, value in sample.items()
    )


# --- conventions -----------------------------------------------------------------------------------------


def _image_of(sample: Any) -> Any:
    """The value that an albumentations transform gets as the image."""
    if isinstance(sample, dict):
        return sample.get("image")
    return sample[0] if isinstance(sample, (tuple, list)) and sample else sample


def _looks_chw(image: Any) -> bool:
    """Whether an array has the layout of torch's images."""
    channels = (1, 3, 4)
    is_array = isinstance(image, np.ndarray) and image.ndim == 3
    return is_array and image.shape[0] in channels and image.shape[2] not in channels


def _call_albumentations(transform: Any, sample: Any) -> Any:
    """Call with named targets: a dict holds them, an array is the image, a tuple starts with the image.

    Raises:
        TypeError: The sample is none of these, its image is a tensor, it is a tuple whose mask would not be
            transformed, or a dict without a target of the transform.
    """
    if (
        type(sample) is tuple
        and len(sample) == 2
        and type(sample[1]) is int
        and isinstance(sample[0], _IMAGES)
    ):
        return transform(image=sample[0])["image"], sample[1]  # most samples: faster than the checks below
    if isinstance(_image_of(sample), torch.Tensor):
        raise TypeError(
            "an albumentations transform takes the image as a NumPy array, (H, W, C) uint8 or float32; the "
            f"dataset returned {structure_of(sample)}: return the array before it is converted to a tensor, "
            "and put ToTensorV2() last in the transform"
        )
    if isinstance(sample, dict):
        targets = getattr(transform, "available_keys", None)
        if targets and sample.keys().isdisjoint(targets):
            raise TypeError(
                f"the albumentations transform takes the keys {sorted(targets)}; the dataset returned a dict "
                f"with {list(sample)!r:.200}: use those keys for the arrays to be transformed"
            )
        return transform(**sample)
    if isinstance(sample, _IMAGES):
        return transform(image=sample)["image"]
    if not isinstance(sample, (tuple, list)) or not sample or not isinstance(sample[0], _IMAGES):
        raise TypeError(
            f"an albumentations transform takes an image array, a tuple that starts with one, or a dict with "
            f'"image"; the dataset returned {structure_of(sample)}'
        )
    image, *rest = sample
    for position, other in enumerate(rest, start=1):
        if isinstance(other, np.ndarray) and other.ndim >= 2 and other.shape[:2] == image.shape[:2]:
            raise TypeError(
                f"element {position} of the sample has the image's height and width {image.shape[:2]}: a "
                'mask must be transformed with its image. Return {"image": ..., "mask": ...} from the dataset'
            )
    values = (transform(image=image)["image"], *rest)
    if type(sample) is tuple:
        return values
    if is_namedtuple(sample):
        return type(sample)._make(values)  # type: ignore[union-attr]
    return values if isinstance(sample, tuple) else list(values)
