"""Calls the user's transform or pre_transform: calling conventions, private copies, and notes on errors.

Rules:

1. The transform gets private copies of the sample's arrays: it can write to them, and torch would write even
   to read-only memory, which kills the process.
2. Only a pipeline of which its library says that it only reads gets the cache's own read-only arrays.
3. Its output shares no memory with the cache: arrays and tensors that lie in the cache's memory are copied.
"""

from __future__ import annotations

import copy
import functools
import operator
from typing import TYPE_CHECKING, Any

from fastload.augmentation.encoded import EncodedImage, decoded
from fastload.augmentation.libraries import ANY_CALLABLE, check_is_no_class, library_of
from fastload.errors import ImageReadError
from fastload.nested.tree import OpaqueLeafError, copy_views, owns, private_copy, structure_of
from fastload.system import torchvision_arrays
from fastload.system.notes import add_note

if TYPE_CHECKING:
    from collections.abc import Callable


class TransformCaller:
    """Calls a user's function by its convention, and notes its input on its errors.

    Args:
        function: A pipeline of a library that `augmentation` knows, or any callable that takes a sample.
        holds_images: Whether samples can begin with an undecoded image.
        role: The name of the function's argument: `"transform"` or `"pre_transform"`.

    Raises:
        TypeError: The function is not callable.
    """

    def __init__(
        self, function: Callable[..., Any], *, holds_images: bool = False, role: str = "transform"
    ) -> None:
        check_callable(role, function)
        self._role = role
        self._function = function
        self._holds_images = holds_images
        self._library = library = library_of(function)
        # Without a library, a function in C: a Python function around the user's would take 0.1 us a sample.
        self._apply = operator.call if library is ANY_CALLABLE else library.call
        self._only_reads = library.only_reads(function)
        self._deferred_end = library.defer_end(function)
        self._crop = library.split_crop(function) if holds_images else None
        self._steps = library.steps_of(function)

    def serves(self, function: Callable[..., Any]) -> bool:
        """Whether this calls ``function``, with the steps that it has now; programs change pipelines."""
        if self._function is not function:
            return False
        return self._steps is None or self._library.steps_of(function) == self._steps

    def explain_decoding(self) -> str:
        """What is decoded of an undecoded image, in one clause."""
        if self._crop is None:
            return "whole images are decoded: the transform is not an albumentations pipeline"
        return str(self._crop.explain())

    def __call__(self, fetch: Callable[[int], Any], index: int, *, allow_deferred: bool = False) -> Any:
        """The function's output for the sample `fetch(index)`; it shares no memory with the cache.

        Args:
            fetch: Returns the sample: read-only arrays, private tensors.
            index: The sample's index.
            allow_deferred: Whether the image can be a `DeferredImage`, which can read the cache's memory.

        Raises:
            Exception: An error of the function, with a note that describes its input.
        """
        sample = fetch(index)
        end = self._deferred_end if allow_deferred else None
        only_reads = self._only_reads if end is None else end.only_reads
        if not only_reads or not self._library.accepts_read_only(sample):
            return self.call(sample, private_copy(sample), index, end)
        return _without_views(self.call(sample, sample, index, end), sample)

    def of_batch(self, fetch: Callable[[int], Any]) -> Callable[[int], Any]:
        """``self(fetch, index, allow_deferred=True)`` as a function of the index, for one batch.

        A transform leaves cold caches behind, so a call in Python costs up to a microsecond: what is the same
        for all samples is decided here, and common samples take a shorter way.
        """
        end = self._deferred_end
        if self._holds_images or not (self._only_reads if end is None else end.only_reads):
            return functools.partial(self, fetch, allow_deferred=True)
        function: Any = self._function if end is None else end
        apply, accepts = self._apply, self._library.accepts_read_only

        def transformed(index: int) -> Any:
            sample = fetch(index)
            if not accepts(sample):
                return self.call(sample, private_copy(sample), index, end)
            try:
                output = apply(function, sample)
            except Exception as error:
                self._explain(error, sample, index)
                raise
            if type(output) is tuple and len(output) == 2 and type(output[1]) is int and owns(output[0]):
                return output
            return _without_views(output, sample)

        return transformed

    def call(self, sample: Any, argument: Any, index: int, end: Any = None) -> Any:
        """The function's output for ``argument``.

        Args:
            sample: The sample, or the same sample without copies, for the note on an error.
            argument: The sample as the function gets it; the function can change it.
            index: The sample's index, for the note.
            end: The function with a deferred end, whose image is a `DeferredImage`; None: it is computed.

        Raises:
            Exception: An error of the function, with a note that describes its input.
        """
        function: Any = self._function if end is None else end
        try:
            if self._holds_images:
                if self._crop is not None and type(argument[0]) is EncodedImage:
                    function = self._crop if end is None else end.through(self._crop)
                    return function(image=argument[0])["image"], *argument[1:]
                argument = decoded(argument)
            torchvision_arrays.reject_arrays(self._function, argument)
            return self._apply(function, argument)
        except Exception as error:
            self._explain(error, sample, index)
            raise

    def _explain(self, error: Exception, sample: Any, index: int) -> None:
        """Note the input on an error of the function."""
        if isinstance(error, ImageReadError):
            return  # of the image, not of the function
        library = self._library
        advice = library.advice(self._function, sample)
        add_note(
            error,
            f"fastload calls the {self._role} with {library.input_name}; sample {index} is "
            f"{structure_of(sample)}{advice and f'; {advice}'}",
        )


def _without_views(output: Any, sample: Any) -> Any:
    try:
        return copy_views(output, sample)
    except OpaqueLeafError:
        return copy.deepcopy(output)


def check_callable(role: str, function: Any) -> None:
    """Check that a `transform` or `pre_transform` can be called.

    Raises:
        TypeError: It is not callable, or is a class of transforms instead of an instance.
    """
    check_is_no_class(role, function)
    if not callable(function):
        raise TypeError(
            f"{role}={function!r:.80} is of type {type(function).__name__}, which is not callable: pass an "
            "albumentations pipeline, a function that takes a sample, or None"
        )
