"""Albumentations, and its successor AlbumentationsX: the answers to all questions of the interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.augmentation.albumentations.deferred_end import DeferredEnd, find_deferred_end
from fastload.augmentation.albumentations.pipelines import is_of_albumentations, only_reads
from fastload.augmentation.albumentations.targets import check_moved
from fastload.augmentation.library import AugmentationLibrary, GeneratorKind, RandomClass, with_first
from fastload.nested.tree import structure_of

if TYPE_CHECKING:
    from fastload.augmentation.albumentations.crop import CropInDecoder

_UINT8 = np.dtype(np.uint8)


def _with_generators(streams: Any, generator: np.random.Generator, py_random: Any) -> Any:
    """What AlbumentationsX reserves for a call, with other generators."""
    return type(streams)(random_generator=generator, py_random=py_random, epoch=streams.epoch)


def _has_only_own_code(step: Any) -> bool:
    is_own = is_of_albumentations(step) and type(step).__name__ != "Lambda"
    return is_own and all(map(_has_only_own_code, getattr(step, "transforms", ())))


_PAIR: dict[str, GeneratorKind] = {"random_generator": "numpy", "py_random": "python"}
# Of AlbumentationsX alone.
_RESERVE = "_reserve_invocation_streams", _with_generators
_PRIVATE = frozenset(
    f"_{state}_{name}" for state in ("configured", "concurrent") for name in ("random_generator", "py_random")
)


class Albumentations(AugmentationLibrary):
    """albumentations 2; crops, ends and read-only memory are those of release 2.0.8 alone."""

    package = "albumentations"
    random_classes = (
        RandomClass("albumentations.core.invocation", "InvocationRngOwner", {}, _RESERVE),
        RandomClass("albumentations.core.composition", "BaseCompose", _PAIR),
        RandomClass("albumentations.core.transforms_interface", "BasicTransform", _PAIR),
    )
    private_generators = _PRIVATE
    input_name = "the image or the named targets of a sample"

    def seeds_itself(self, pipeline: Any) -> bool:
        """Whether it is a pipeline of AlbumentationsX."""
        return hasattr(pipeline, "_get_effective_seed")

    def description(self, transform: Any) -> Any | None:
        """The transform as albumentations serializes it; None if it holds code of the user's.

        The attributes of a subclass can be missing there.
        """
        import albumentations

        if not _has_only_own_code(transform):
            return None
        try:
            return albumentations.to_dict(transform)
        except (NotImplementedError, TypeError, ValueError):
            return None

    def call(self, transform: Any, sample: Any) -> Any:
        """Call with named targets: a dict holds them, an array is the image, a tuple starts with the image.

        Raises:
            TypeError: The sample is none of these, its image is a tensor, it has a mask, boxes or keypoints
                that the transform would leave where they are, or it is a dict without a target.
        """
        if (
            type(sample) is tuple
            and len(sample) == 2
            and type(sample[1]) is int
            and isinstance(sample[0], np.ndarray)
        ):
            return transform(image=sample[0])["image"], sample[1]  # most samples: a shortcut
        if type(self.image_of(sample)).__module__.startswith("PIL."):
            raise TypeError(
                "an albumentations transform takes the image as a NumPy array; the dataset returned "
                f"{structure_of(sample)}: convert it once, in a function that you pass as pre_transform=, "
                'with numpy.asarray(image.convert("RGB")), or numpy.asarray(image) for a mask'
            )
        if isinstance(self.image_of(sample), torch.Tensor):
            raise TypeError(
                "an albumentations transform takes the image as a NumPy array, (H, W, C) uint8 or float32; "
                f"the dataset returned {structure_of(sample)}: return the array before it is converted to a "
                "tensor, and put ToTensorV2() last in the transform"
            )
        if isinstance(sample, dict):
            targets = getattr(transform, "available_keys", None)
            if targets and sample.keys().isdisjoint(targets):
                raise TypeError(
                    f"the albumentations transform takes the keys {sorted(targets)}; the dataset returned a "
                    f"dict with {list(sample)!r:.200}: use those keys for the arrays to be transformed"
                )
            check_moved(transform, sample)
            return transform(**sample)
        if isinstance(sample, np.ndarray):
            return transform(image=sample)["image"]
        if not isinstance(sample, (tuple, list)) or not sample or not isinstance(sample[0], np.ndarray):
            raise TypeError(
                "an albumentations transform takes an image array, a tuple that starts with one, or a dict "
                f'with "image"; the dataset returned {structure_of(sample)}'
            )
        check_moved(transform, sample)
        return with_first(sample, transform(image=sample[0])["image"])

    def image_of(self, sample: Any) -> Any:
        """The target `image` of a dict, the first value of a tuple or list, or the sample itself."""
        return sample.get("image") if isinstance(sample, dict) else super().image_of(sample)

    def advice(self, transform: Any, sample: Any) -> str:
        """What to do about an array that has the layout of torch's images."""
        image, channels = self.image_of(sample), (1, 3, 4)
        is_array = isinstance(image, np.ndarray) and image.ndim == 3
        if not is_array or image.shape[0] not in channels or image.shape[2] in channels:
            return ""
        return "images should be (H, W, C): transpose them in the dataset"

    def steps_of(self, pipeline: Any) -> list[Any]:
        """The steps of a pipeline, and their probabilities; empty for a single transform."""
        steps = getattr(pipeline, "transforms", ())
        return [*steps, *[step.p for step in steps]]

    def only_reads(self, pipeline: Any) -> bool:
        """Whether all code of the pipeline is known to respect the read-only mark (see `pipelines`)."""
        return only_reads(pipeline)

    def accepts_read_only(self, sample: Any) -> bool:
        """Whether all images and masks are uint8 arrays, or undecoded: Normalize divides float32 in place."""
        if not isinstance(sample, dict):
            image = sample[0] if isinstance(sample, (tuple, list)) and sample else sample
            return getattr(image, "dtype", _UINT8) == _UINT8
        return all(
            not isinstance(value, np.ndarray) or value.dtype == _UINT8 or name in ("bboxes", "keypoints")
            for name, value in sample.items()
        )

    def defer_end(self, pipeline: Any) -> DeferredEnd | None:
        """See `deferred_end`."""
        return find_deferred_end(pipeline)

    def split_crop(self, pipeline: Any) -> CropInDecoder | None:
        """See `crop`."""
        from fastload.augmentation.albumentations.crop import CropInDecoder  # here: it imports Pillow

        return CropInDecoder(pipeline)
