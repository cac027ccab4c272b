"""Seed albumentations pipelines that run in the consumer's process, without workers (`rng="worker"`).

torch seeds nothing in the consumer's process, because the generators there belong to the user. Pipelines have
their own generators, which the user's seeds do not reach. So each batch borrows the pipelines and lets them
draw from random streams that follow from the loader's base seed: those of worker 0.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

from fastload.rng import loans
from fastload.rng.seeding import pipeline_streams
from fastload.rng.worker_info import get_worker_info

if TYPE_CHECKING:
    from fastload.rng.seeding import PipelineStream


class LocalPipelines(contextlib.AbstractContextManager[None]):
    """A block in which pipelines draw from random streams, which continue from block to block.

    Args:
        streams: The result of `pipeline_streams`.
    """

    def __init__(self, streams: list[PipelineStream]) -> None:
        self._streams = streams
        transforms = [transform for stream in streams for transform in stream.transforms]
        self._find = functools.partial(loans.pipeline_generators, transforms)
        self._open: list[loans.Loan] = []

    def __enter__(self) -> None:
        self._open.append(loans.Loan(self._find, self._take))

    def __exit__(self, *exc_info: object) -> None:
        self._open.pop().end()

    def _take(self) -> None:
        for stream in self._streams:
            stream.take_over()


def local_pipelines(dataset: Any, base_seed: int, collate_fn: Any) -> contextlib.AbstractContextManager[None]:
    """The block in which to read and collate a batch.

    It does nothing if there is no pipeline, or if pipelines have a random stream already: in a worker, and in
    a dataset that is itself being read for a loader.

    Args:
        dataset: The dataset; searched once for pipelines.
        base_seed: The seed that the loader drew when the iterator was made.
        collate_fn: The function that collates; searched for further pipelines.
    """
    if "albumentations" not in sys.modules:  # then no pipeline can exist
        return contextlib.nullcontext()
    if get_worker_info() is not None or loans.is_within_loan():
        return contextlib.nullcontext()
    streams = pipeline_streams(dataset, base_seed, collate_fn)
    return LocalPipelines(streams) if streams else contextlib.nullcontext()
