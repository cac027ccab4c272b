"""Calls the user's transform or prepare function: calling conventions, private copies, and notes on errors.

Rules:

1. The transform gets private copies of the sample's arrays: it may write to them, and torch would write even
   to read-only memory, which ends the process.
2. Only an albumentations pipeline of which all code is known (see `zero_copy`) gets the cache's own read-only
   arrays. If it refuses them, or returns an object that may contain one, it is called again with copies, and
   gets copies from then on.
3. Its output shares no memory with the cache: arrays and tensors that lie in the cache's memory are copied.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.encoded import decode_images, decode_others
from fastload.cache.fingerprint import is_albumentations
from fastload.cache.pushdown import Pushdown
from fastload.cache.zero_copy import keeps_read_only
from fastload.errors import ImageReadError, add_note
from fastload.images.encoded import EncodedImage
from fastload.nested.spec import is_namedtuple
from fastload.nested.tree import HiddenMemoryError, detached, outline, private_copy
from fastload.rng.sample_rng import rewind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# NumPy: "assignment destination is read-only", "cannot set WRITEABLE flag"; OpenCV: "NumPy array marked as
# readonly", "Layout of the output array is incompatible with cv::Mat"; Python: "memoryview is read-only".
_REFUSAL = re.compile(r"read-?only|writ(e)?able|cv::Mat", re.IGNORECASE)
_IMAGES = (np.ndarray, EncodedImage)
_MAX_KEYS = 12  # that an error lists
_MAX_CHAIN = 16  # errors in one chain; a library wraps an error once or twice


class Call:
    """Calls a user's function by its convention, and adds a note about its input to its errors.

    Args:
        role: The name of the function's argument: `"transform"` or `"prepare"`.
        function: An albumentations pipeline, or any callable that takes a sample.
        decode: How undecoded images in a sample are decoded for a pipeline that begins with a crop, `"exact"`
            or `"fast"` (see CachedDataset); None: samples hold no undecoded images.

    Raises:
        TypeError: The function cannot be called.
    """

    def __init__(self, role: str, function: Callable[..., Any], decode: str | None = None) -> None:
        check_callable(role, function)
        if decode is not None:
            check_decode(decode)
        self._role = role
        self._function = function
        self._is_albumentations = is_albumentations(function)
        self._decode = decode
        self._pushdown: Pushdown | None = None

    @property
    def pushdown(self) -> Pushdown | None:
        """The pipeline that decodes the image itself; None if the function is not of albumentations."""
        if self._pushdown is None and self._is_albumentations:
            self._pushdown = Pushdown(self._function, reduces=self._decode == "fast")
        return self._pushdown

    def __call__(self, sample: Any, given: Any, index: int) -> Any:
        """The function's output for `given`.

        Args:
            sample: The sample, or the same sample without copies, for the note on an error.
            given: The sample as the function gets it; the function may change it.
            index: The sample's index, for the note.

        Raises:
            Exception: An error of the function, with a note that describes its input.
        """
        function = self._function
        if self._decode is not None:
            image = _image_of(given) if self._is_albumentations else None
            if type(image) is EncodedImage:
                given, function = decode_others(given), self.pushdown or function
            else:
                given = decode_images(given)
        try:
            return _call_albumentations(function, given) if self._is_albumentations else function(given)
        except ImageReadError:
            raise  # of the image, not of the function
        except Exception as error:
            extent = "the image or the named targets of a" if self._is_albumentations else "the whole"
            add_note(
                error,
                f"fastload calls the {self._role} with {extent} sample; sample {index} is {outline(sample)}",
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
        needs_copies: Whether the transform gets private copies. It changes at most once, from False to True,
            so several threads may share a caller.

    Raises:
        TypeError: The transform cannot be called.
    """

    def __init__(self, transform: Callable[..., Any], decode: str | None = None) -> None:
        self._call = Call("transform", transform, decode)
        self.transform = transform
        self.decode = decode
        self.needs_copies = not keeps_read_only(transform)

    def explain_decoding(self) -> str:
        """What is decoded of an undecoded image, in one clause."""
        pushdown = self._call.pushdown
        if pushdown is None:
            return "whole images are decoded: the transform is not an albumentations pipeline"
        return pushdown.explain()

    def __call__(self, fetch: Callable[[int], Any], index: int) -> Any:
        """The transform's output for the sample `fetch(index)`; it shares no memory with the cache.

        Args:
            fetch: Returns the sample: read-only arrays, private tensors. Called again after a refusal,
                because the transform may have changed the containers.
            index: The sample's index.

        Raises:
            Exception: An error of the transform, with a note that describes its input.
        """
        if not self.needs_copies:
            sample = fetch(index)
            try:
                output = self._call(sample, sample, index)
            except Exception as error:
                if not _is_refusal(error):
                    raise
            else:
                with contextlib.suppress(HiddenMemoryError):
                    return detached(output, sample)
            self.needs_copies = True
            rewind()  # this call drew random numbers; the next call starts from the same random state
        sample = fetch(index)
        return self._call(sample, private_copy(sample), index)


def check_decode(decode: object) -> None:
    """Check the argument `decode` of a CachedDataset.

    Raises:
        ValueError: It is neither "exact" nor "fast".
    """
    if decode not in ("exact", "fast"):
        raise ValueError(f'decode should be "exact" or "fast", but got {decode!r}')


def check_callable(role: str, function: Any) -> None:
    """Check that a `transform` or `prepare` can be called.

    Raises:
        TypeError: It is not callable, or is a class of albumentations instead of an instance.
    """
    if isinstance(function, type) and is_albumentations(function):  # by its metaclass
        raise TypeError(
            f"{role} is the class {function.__name__}: give an instance of it, such as "
            f"{role}={function.__name__}(p=0.5)"
        )
    if not callable(function):
        raise TypeError(
            f"{role}={function!r:.80} is of type {type(function).__name__}, which cannot be called: give an "
            "albumentations pipeline, a function that takes a sample, or None"
        )


def _is_refusal(error: BaseException) -> bool:
    """Whether an error, or an error in its chain, says that memory is read-only."""
    link: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if link is None:
            break
        if _REFUSAL.search(str(link)):
            return True
        has_cause = link.__cause__ is not None or link.__suppress_context__
        link = link.__cause__ if has_cause else link.__context__
    return False


# --- conventions -----------------------------------------------------------------------------------------


def _image_of(sample: Any) -> Any:
    """The value that an albumentations transform gets as the image."""
    if isinstance(sample, dict):
        return sample.get("image")
    return sample[0] if isinstance(sample, (tuple, list)) and sample else sample


def _call_albumentations(transform: Any, sample: Any) -> Any:
    """Call with named targets: a dict holds them, an array is the image, a tuple starts with the image.

    Raises:
        TypeError: The sample has none of these forms, is a tuple whose mask would not be transformed, or is a
            dict without a target of the transform.
    """
    if isinstance(sample, dict):
        targets = getattr(transform, "available_keys", None)
        if targets and sample.keys().isdisjoint(targets):
            raise TypeError(
                f"the albumentations transform takes the keys {_join(sorted(targets))}; the dataset returned "
                f"a dict with {_join(sample) or 'no key'}: use those keys for the arrays to be transformed"
            )
        return transform(**sample)
    if isinstance(sample, _IMAGES):
        return transform(image=sample)["image"]
    if not isinstance(sample, (tuple, list)) or not sample or not isinstance(sample[0], _IMAGES):
        raise TypeError(
            f"an albumentations transform takes an image array, a tuple that starts with one, or a dict with "
            f'"image"; the dataset returned {outline(sample)}'
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


def _join(keys: Iterable[Any]) -> str:
    first = [f"{key!r:.40}" for key in itertools.islice(keys, _MAX_KEYS + 1)]
    return ", ".join(first[:_MAX_KEYS] + ["…"] * (len(first) > _MAX_KEYS))
