"""pydicom: compressed pixels (`ds.pixel_array`), by the content of the dataset's pixel data.

A dataset can be changed after it was read, so its file does not identify it. All elements that decide its
pixels are in the key; decoding JPEG 2000, JPEG-LS or RLE takes many times longer than the hash.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pydicom
from pydicom import config
from pydicom.dataset import Dataset
from pydicom.pixels.decoders.base import Decoder
from pydicom.pixels.utils import as_pixel_options

from fastload.readers import nest
from fastload.readers.code_digest import environment
from fastload.readers.decode_cache import current
from fastload.readers.identity import Identity, Unknown, identify_content
from fastload.readers.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Callable


def patches() -> list[Patch]:
    """What is replaced in pydicom."""
    return [Patch(Decoder, "as_array", _as_array)]


def _as_array(original: Callable[..., Any]) -> Callable[..., Any]:
    kind = f"pydicom {pydicom.__version__} {environment()!r}"

    def as_array(self: Any, src: Any, **options: Any) -> Any:
        cache = current()
        if cache is None or self.is_native or not isinstance(src, Dataset):
            return original(self, src, **options)
        try:
            elements = as_pixel_options(src)
            plugins = sorted(self.available_plugins)
        except Exception:  # noqa: BLE001  # the original says what is wrong with it
            return original(self, src, **options)
        settings = config.APPLY_J2K_CORRECTIONS, config.pixel_data_handlers is None
        return cache.array(
            kind,
            partial(_identify, src),
            (str(self.UID), _plain(elements), _plain(options), plugins, settings),
            partial(original, self, src, **options),
            where=getattr(src, "filename", "a dataset"),
            source=None,
            pack=nest.pack,
            unpack=nest.unpack,
        )

    return as_array


def _identify(dataset: Any) -> Identity | Unknown:
    if "FloatPixelData" in dataset or "DoubleFloatPixelData" in dataset:
        return Unknown.NOT_A_FILE
    return identify_content(dataset.get("PixelData"))


def _plain(options: dict[str, Any]) -> list[Any]:
    """Options by name; texts and numbers of pydicom's own types as plain ones."""
    return [
        (name, str(value) if isinstance(value, str) else value) for name, value in sorted(options.items())
    ]
