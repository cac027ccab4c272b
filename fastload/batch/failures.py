"""Samples that could not be read: their records, their replacements, and the report of a loader.

Rules of replacement (`on_error` of the loader):

1. Sizes and order of batches do not change: a replacement takes the position of the failed sample.
2. A replacement depends on the `BatchKey` and the position in the batch, so it is the same for any number of
   workers and after a resume.
3. If the sampler is one of torch's whose indices are known, a replacement is one of its samples. Otherwise a
   replacement is a different sample of the same batch.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.errors import TooManyFailuresError
from fastload.rng.keys import BatchKey
from fastload.system.logs import log
from fastload.system.notes import add_note, short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAX_ATTEMPTS = 10  # how many replacements are tried if they cannot be read either
_DEFAULT_MAX_ERRORS = 0.01  # of all functions with this argument
_MAX_LOGGED = 10  # log lines of an epoch; the report has all failed samples


@dataclass(frozen=True)
class FailedSample:
    """A sample that could not be read.

    Attributes:
        index: The index of the sample in the dataset.
        path: The file that the error names in its attribute `path` or `filename`, or else the one file that
            the innermost function of its traceback was given; None if neither is certain.
        type: The class of the error.
        reason: The text of the error.
        worker: The worker that read the sample; None without workers.
        epoch: The epoch in which the sample was read.
        replaced_by: The index of the sample that replaced it; None if a function made the replacement.
    """

    index: Any
    path: str | None
    type: str
    reason: str
    worker: int | None = None
    epoch: int = 0
    replaced_by: Any = None

    def __str__(self) -> str:
        where = "" if self.path is None else f" ({self.path})"
        return f"{self.index!r:.50}{where}: {self.type}: {self.reason:.200}"

    @classmethod
    def of(cls, index: Any, error: BaseException, worker: int | None, **more: Any) -> FailedSample:
        """The record of a sample that could not be read because of ``error``."""
        return cls(index, path_of(error), type(error).__name__, _reason(error), worker, **more)


def path_of(error: BaseException) -> str | None:
    """The file to blame for an error; None if that is not certain.

    This is the attribute `path` or `filename` of the error; else the one existing file that the innermost
    function of its traceback was given, of those that were given any: a path, an open file, or an image.
    """
    for name in ("path", "filename"):
        try:
            named = os.fsdecode(getattr(error, name, None))  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001  # no path, or an attribute of a user's class that raises
            continue
        if named:
            return named
    # Only arguments: another local variable can name a file that was read before, and without an error. The
    # first frame still runs, and before Python 3.13 its `f_locals` would keep the error that it has caught.
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))[1:]):
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        paths = {path for name in names if (path := _file_of(frame.f_locals.get(name)))}
        if paths:
            return paths.pop() if len(paths) == 1 else None
    return None


def _file_of(value: Any) -> str | None:
    """The path of the existing file that a value names or reads, if any."""
    try:
        if (pillow := sys.modules.get("PIL.Image")) is not None and isinstance(value, pillow.Image):
            value = getattr(value, "filename", None) or getattr(value, "fp", None)
        for kind, name in (io.TextIOWrapper, "buffer"), (io.BufferedReader, "raw"), (io.FileIO, "name"):
            if isinstance(value, kind):
                value = getattr(value, name)
        is_path = isinstance(value, os.PathLike) or (isinstance(value, str) and {".", os.sep} & {*value})
        return os.fsdecode(value) if is_path and os.path.isfile(value) else None
    except Exception:  # noqa: BLE001  # a value of a user's class that raises, or a file without a name
        return None


def _reason(error: BaseException) -> str:
    """The text of an error, or the shorter `reason` that some errors have."""
    try:
        return str(getattr(error, "reason", None) or error)
    except Exception:  # noqa: BLE001  # the error's class can be the user's
        return f"str() of this {type(error).__name__} raises an error"


class Replacer:
    """Reads samples, and replaces those that cannot be read.

    Args:
        on_error: `"replace"`, or a function that takes a `FailedSample` and returns the sample to use.
        replacements: Indices of possible replacements; empty: the samples of the same batch.
        worker: The worker that reads; None without workers.

    Attributes:
        failed: The samples of this batch that could not be read.
    """

    def __init__(self, on_error: Any, replacements: Sequence[Any], worker: int | None) -> None:
        self._on_error = on_error
        self._replacements = replacements
        self._worker = worker
        self._key = BatchKey(0, 0)
        self._indices: Sequence[Any] = ()
        self.failed: list[FailedSample] = []

    def begin(self, key: BatchKey, indices: Sequence[Any]) -> None:
        """Start a batch of these indices."""
        self._key = key
        self._indices = indices
        self.failed = []

    def replacing(self, get: Callable[[Any], Any], read: Callable[[Any, int], Any]) -> Callable[[Any], Any]:
        """Wrap ``get`` to replace a sample whose ``get`` raises.

        Call the result once for each index of the batch, in order.

        Args:
            get: Returns the sample of an index.
            read: Returns the sample of a different index, with random streams that depend on a number.
        """
        numbers = itertools.count()

        def get_or_replace(index: Any) -> Any:
            number = next(numbers)
            try:
                return get(index)
            except StopIteration:
                raise  # torch treats it as the end of the epoch
            except Exception as error:  # noqa: BLE001  # any error of the user's dataset
                return self._replace(number, error, read)

        return get_or_replace

    def _replace(self, number: int, error: Exception, read: Callable[[Any, int], Any]) -> Any:
        """The sample that replaces an unreadable one; raises ``error`` if no replacement can be read."""
        failed = self._describe(number, error)
        if self._on_error != "replace":
            try:
                sample = self._on_error(failed)
            except StopIteration as stop:  # the epoch would end here, without a word
                raise RuntimeError("the function on_error raised StopIteration") from stop
            self.failed.append(failed)
            return sample
        for attempt, index in enumerate(self._candidates(number)):
            try:
                # A negative occurrence: the sample draws different numbers than where the sampler chose its
                # index.
                sample = read(index, -1 - number * _MAX_ATTEMPTS - attempt)
            except Exception as other:  # noqa: BLE001  # it cannot be read either
                place = f"sample {short_repr(index)} in its place"
                add_note(error, f"fastload: {place} could not be read: {short_repr(other)}")
                continue
            self.failed.append(self._describe(number, error, index))
            return sample
        add_note(error, 'fastload: on_error="replace" found no readable sample to replace it')
        raise error

    def _describe(self, number: int, error: Exception, replaced_by: Any = None) -> FailedSample:
        return FailedSample.of(
            self._indices[number], error, self._worker, epoch=self._key.epoch, replaced_by=replaced_by
        )

    def _candidates(self, number: int) -> list[Any]:
        # A str as the seed: Random hashes it with SHA-512, with the same result in every process.
        generator = random.Random(",".join(map(str, (*self._key[:3], number))))
        indices = self._replacements  # can be an array or a tensor, if the sampler's indices are one
        if not len(indices):
            indices = [*self._indices[:number], *self._indices[number + 1 :]]
        positions = generator.sample(range(len(indices)), min(len(indices), _MAX_ATTEMPTS))
        return [indices[position] for position in positions]


def check_max_errors(max_errors: Any, on_error: Any, needs: str) -> None:
    """Check the user's `max_errors`.

    Args:
        max_errors: The argument.
        on_error: The argument beside it.
        needs: The values of `on_error` with which `max_errors` has an effect.

    Raises:
        ValueError: It is neither a number of samples nor a share of them, or has no effect.
    """
    is_share = isinstance(max_errors, float) and 0 < max_errors <= 1
    if not is_share and (type(max_errors) is not int or max_errors < 0):
        raise ValueError(
            "max_errors should be an int of at least 0 (a number of samples), or a float above 0 and up to "
            f"1 (a share of the epoch's samples), but got {max_errors!r}"
        )
    if on_error == "raise" and max_errors != _DEFAULT_MAX_ERRORS:
        raise ValueError(
            f"max_errors={max_errors!r} needs on_error={needs}: without it, the first sample that cannot be "
            "read raises its error"
        )


def max_failures(max_errors: int | float, num_samples: int) -> int:
    """How many of ``num_samples`` samples can fail; at least one if `max_errors` is a share."""
    return max(1, int(max_errors * num_samples)) if isinstance(max_errors, float) else max_errors


def check_left_out(
    left_out: Sequence[FailedSample], max_errors: int | float, num_samples: int, what_to_do: str
) -> None:
    """Check that a build leaves out no more samples than `max_errors` allows; the arguments are those below.

    Raises:
        TooManyFailuresError: It leaves out more.
    """
    if len(left_out) > max_failures(max_errors, num_samples):
        raise too_many_failures(len(left_out), max_errors, num_samples, left_out[-1], what_to_do)


def too_many_failures(
    num_failed: int, max_errors: int | float, num_samples: int, last: FailedSample | None, what_to_do: str
) -> TooManyFailuresError:
    """The error of an epoch or a build in which more samples failed than `max_errors` allows.

    Args:
        num_failed: How many samples could not be read.
        max_errors: As the user gave it.
        num_samples: Number of samples of the dataset.
        last: The last sample that could not be read; None if it is not known.
        what_to_do: What was kept, and what to change: sentences without the last full stop.
    """
    limit = f"max_errors={max_errors!r}"
    limit += " (a share; an int is a number)" if isinstance(max_errors, float) else ""
    return TooManyFailuresError(
        f"{num_failed:,} of {num_samples:,} samples could not be read, and {limit} allows "
        f"{max_failures(max_errors, num_samples):,}. "
        f"{'' if last is None else f'The last one is {last}. '}{what_to_do}"
    )


def num_samples_of(loader: Any) -> int:
    """How many samples an epoch of a loader reads, for `max_errors`; 0 if no sample can fail.

    Of a custom batch sampler, these are the dataset's: torch's loader has made the sampler beside it.
    """
    if loader.on_error != "raise":
        for counted in (loader.sampler, loader.dataset):
            with contextlib.suppress(Exception):  # a user's sampler can raise anything in len()
                return len(counted)
    return 0


class FailureCount:
    """The failed samples of one epoch.

    Args:
        loader: The loader that reads the samples.
        report: Where failed samples are added, in the order in which the caller receives the batches.
    """

    def __init__(self, loader: Any, report: list[FailedSample]) -> None:
        self._report = report
        self._num_samples = num_samples_of(loader)
        self._max_errors = loader.max_errors
        self._maximum = max_failures(loader.max_errors, self._num_samples)
        self._count = 0

    def note(self, failed: Sequence[FailedSample]) -> None:
        """Report the failed samples of a batch that the caller is about to receive.

        Raises:
            TooManyFailuresError: More samples of the epoch have failed than `max_errors` allows.
        """
        for sample in failed:
            self._count += 1
            self._report.append(sample)
            if self._count <= _MAX_LOGGED:
                by = "on_error" if sample.replaced_by is None else f"sample {sample.replaced_by!r:.50}"
                log.warning("a sample could not be read, and %s replaced it: %s", by, sample)
        if failed and self._count > self._maximum:
            cure = "loader.failed_samples lists all; raise max_errors, or repair the files"
            raise too_many_failures(self._count, self._max_errors, self._num_samples, failed[-1], cure)
