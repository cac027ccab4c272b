"""Builds an LMDB cache: workers decode a dataset in parallel, the parent writes the file and publishes it.

Rules:

1. All files are written below PATH.partial (see `unfinished`) under an exclusive lock. When the cache is
   complete and on disk, it is renamed to PATH, so a process that sees PATH sees the complete cache.
2. The next build resumes a build that ended early, by an error, Ctrl-C or SIGKILL.
3. Workers decode and encode (see `tasks`); the parent only writes.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import PIL.Image  # the submodule, so that encoding workers, which are forked from here, inherit it

from fastload.batch.failed_sample import FailedSample
from fastload.batch.failures import budget_exceeded, check_error_budget, most_failures
from fastload.cache.build import processes
from fastload.cache.build.build_lock import only_builder
from fastload.cache.build.partial_files import foreign_part, is_sharded, read_plan_file
from fastload.cache.build.tasks import TASKS_A_WORKER, Failed, RecordTasks, plan_tasks
from fastload.cache.build.unfinished import Partial, source_differences
from fastload.cache.build.writer import ShardWriter
from fastload.cache.codecs import LOSSY, SOURCE, check_codec
from fastload.cache.encoded import encoded_source, holds_images
from fastload.cache.lmdb.description import Description, Plan, runs_of
from fastload.cache.lmdb.format import VALUE_HEADER_BYTES
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.lmdb.shapes import SeenShapes
from fastload.cache.progress import BuildProgress
from fastload.cache.random_check import read_unnoticed
from fastload.cache.record import encode, outline
from fastload.errors import CacheError, CacheMismatchError, ErrorBudgetError, UnsupportedSampleError, add_note
from fastload.images.encoded import EncodedImage
from fastload.nested import tree
from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fastload.cache.build.build_lock import BuildLock
    from fastload.cache.build.tasks import Answer, Value
    from fastload.cache.fingerprint import Fingerprint

_WHAT_TO_DO = "Delete it to build it again, or give another path"
_QUALITY = 95  # of jpeg and webp, by default
_GUESSED_BYTES = 1 << 20  # of a sample, if sample 0 cannot be read


def build_lmdb(
    dataset: Any,
    path: str | os.PathLike[str],
    *,
    num_workers: int | None = None,
    progress: bool = True,
    probed: Mapping[int, Any] | None = None,
    codec: str | None = None,
    quality: int | None = None,
    shards: int | None = None,
    on_error: str = "raise",
    error_budget: int | float = 1.0,
    fingerprint: Fingerprint | None = None,
) -> LMDBCache:
    """The finished cache of a dataset at `path`: opened if it exists, else built, or its build is resumed.

    Args:
        dataset: Map-style and deterministic.
        path: The file, or with `shards` the directory.
        num_workers: Processes that decode; None for one per usable CPU, 0 for none.
        progress: Show a bar if standard error is a terminal; progress is logged otherwise.
        probed: Samples that were already read, by index; they are not read again.
        codec: How `(H, W, 3)`, `(H, W, 1)` and `(H, W)` uint8 arrays are encoded: `"raw"`; `"png"`, lossless;
            `"jpeg"` or `"webp"`, which change the pixels of arrays with three channels (one channel may be a
            mask, and is encoded as png); `"source"` stores the files of undecoded images as they are. None
            accepts a finished cache of any codec, and builds a raw cache.
        quality: Quality of jpeg and webp, 1 to 100; webp of quality 100 is lossless. None accepts a finished
            cache of any quality, and builds with 95.
        shards: Number of files of the cache; None accepts any number, and builds one. With several, `path`
            is a directory. Finished shards survive a power failure during the build.
        on_error: `"raise"` ends the build at the first sample that cannot be read; `"skip"` leaves such a
            sample out and writes a line about it to PATH.errors.jsonl.
        error_budget: The most samples that may be left out: an int, or a share of all samples as a float.
        fingerprint: Of the samples; it identifies a finished cache without reading a sample.

    Raises:
        CacheMismatchError: The cache at `path` was made from other samples, or has another codec.
        CacheBusyError: Another process is building it.
        UnsupportedSampleError: A value in a sample cannot be cached.
        CacheError: The files could not be written.
        ErrorBudgetError: More samples than the budget could not be read; the finished part is kept.
        ValueError: An argument has none of the forms above.
    """
    built_quality = check_arguments(codec, quality, shards, on_error, error_budget)
    path = os.path.abspath(os.fspath(path))
    probed = dict(probed or {})
    dataset, fingerprint = as_stored(dataset, fingerprint, codec)
    if not os.path.lexists(path):
        with only_builder(path) as lock:
            if not os.path.lexists(path):  # else another builder finished before this one got the lock
                partial = Partial(path)
                build = Build(
                    dataset,
                    path,
                    partial,
                    probed,
                    skips=on_error == "skip",
                    error_budget=error_budget,
                    quality=built_quality,
                    lock=lock,
                )
                plan = partial.begin(
                    build.make_plan(codec or "raw", shards or 1, fingerprint), skips=on_error == "skip"
                )
                resumed = _build_whole(build, partial, plan, path, num_workers, progress)
                cache = LMDBCache(path)
                cache.reason = f"built now, as it did not exist{resumed}"
                build.report_shapes(cache)
                return cache
    _remove_leftovers(path)
    return open_finished(path, dataset, probed, codec, quality, shards, fingerprint)


def as_stored(
    dataset: Any, fingerprint: Fingerprint | None, codec: str | None
) -> tuple[Any, Fingerprint | None]:
    """The dataset whose samples a cache of this codec stores, and their fingerprint."""
    if codec != SOURCE:
        return dataset, fingerprint
    return encoded_source(dataset), None if fingerprint is None else fingerprint.of_encoded()


def check_arguments(
    codec: str | None, quality: int | None, shards: int | None, on_error: str, error_budget: int | float
) -> int:
    """Check arguments of a build; returns the quality to build with.

    Raises:
        ValueError: An argument has none of the forms that `build_lmdb` lists.
    """
    built_quality = _QUALITY if quality is None else quality
    check_codec("raw" if codec is None else codec, built_quality)
    if shards is not None and (isinstance(shards, bool) or not isinstance(shards, int) or shards < 1):
        raise ValueError(f"shards should be an int from 1, but got {shards!r}")
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error should be "raise" or "skip", but got {on_error!r}')
    check_error_budget(error_budget)
    return built_quality


def _build_whole(
    build: Build, partial: Partial, plan: Plan, path: str, num_workers: int | None, shown: bool
) -> str:
    """Write the samples that are missing, and publish; returns a clause about a resumed build, or nothing."""
    shard, position = _find_position(partial, plan)
    partial.forget_from(position)
    if position:
        log.info("building %s: resumes at sample %d of %d", path, position, plan.num_samples)
    build.write(
        plan,
        range(shard, plan.num_shards),
        range(plan.num_samples),
        position,
        num_workers,
        title=f"building {path}",
        shown=shown,
        finish=lambda: partial.publish(plan),
    )
    if partial.skipped:
        log.warning(
            "%s: %d of %d samples could not be read and are left out: see %s.errors.jsonl",
            path,
            len(partial.skipped),
            plan.num_samples,
            path,
        )
    if not position:
        return ""
    return f" (the last {plan.num_samples - position:,} samples; an earlier build made the others)"


def _find_position(partial: Partial, plan: Plan) -> tuple[int, int]:
    """The first unfinished shard, and the first index that is not in it."""
    for shard in range(plan.num_shards):
        if partial.is_finished(plan, shard):
            continue
        position = plan.indices_of(shard).start
        path = partial.shard_path(plan, shard)
        if os.path.exists(path):
            with contextlib.closing(ShardWriter(path)) as writer:
                position = position if writer.last_index is None else writer.last_index + 1
        return shard, position
    return plan.num_shards, plan.num_samples


def _remove_leftovers(path: str) -> None:
    """Remove the harmless remains of a builder that was killed after it had published the cache."""
    if os.path.lexists(f"{path}.partial") or os.path.lexists(f"{path}.lock"):
        # Another builder may remove the same files now, and this directory may be read-only.
        with contextlib.suppress(CacheError, OSError), only_builder(path):
            partial = f"{path}.partial"
            if foreign_part(partial) is None and not is_sharded(read_plan_file(partial)):
                Partial(path).remove()


# --- opening ---------------------------------------------------------------------------------------------


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
    cache = LMDBCache(path)
    _check_form(cache, codec, quality, shards)
    _check_samples(cache, dataset, probed, fingerprint)
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


def _check_samples(
    cache: LMDBCache, dataset: Any, probed: Mapping[int, Any], fingerprint: Fingerprint | None
) -> None:
    num_samples = len(dataset)
    first = None
    if 0 in cache and num_samples and (fingerprint is None or cache.parts is None):
        first = probed[0] if 0 in probed else read_unnoticed(dataset, 0)
    check_source(cache, num_samples, first, fingerprint=fingerprint)


def check_source(
    cache: LMDBCache, num_samples: int, first: Any, *, fingerprint: Fingerprint | None = None
) -> None:
    """Check that a cache was made from these samples: by both fingerprints, or else by sample 0.

    Raises:
        CacheMismatchError: It was not; the error says what differs and what to do.
    """
    differences = source_differences(cache.plan, fingerprint)
    if differences:
        raise CacheMismatchError(
            f"{cache.path} was made from other samples: {'; '.join(differences)} "
            f"(here: the dataset, there: the cache). {_WHAT_TO_DO}"
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
                f"the {name} is {stored} in the cache and {wanted} in the dataset. {_WHAT_TO_DO}"
            )
    cache.reason = "opened, as its number of samples and its sample 0 match the dataset"
    if differences is not None:
        cache.reason = "opened, as its fingerprint matches the dataset"


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


# --- building --------------------------------------------------------------------------------------------


class Kept(Protocol):
    """The directory in which a build keeps its files.

    Attributes:
        path: The directory.
        skipped: Samples that were left out so far, by index.
        what_is_kept: What it keeps after an error: a sentence without its full stop.
        where_reported: A clause about the samples that were left out.
        way_to_resume: What to do after an error.
    """

    path: str
    skipped: dict[int, FailedSample]
    what_is_kept: str
    where_reported: str
    way_to_resume: str

    def shard_path(self, plan: Plan, shard: int) -> str:
        """The path at which a shard is written."""

    def report(self, sample: FailedSample) -> None:
        """Note that a sample is left out."""


class Build:
    """Makes the plan of a cache, and writes samples to its shards.

    Args:
        dataset: Map-style.
        path: The path of the finished cache.
        kept: The directory of the unfinished cache.
        probed: Samples that were already read, by index.
        skips: Leave out samples that cannot be read.
        error_budget: The most samples that may be left out, as `build_lmdb` takes it.
        quality: Of a lossy codec.
        lock: The lock of the build, which workers close; None if it has no lock.
    """

    def __init__(
        self,
        dataset: Any,
        path: str,
        kept: Kept,
        probed: dict[int, Any],
        *,
        skips: bool,
        error_budget: int | float,
        quality: int,
        lock: BuildLock | None,
    ) -> None:
        self._dataset = dataset
        self._path = path
        self._kept = kept
        self._probed = probed
        self._skips = skips
        self._most_left_out = most_failures(error_budget, len(dataset))
        self._quality = quality
        self._lock = lock
        self._num_samples = len(dataset)
        self._position = 0
        self._first_bytes = _GUESSED_BYTES
        self._shapes = SeenShapes()
        self._failed: Exception | None = None  # the error of a sample

    def make_plan(self, codec: str, shards: int, fingerprint: Fingerprint | None) -> Plan:
        """A plan of a new build; reads sample 0.

        Raises:
            ValueError: The codec is "source", and sample 0 has no undecoded image.
        """
        import lmdb

        spec, crc32 = self._read_first()
        first = self._probed.get(0)
        if codec == SOURCE and first is not None and not holds_images(first):
            raise ValueError(
                f'codec "source" stores the files of images, but sample 0 is {tree.outline(first)}: return '
                "fastload.EncodedImage(path) in place of the decoded array, use fastload.ImageFolder without "
                "size=, or choose another codec"
            )
        classes = getattr(self._dataset, "classes", None)
        is_listed = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
        return Plan(
            build_id=os.urandom(8).hex(),
            num_samples=self._num_samples,
            num_shards=min(shards, max(1, self._num_samples)),
            spec=spec,
            crc32=crc32,
            codec=codec,
            quality=self._quality if codec in LOSSY else None,
            parts=None if fingerprint is None else dict(fingerprint.parts),
            classes=classes if is_listed else None,
            libraries={"lmdb": lmdb.__version__, "numpy": np.__version__, "pillow": PIL.__version__},
            created_s=time.time(),
        )

    def _read_first(self) -> tuple[str | None, int | None]:
        if not self._num_samples:
            return None, None
        if 0 not in self._probed:
            try:
                self._probed[0] = self._dataset[0]
            except Exception as error:
                if self._skips:
                    return None, None
                add_note(error, "in sample 0 of the dataset")
                add_note(
                    error, 'Nothing was built yet: on_error="skip" leaves out samples that cannot be read'
                )
                raise
        record = _first_record(self._probed[0])
        self._first_bytes = len(record)
        return _identity(record)

    def write(
        self,
        plan: Plan,
        shards: range,
        indices: range,
        position: int,
        num_workers: int | None,
        *,
        title: str,
        shown: bool,
        finish: Callable[[], None],
    ) -> None:
        """Write the samples of some shards.

        Args:
            plan: The plan of the cache.
            shards: The shards to write, one after another.
            indices: The samples that the progress counts.
            position: The first sample to write.
            num_workers: Processes that decode, as `build_lmdb` takes it.
            title: The name of the work, for the progress.
            shown: Draw a bar, if standard error is a terminal.
            finish: Called when all shards are complete and on the disk.
        """
        self._position = position
        spans = [plan.indices_of(shard) for shard in shards]
        if spans:
            spans[0] = range(position, spans[0].stop)
        num_processes = processes.choose_workers(num_workers, indices.stop - position)
        ranges, slots = plan_tasks(spans, self._first_bytes, num_processes)
        tasks = RecordTasks(
            self._dataset,
            ranges,
            self._probed,
            codec=plan.codec,
            quality=self._quality,
            skips=self._skips,
            slots=slots,
            lock=self._lock,
        )
        # Workers start before a file is opened, because they must not inherit LMDB environments.
        answers = processes.run(tasks, tasks.orders(), num_processes, ahead=TASKS_A_WORKER)
        done = position - indices.start
        try:
            with BuildProgress(title, len(indices), shown=shown, done=done) as progress:
                spans_left = iter(ranges)
                for shard in shards:
                    self._write_shard(plan, shard, spans_left, tasks, answers, progress)
            finish()
        except (Exception, KeyboardInterrupt) as error:
            self._note_what_is_kept(error)
            raise
        finally:
            processes.stop(answers)
            tasks.close()

    def _write_shard(
        self,
        plan: Plan,
        shard: int,
        spans: Iterator[range],
        tasks: RecordTasks,
        answers: Iterator[Answer],
        progress: BuildProgress,
    ) -> None:
        indices = plan.indices_of(shard)
        writer = ShardWriter(self._kept.shard_path(plan, shard))
        try:
            position = max(indices.start, self._position)
            while position < indices.stop:
                span, (values, slot) = next(spans), next(answers)
                self._write_values(writer, span, values, tasks.memory(slot), progress)
                tasks.free(slot)
                position = span.stop
            left_out = sorted(index for index in self._kept.skipped if index in indices)
            writer.finish(Description(plan, shard, runs_of(left_out)))
        except KeyboardInterrupt:
            writer.commit()
            raise
        finally:
            writer.close()

    def _write_values(
        self,
        writer: ShardWriter,
        span: range,
        values: Sequence[Value],
        memory: memoryview,
        progress: BuildProgress,
    ) -> None:
        nbytes = 0
        for index, value in zip(span, values, strict=False):  # fewer values, if the last one failed
            if isinstance(value, Failed):
                writer.commit()
                raise self._explained(value)
            if isinstance(value, FailedSample):
                self._kept.report(value)
                if len(self._kept.skipped) > self._most_left_out:
                    writer.commit()
                    raise self._over_budget(value)
                continue
            content = memory[value[0] : sum(value)] if isinstance(value, tuple) else value
            writer.put(index, content)
            self._shapes.add(memoryview(content)[VALUE_HEADER_BYTES:])
            nbytes += len(content)
        progress.advance(nbytes, len(values))

    def _over_budget(self, last: FailedSample) -> ErrorBudgetError:
        return budget_exceeded(
            len(self._kept.skipped),
            self._most_left_out,
            self._num_samples,
            last,
            f"{self._kept.what_is_kept}{self._kept.where_reported}: raise the budget or repair the files, "
            f"and {self._kept.way_to_resume}",
        )

    def report_shapes(self, cache: LMDBCache) -> None:
        """Log if samples differ in shape, which would fail in the first training batch; store the number."""
        self._shapes.add_stored(cache.path, self._position)  # samples of an earlier build
        cache.num_shapes = self._shapes.number
        self.log_shapes(cache.path)

    def log_shapes(self, title: str) -> None:
        """Log if the samples that were written differ in shape."""
        explanation = self._shapes.explain()
        if explanation is not None:
            log.info("%s: %s", title, explanation)

    def _explained(self, failed: Failed) -> Exception:
        error = failed.error
        add_note(error, f"in sample {failed.index} of the dataset")
        if error.__traceback__ is None:  # it comes from a worker
            add_note(error, f"raised in a worker process:\n{failed.trace}")
        self._failed = error
        return error

    def _note_what_is_kept(self, error: BaseException) -> None:
        if isinstance(error, UnsupportedSampleError) or not os.path.isdir(self._kept.path):
            return  # the dataset has to change, or nothing was kept
        way_out = ', with on_error="skip" to leave such samples out' if error is self._failed else ""
        add_note(error, f"{self._kept.what_is_kept}: {self._kept.way_to_resume}{way_out}")
