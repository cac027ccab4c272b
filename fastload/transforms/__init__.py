"""Transforms of whole batches of images, in workers and on the device.

Pass them to a `fastload.DataLoader` as `batch_transform=` or `device_transform=`, or call them on a batch.
Read in this order: `image_transform` (which part of a batch are the images), `crop_and_flip` with `boxes`,
`resample` and `triton_crop`, `normalize`, `compose`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastload.transforms.crop_and_flip import RandomCrop as RandomCrop
    from fastload.transforms.crop_and_flip import RandomHorizontalFlip as RandomHorizontalFlip
    from fastload.transforms.crop_and_flip import RandomResizedCrop as RandomResizedCrop
    from fastload.transforms.normalize import Normalize as Normalize
else:
    from fastload.system.lazy_exports import public_names as _public_names

    __getattr__, __dir__, __all__ = _public_names(
        "fastload.transforms",
        {
            "crop_and_flip": ("RandomCrop", "RandomHorizontalFlip", "RandomResizedCrop"),
            "normalize": ("Normalize",),
        },
    )
