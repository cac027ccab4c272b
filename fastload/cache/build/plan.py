"""Plans a cache, and compares finished caches with datasets.

Everything that determines the bytes of a cache is in its plan, except the samples.
"""

from __future__ import annotations

import os
import time
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image  # the submodule, so encoding workers, which are forked from here, inherit it

from fastload.cache.build.writer import lmdb_package
from fastload.cache.fingerprint import KEY_PART
from fastload.cache.lmdb.description import Plan, why_different
from fastload.cache.records import encode, outline
from fastload.errors import CacheMismatchError, UnsupportedSampleError
from fastload.system.humanize import fastload_command
from fastload.system.logs import say_once
from fastload.system.notes import add_note

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastload.cache.fingerprint import Fingerprint
    from fastload.cache.lmdb.lmdb_cache import LMDBCache


def make_plan(
    dataset: Any,
    probed: Mapping[int, Any],
    fingerprint: Fingerprint | None,
) -> Plan:
    """A plan of a new build.

    Args:
        dataset: The samples to store.
        probed: Samples that were read, by index; without sample 0 if it cannot be read.
        fingerprint: Of the samples.
    """
    lmdb = lmdb_package()
    num_samples = len(dataset)
    spec, crc32 = _identity(probed[0]) if 0 in probed else (None, None)
    classes = getattr(dataset, "classes", None)
    is_listed = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    return Plan(
        build_id=os.urandom(8).hex(),
        num_samples=num_samples,
        spec=spec,
        crc32=crc32,
        parts=None if fingerprint is None else fingerprint.parts_in_file,
        classes=classes if is_listed else None,
        libraries={"lmdb": lmdb.__version__, "numpy": np.__version__, "pillow": PIL.__version__},
        created_s=time.time(),
    )


def _identity(sample: Any) -> tuple[str, int]:
    """Structure and checksum of sample 0."""
    try:
        record = encode(sample)
    except UnsupportedSampleError as error:
        add_note(error, "in sample 0 of the dataset")
        raise
    return outline(record).spec.text.decode("ascii"), zlib.crc32(record)


# --- comparison ------------------------------------------------------------------------------------------


def check_source(
    cache: LMDBCache,
    num_samples: int,
    probed: Mapping[int, Any],
    *,
    fingerprint: Fingerprint | None = None,
) -> None:
    """Check that a cache was made from these samples.

    Args:
        cache: The finished cache; its `reason` becomes that it matches.
        num_samples: Of the dataset.
        probed: Samples that were read, by index; sample 0 is compared, if it is needed and could be read.
        fingerprint: Of the dataset.

    Raises:
        CacheMismatchError: It was not; the error says what differs, and which of the two to change.
    """
    parts = None if fingerprint is None else fingerprint.parts_in_file
    wanted = replace(cache.description, num_samples=num_samples, parts=parts)
    existing = cache.description.parts
    if existing is None:
        parts = None
    key = parts.get(KEY_PART) if parts and existing and KEY_PART in existing else None
    if (parts is None or key is not None) and 0 in cache and 0 in probed:
        spec, crc32 = _identity(probed[0])
        wanted = replace(wanted, spec=spec, crc32=crc32)
    why = why_different(cache.description, wanted)
    if why is not None:
        raise CacheMismatchError(
            f"{cache.path} was made from other samples, or from an earlier state of them: {why} (here: the "
            "dataset, there: the cache). If the cache is right, change the dataset, or train without it from "
            f"CachedDataset.from_cache({cache.path!r}). If the dataset is right, remove it with "
            f"{fastload_command('cache', 'rm', cache.path)}, build it again with --force on the command "
            "line, or use a different path"
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
