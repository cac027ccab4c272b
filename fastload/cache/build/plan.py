"""Plans a cache, and compares finished caches with datasets.

Everything that determines the bytes of a cache is in its plan, except the samples. A process that continues a
build follows its plan, after comparing it with the plan that this process would make.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image  # the submodule, so encoding workers, which are forked from here, inherit it

from fastload.cache.build.sources import decoded_source, encoded_source
from fastload.cache.build.writer import lmdb_package
from fastload.cache.format.codecs import BEST_QUALITY, LOSSY, SOURCE, codec_of_leaf, is_lossy
from fastload.cache.format.fingerprint import KEY_PART, fingerprint_of
from fastload.cache.format.record import encode, outline, record_parts
from fastload.cache.format.undecoded import holds_images
from fastload.cache.lmdb.description import Plan, why_different
from fastload.errors import BuildRefusedError, CacheMismatchError, UnsupportedSampleError
from fastload.images.encoded import EncodedImage
from fastload.images.geometry import MIN_SIDE
from fastload.nested import tree
from fastload.nested.spec import flatten
from fastload.system.humanize import fastload_command
from fastload.system.logs import say_once
from fastload.system.notes import add_note

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from fastload.cache.format.fingerprint import Fingerprint
    from fastload.cache.lmdb.lmdb_cache import LMDBCache
    from fastload.nested.leaf import Leaf

SHARD_BYTES = 1 << 30  # of a shard, roughly, unless the user sets the number of shards
# An open shard takes two descriptors, one of them for its mapping. Many systems allow a process 1024.
MAX_SHARDS = 128
DEFAULT_QUALITY = 95  # of jpeg and webp, by default


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
    probed: Mapping[int, Any],
    fingerprint: Fingerprint | None,
    codec: str,
    quality: int | None,
    lossy_leaf: str | None,
    num_shards: int | None,
) -> Plan:
    """A plan of a new build.

    Args:
        dataset: The samples to store.
        probed: Samples that were read, by index; without sample 0 if it cannot be read.
        fingerprint: Of the samples.
        codec: As of a build.
        quality: As of a build; None if the codec has none.
        lossy_leaf: See `find_lossy_leaf`.
        num_shards: None for files of about 1 GiB.

    Raises:
        BuildRefusedError: The codec is "source", and a sample has no undecoded image.
    """
    lmdb = lmdb_package()
    num_samples = len(dataset)
    index = min(probed, default=0)
    example = probed.get(index)
    if codec == SOURCE and probed and not holds_images(example):
        raise BuildRefusedError(
            f'codec "{SOURCE}" stores the files of images, but sample {index} is '
            f"{tree.structure_of(example)}: return fastload.EncodedImage(path) instead of the decoded array, "
            "use fastload.ImageFolder without size=, or choose a different codec"
        )
    spec, crc32 = _identity(probed[0]) if 0 in probed else (None, None)
    if num_shards is None and probed:
        image_codec = "raw" if codec == SOURCE else codec
        parts, _ = record_parts(*flatten(example), image_codec, quality or BEST_QUALITY, lossy_leaf)
        num_shards = min(MAX_SHARDS, math.ceil(sum(map(len, parts)) * num_samples / SHARD_BYTES))
    classes = getattr(dataset, "classes", None)
    is_listed = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    return Plan(
        build_id=os.urandom(8).hex(),
        num_samples=num_samples,
        num_shards=max(1, min(num_shards or 1, num_samples)),
        spec=spec,
        crc32=crc32,
        codec=codec,
        quality=quality,
        lossy_leaf=lossy_leaf,
        parts=None if fingerprint is None else fingerprint.parts_in_file,
        classes=classes if is_listed else None,
        libraries={"lmdb": lmdb.__version__, "numpy": np.__version__, "pillow": PIL.__version__},
        created_s=time.time(),
    )


def _identity(sample: Any) -> tuple[str, int]:
    """Structure and checksum of sample 0 before a codec changes it, without file paths."""
    try:
        record = encode(tree.map_leaves(sample, _without_path))
    except UnsupportedSampleError as error:
        add_note(error, "in sample 0 of the dataset")
        raise
    return outline(record).spec.text.decode("ascii"), zlib.crc32(record)


def _without_path(leaf: Any) -> Any:
    return EncodedImage.of(leaf.content(), None) if type(leaf) is EncodedImage else leaf


# --- the leaf of a lossy codec ----------------------------------------------------------------------------


def find_lossy_leaf(
    samples: Collection[Any], codec: str, quality: int | None, name: str | None
) -> str | None:
    """The path of the image that a lossy codec changes; None if the codec is lossless, or there is no image.

    Args:
        samples: One sample or more; none if none can be read.
        codec: As of a build.
        quality: Of the codec.
        name: The user's name or path of the leaf; None for the only image of a sample.

    Raises:
        BuildRefusedError: No leaf or several leaves fit; the error lists the leaves.
    """
    if not is_lossy(codec, quality):
        if name is None:
            return None
        exact = codec if quality is None else f"{codec} of quality {quality}"
        raise BuildRefusedError(
            f"lossy_leaf={name!r} is for {' and '.join(LOSSY)}, but {exact} changes no pixels"
        )
    images: dict[str, tuple[int, ...]] = {}  # the shapes of all that can be an image or a mask
    changeable: dict[str, tuple[int, ...]] = {}  # those that the codec would change
    for sample in samples:
        spec, _ = flatten(sample)
        for path, leaf in zip(spec.paths(), spec.leaves, strict=True):
            if _can_be_image(leaf):
                images[path] = leaf.shape
            if codec_of_leaf(codec, leaf) == codec:
                changeable[path] = leaf.shape
    if name is None:
        paths, listed = list(images), images
        problem = "a sample has several images"
    else:
        paths, listed = [path for path in changeable if name in (path, leaf_name(path))], changeable
        problem = f"lossy_leaf={name!r} names no image of three channels"
    if len(paths) == 1:
        return paths[0]
    if not samples or (name is None and not changeable):
        return None
    shapes = ", ".join(f"{leaf_name(path)} of shape {shape}" for path, shape in listed.items())
    named = " or ".join(f"lossy_leaf={leaf_name(path)!r}" for path in changeable or ["NAME"])
    raise BuildRefusedError(
        f'codec "{codec}" changes pixels, so it is for one leaf of a sample, a photograph, and all others, '
        f"such as masks, stay exact: {problem}. The images are: {shapes or 'none'}. Name the photograph with "
        f"{named} (--lossy-leaf on the command line), or choose codec png"
    )


def _can_be_image(leaf: Leaf) -> bool:
    """Whether a leaf can be an image or a mask; boxes, keypoints and labels have at most one long side."""
    return codec_of_leaf("png", leaf) == "png" or sum(side >= MIN_SIDE for side in leaf.shape) > 1


def leaf_name(path: str) -> str:
    """The path of a leaf without brackets: `image` for `$["image"]`, `0.rgb` for `$[0]["rgb"]`."""
    keys = re.findall(r'\[("(?:[^"\\]|\\.)*"|\d+)\]', path)
    return ".".join(str(json.loads(key)) for key in keys) or path


# --- comparison ------------------------------------------------------------------------------------------


def check_source(
    cache: LMDBCache,
    num_samples: int,
    probed: Mapping[int, Any],
    *,
    fingerprint: Fingerprint | None = None,
    url: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Check that a cache was made from these samples, and has these settings.

    Args:
        cache: The finished cache; its `reason` becomes that it matches.
        num_samples: Of the dataset.
        probed: Samples that were read, by index; sample 0 is compared, if it is needed and could be read.
        fingerprint: Of the dataset.
        url: Where the cache is, if this is the local copy of one in an object store.
        settings: Fields of its plan that the user requested.

    Raises:
        CacheMismatchError: It was not; the error says what differs, and which of the two to change.
    """
    parts = None if fingerprint is None else fingerprint.parts_in_file
    wanted = replace(cache.description, num_samples=num_samples, parts=parts, **settings or {})
    existing = cache.description.parts
    if existing is None:
        parts = None
    key = parts.get(KEY_PART) if parts and existing and KEY_PART in existing else None
    if (parts is None or key is not None) and 0 in cache and 0 in probed:
        spec, crc32 = _identity(probed[0])
        wanted = replace(wanted, spec=spec, crc32=crc32)
    why = why_different(cache.description, wanted)
    if why is not None:
        anew = f"remove it with {fastload_command('cache', 'rm', cache.path)}, build it again with --force "
        anew += "on the command line, or use a different path"
        raise CacheMismatchError(
            f"{cache.path} was made from other samples, from an earlier state of them, or with other "
            f"settings: {why} (here: the dataset, there: the cache). If the cache is right, change the "
            f"dataset, or train without it from CachedDataset.from_cache({url or cache.path!r}). If the "
            f"dataset is right, {anew if url is None else 'build its cache at a different URL'}"
        )
    if key is not None and wanted.crc32 != cache.description.crc32 is not None:
        say_once(
            f"cache: sample 0 of the dataset is no longer that in {cache.path}, although both have the key "
            f"{key!r}. The cache is used as it is. If you edited the dataset, change cache_key= "
            "and the path; another release of a library that decodes can change pixels, too"
        )
    if parts is None and num_samples:
        say_once(
            f"cache: only the number of samples and sample 0 of {cache.path} were compared with the dataset. "
            "Other samples, such as edited labels, are as they were when it was built. Build it with "
            "cache_key=, and change the key and the path with the samples"
        )
    matching = "number of samples and its sample 0 match" if parts is None else "fingerprint matches"
    cache.reason = f"opened, because its {matching} the dataset"
