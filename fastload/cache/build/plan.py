"""Plans a cache, and compares finished caches with a dataset.

Everything that decides on the bytes of a cache is in its plan, except the samples. A process that continues
another one's build follows its plan, after it was compared with the plan that this process would make.
"""

from __future__ import annotations

import os
import shlex
import time
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image  # the submodule, so that encoding workers, which are forked from here, inherit it

from fastload.batch.failures import check_error_budget
from fastload.cache.build.differences import source_differences
from fastload.cache.codecs import LOSSY, SOURCE, check_codec
from fastload.cache.encoded import encoded_source, holds_images
from fastload.cache.fingerprint import fingerprint_of
from fastload.cache.lmdb.description import Plan
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.random_check import read_unnoticed
from fastload.cache.record import encode, outline
from fastload.cache.sources import decoded_source
from fastload.errors import CacheCorruptError, CacheMismatchError, UnsupportedSampleError, add_note
from fastload.images.encoded import EncodedImage
from fastload.nested import tree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastload.cache.fingerprint import Fingerprint

_WHAT_TO_DO = "Delete it to build it again, or give another path"
_QUALITY = 95  # of jpeg and webp, by default


def check_arguments(
    codec: str | None, quality: int | None, shards: int | None, on_error: str, error_budget: int | float
) -> int:
    """Check arguments of a build; returns the quality to build with.

    Raises:
        ValueError: An argument is invalid; see `build_lmdb`.
    """
    built_quality = _QUALITY if quality is None else quality
    check_codec("raw" if codec is None else codec, built_quality)
    if shards is not None and (isinstance(shards, bool) or not isinstance(shards, int) or shards < 1):
        raise ValueError(f"shards should be an int from 1, but got {shards!r}")
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error should be "raise" or "skip", but got {on_error!r}')
    check_error_budget(error_budget)
    return built_quality


def source_of_build(dataset: Any, codec: str | None) -> tuple[Any, Fingerprint | None]:
    """A user's dataset as a build of this codec reads it, and its fingerprint."""
    return dataset if codec == SOURCE else decoded_source(dataset), fingerprint_of(dataset)


def as_stored(
    dataset: Any, fingerprint: Fingerprint | None, codec: str | None
) -> tuple[Any, Fingerprint | None]:
    """The dataset whose samples a cache of this codec stores, and their fingerprint."""
    if codec != SOURCE:
        return dataset, fingerprint
    return encoded_source(dataset), None if fingerprint is None else fingerprint.of_encoded()


def make_plan(
    dataset: Any,
    probed: dict[int, Any],
    *,
    codec: str,
    quality: int,
    shards: int,
    skips: bool,
    fingerprint: Fingerprint | None,
) -> Plan:
    """A plan of a new build; reads sample 0 into ``probed``, unless it is there.

    Raises:
        ValueError: The codec is "source", and sample 0 has no undecoded image.
    """
    import lmdb

    num_samples = len(dataset)
    spec, crc32 = _read_first(dataset, probed, skips=skips)
    first = probed.get(0)
    if codec == SOURCE and first is not None and not holds_images(first):
        raise ValueError(
            f'codec "source" stores the files of images, but sample 0 is {tree.outline(first)}: return '
            "fastload.EncodedImage(path) in place of the decoded array, use fastload.ImageFolder without "
            "size=, or choose another codec"
        )
    classes = getattr(dataset, "classes", None)
    is_listed = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    return Plan(
        build_id=os.urandom(8).hex(),
        num_samples=num_samples,
        num_shards=min(shards, max(1, num_samples)),
        spec=spec,
        crc32=crc32,
        codec=codec,
        quality=quality if codec in LOSSY else None,
        parts=None if fingerprint is None else dict(fingerprint.parts),
        classes=classes if is_listed else None,
        libraries={"lmdb": lmdb.__version__, "numpy": np.__version__, "pillow": PIL.__version__},
        created_s=time.time(),
    )


def _read_first(dataset: Any, probed: dict[int, Any], *, skips: bool) -> tuple[str | None, int | None]:
    if not len(dataset):
        return None, None
    if 0 not in probed:
        try:
            probed[0] = dataset[0]
        except Exception as error:
            if skips:
                return None, None
            add_note(error, "in sample 0 of the dataset")
            add_note(error, 'Nothing was built yet: on_error="skip" leaves out samples that cannot be read')
            raise
    return _identity(_first_record(probed[0]))


def _first_record(sample: Any) -> bytes:
    """The record of sample 0 before a codec changes it; without the paths of files, which may move."""
    try:
        return encode(tree.map_leaves(sample, _without_path))
    except UnsupportedSampleError as error:
        add_note(error, "in sample 0 of the dataset")
        raise


def _without_path(leaf: Any) -> Any:
    return EncodedImage.of(leaf.content(), None) if type(leaf) is EncodedImage else leaf


def _identity(record: bytes) -> tuple[str, int]:
    """Structure and checksum of a sample."""
    return outline(record).spec.text.decode("ascii"), zlib.crc32(record)


# --- comparison ------------------------------------------------------------------------------------------


def open_finished(
    path: str,
    dataset: Any,
    probed: Mapping[int, Any],
    codec: str | None,
    quality: int | None,
    shards: int | None,
    fingerprint: Fingerprint | None,
) -> LMDBCache:
    """The finished cache at `path`, after it was compared with the dataset and the arguments of a build.

    Raises:
        CacheMismatchError: It was made from other samples, or in another form.
    """
    try:
        cache = LMDBCache(path)
    except (CacheCorruptError, CacheMismatchError) as error:
        add_note(error, "To build a cache, give a path that does not exist yet")
        raise
    _check_form(cache, codec, quality, shards)
    num_samples = len(dataset)
    first = None
    if 0 in cache and num_samples and (fingerprint is None or cache.parts is None):
        first = probed[0] if 0 in probed else read_unnoticed(dataset, 0)
    check_source(cache, num_samples, first, fingerprint=fingerprint)
    return cache


def _check_form(cache: LMDBCache, codec: str | None, quality: int | None, shards: int | None) -> None:
    """Check that a finished cache has the codec, quality and number of files that were requested, if any."""
    path = cache.path
    if codec is not None and codec != cache.codec:
        raise CacheMismatchError(
            f"{path} is a {cache.codec} cache, but codec {codec} was requested. {_WHAT_TO_DO}"
        )
    if quality is not None and cache.quality is not None and quality != cache.quality:
        raise CacheMismatchError(
            f"{path} has quality {cache.quality}, but quality {quality} was requested. {_WHAT_TO_DO}"
        )
    if shards is not None and cache.num_shards != min(shards, max(1, cache.num_samples)):
        raise CacheMismatchError(
            f"{path} has {cache.num_shards} shards, but {shards} were requested. {_WHAT_TO_DO}"
        )


def check_source(
    cache: LMDBCache,
    num_samples: int,
    first: Any,
    *,
    fingerprint: Fingerprint | None = None,
    url: str | None = None,
) -> None:
    """Check that a cache was made from these samples: by both fingerprints, or else by sample 0.

    Args:
        cache: The cache.
        num_samples: Of the dataset.
        first: Sample 0 of the dataset, if it is needed.
        fingerprint: Of the dataset.
        url: Where the cache is, if this is the local copy of one in an object store.

    Raises:
        CacheMismatchError: It was not; the error says what differs, and which of the two to change.
    """
    differences = source_differences(cache.plan, fingerprint)
    if differences:
        raise CacheMismatchError(
            f"{cache.path} was made from other samples: {'; '.join(differences)} "
            f"(here: the dataset, there: the cache). {_which_to_change(cache, url)}"
        )
    expected: dict[str, tuple[Any, Any]] = {"number of samples": (cache.num_samples, num_samples)}
    if differences is None and 0 in cache and num_samples:
        spec, crc32 = _identity(_first_record(first))
        expected["structure of sample 0"] = cache.plan.spec, spec
        expected["content of sample 0"] = cache.plan.crc32, crc32
    for name, (stored, wanted) in expected.items():
        if stored != wanted:
            raise CacheMismatchError(
                f"{cache.path} was made from another dataset, or from an earlier state of this one: "
                f"the {name} is {stored} in the cache and {wanted} in the dataset. "
                f"{_which_to_change(cache, url)}"
            )
    cache.reason = "opened, as its number of samples and its sample 0 match the dataset"
    if differences is not None:
        cache.reason = "opened, as its fingerprint matches the dataset"


def _which_to_change(cache: LMDBCache, url: str | None) -> str:
    if url is not None:
        anew = "build its cache at another URL"
    else:
        anew = f"remove this cache with 'fastload cache rm {shlex.quote(cache.path)}', or give another path"
    return (
        "If the cache is right, change the dataset, or train without it from "
        f"CachedDataset.from_cache({url or cache.path!r}). If the dataset is right, {anew}"
    )
