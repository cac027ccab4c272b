"""Defers `Normalize` and `ToTensorV2` at the end of an albumentations pipeline until collation.

With the copy into the batch, they take two thirds of the time of a cropped 224 x 224 image: a table lookup
for each channel, a merge, and a copy that transposes. A `DeferredImage` looks up in one step. Rules:

1. albumentations draws everything as before, from its own generators and in its own order: the pipeline runs
   whole, and only the image's own part of its last transforms does nothing.
2. The table is what albumentations' Normalize makes of each level, so the result has the same bits.
3. Only classes of the one release of albumentations that the tests compare are deferred; anything but an RGB
   uint8 image is computed at once.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fastload.augmentation.albumentations import pipelines
from fastload.nested.deferred import DeferredImage

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from fastload.augmentation.albumentations.crop import CropInDecoder

_CHANNELS = 3
# Smaller images are collated by one call for the whole batch.
_MIN_PIXEL_BYTES = 32 * 1024


class DeferredEnd:
    """A pipeline that returns its image as a `DeferredImage`.

    Args:
        pipeline: A Compose.
        num_deferred: How many transforms at its end are deferred.

    Attributes:
        pipeline: As given; `targets` asks it what moves.
        only_reads: Whether no transform that runs writes to read-only arrays (see `pipelines`).
    """

    def __init__(self, pipeline: Any, num_deferred: int) -> None:
        self.pipeline = pipeline
        self._num_deferred = num_deferred
        self._deferred = pipeline.transforms[-num_deferred:]
        self._is_tensor = type(self._deferred[-1]).__name__ == "ToTensorV2"
        self._tables: npt.NDArray[np.float32] | None = None
        if type(self._deferred[0]).__name__ == "Normalize":
            levels = np.arange(256, dtype=np.uint8)[:, None, None]
            table = self._deferred[0].apply(np.repeat(levels, _CHANNELS, axis=2))
            self._tables = np.ascontiguousarray(table[:, 0].T)
        running = pipelines.shallow_copy(pipeline)
        running.transforms = pipeline.transforms[:-num_deferred]
        self.only_reads = pipelines.only_reads(running)

    @property
    def available_keys(self) -> Any:
        """The targets of the pipeline."""
        return self.pipeline.available_keys

    def __call__(self, **data: Any) -> dict[str, Any]:
        """The pipeline's output for these targets."""
        return self._run(_call, **data)

    def through(self, crop: CropInDecoder) -> Callable[..., dict[str, Any]]:
        """As this object, but with the pipeline's crop in the decoder."""
        run: Any = functools.partial(self._run, crop.run)
        run.pipeline = self.pipeline
        return cast("Callable[..., dict[str, Any]]", run)

    def _run(self, run: Callable[..., dict[str, Any]], /, **data: Any) -> dict[str, Any]:
        pipeline = pipelines.shallow_copy(self.pipeline)
        reached: list[Any] = []  # stays empty if the pipeline is not applied
        idle = [pipelines.with_image_part(step, functools.partial(_pass, reached)) for step in self._deferred]
        pipeline.transforms = [*pipeline.transforms[: -self._num_deferred], *idle]
        output = run(pipeline, **data)
        if reached:
            output["image"] = self._defer(output["image"])
        return output

    def _defer(self, pixels: npt.NDArray[Any]) -> Any:
        is_rgb = pixels.dtype == np.uint8 and pixels.ndim == _CHANNELS and pixels.shape[2] == _CHANNELS
        if not is_rgb or pixels.nbytes < _MIN_PIXEL_BYTES:
            return self._computed(pixels)
        return DeferredImage(pixels, self._tables, self._computed, is_tensor=self._is_tensor)

    def _computed(self, pixels: npt.NDArray[Any]) -> Any:
        # ToTensorV2 alone returns a view, of memory that an earlier transform can write again.
        is_copied = self._tables is None and isinstance(pixels, np.ndarray)
        image: Any = pixels.copy() if is_copied else pixels
        for transform in self._deferred:
            image = transform.apply(image)
        return image


def find_deferred_end(pipeline: Any) -> DeferredEnd | None:
    """The pipeline with a deferred end; None if its end cannot be deferred."""
    albumentations = sys.modules.get("albumentations")
    if (
        albumentations is None
        or not pipelines.is_tested_release()
        or type(pipeline) is not albumentations.Compose
    ):
        return None
    names = [_name_of(transform) for transform in pipeline.transforms[-2:]]
    if names[-1:] == ["ToTensorV2"] != names[:-1]:  # the second one raises, and says so best itself
        return DeferredEnd(pipeline, 2 if names[0] == "Normalize" else 1)
    return DeferredEnd(pipeline, 1) if names[-1:] == ["Normalize"] else None


def _call(pipeline: Any, /, **data: Any) -> dict[str, Any]:
    return dict(pipeline(**data))


def _name_of(transform: Any) -> str:
    """The name of a transform that can be deferred; empty for others."""
    name = type(transform).__name__
    if not pipelines.is_of_albumentations(transform) or transform.p < 1 or pipelines.is_replayed(transform):
        return ""
    if name == "Normalize":
        return name if transform.normalization == "standard" else ""
    return name if name == "ToTensorV2" else ""


def _pass(reached: list[Any], image: Any, **_: Any) -> Any:
    reached.append(True)
    return image
