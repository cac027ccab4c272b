"""The albumentations pipelines of a dataset that is read in the user's own process, with `rng="worker"`.

torch seeds nothing in the consumer's process, because its generators are the user's. Pipelines have
generators of their own, which no seed of the user's reaches. So each batch borrows the pipelines and has them
draw from streams that follow from the loader's base seed: those that worker 0 would have.
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
    """Within the block the pipelines draw from the streams, which run on from block to block.

    Args:
        streams: As `pipeline_streams` gives them.
    """

    def __init__(self, streams: list[PipelineStream]) -> None:
        self._streams = streams
        transforms = [transform for stream in streams for transform in stream.transforms]
        self._find = functools.partial(loans.places, transforms, ("random_generator", "py_random"))
        self._open: list[loans.Loan] = []

    def __enter__(self) -> None:
        self._open.append(loans.Loan(self._find, self._take))

    def __exit__(self, *exc_info: object) -> None:
        self._open.pop().end()

    def _take(self) -> None:
        for stream in self._streams:
            stream.take_over()


def local_pipelines(dataset: Any, base_seed: int) -> contextlib.AbstractContextManager[None]:
    """The block within which the dataset is read.

    It does nothing if the dataset holds no pipeline, or where pipelines have a stream already: in a worker,
    and in a dataset that is itself being read for a loader.

    Args:
        dataset: Searched once.
        base_seed: What the loader drew when the iterator was made.
    """
    if "albumentations" not in sys.modules:  # then there is no pipeline to search for
        return contextlib.nullcontext()
    if get_worker_info() is not None or loans.is_within_loan():
        return contextlib.nullcontext()
    streams = pipeline_streams(dataset, base_seed)
    return LocalPipelines(streams) if streams else contextlib.nullcontext()
