"""The bottleneck, and what to change to make training wait less, with the predicted gain.

A gain is the steps' time now, divided by their time after that change alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fastload.device.devices import why_unavailable
from fastload.profiling import probes
from fastload.profiling.prediction import LoaderModel
from fastload.profiling.timeline import mean, median, seconds
from fastload.system.humanize import readable_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fastload.profiling.timeline import Stage, Timeline

MIN_DATA_SHARE = 0.05  # a loop that waits less for data has no bottleneck, and gets no suggestion
MIN_GAIN = 1.03  # of a suggestion

_RAM_BYTES_PER_S = 4e9  # a cautious rate for copying a cached sample into its batch
_LARGE_BYTES = 1_000_000  # a batch from which on fresh pages cost more than everything else
_CACHED_SAMPLE_S = 30e-6  # of a CachedDataset, for finding a sample and calling the transform
_SLOW_WORKER = 2.0  # times the median of the others
_DOMINANT = 0.4  # a transform that takes this share of all transforms' time is named
# Crops that the decoder can take over, and for images of up to so many pixels the share of a full decode's
# time that their regions take: benchmarks/NOTES.md, "Decoding a region of a JPEG", beside OpenCV.
_CROPS = frozenset(
    ("RandomResizedCrop", "RandomSizedCrop", "RandomCrop", "CenterCrop", "RandomSizedBBoxSafeCrop")
)
_REGION_SHARES = ((3e5, 0.86), (1.5e6, 0.77), (6e6, 0.67), (float("inf"), 0.4))
_NORMALIZERS = frozenset(("Normalize", "ToFloat", "ToTensor", "ConvertImageDtype", "ToDtype"))
# Decoders whose results a loader's cache="ram" remembers (see `readers`); others call one of these.
_REMEMBERED = frozenset(
    (
        *("cv2.imread", "cv2.imdecode", "tifffile.imread"),
        *(f"torchvision.io.{name}" for name in ("read_image", "decode_image", "decode_jpeg", "decode_png")),
        *(f"{probes.LOAD} {name}" for name in ("AVIF", "BMP", "HEIF", "JPEG", "MPO", "PNG", "TIFF", "WEBP")),
    )
)
# The end of torchvision's pipelines, which fastload's loader does at once.
_TO_TENSOR = frozenset(("ToTensor", "ToImage", "PILToTensor"))
_FUSED = _TO_TENSOR | {"ConvertImageDtype", "Normalize", "ToDtype"}
_HIT_S = 50e-6  # of a remembered file, besides copying its pixels
_COPY_BYTES_PER_S = 8e9  # of a private copy of them
_WORTH_REMEMBERING = 0.25  # of the files; where fewer fit, the system's page cache serves better
_FAST_COLLATES = (probes.OWN_COLLATE, "default_collate")

STAGE_NAMES = {
    probes.READ: "reading files",
    probes.DECODE: "decoding images",
    probes.TRANSFORM: "transforms",
    probes.COLLATE: "collating",
    probes.CACHE: "reading the cache",
    probes.LOCK: "waiting for a lock",
    probes.DATASET: "the dataset's own code",
    probes.SEND: "sending batches from the workers",
    probes.RECEIVE: "receiving batches from the workers",
    probes.PIN: "pinning memory",
    probes.COPY: "copying to the device",
}


@dataclass(frozen=True)
class Suggestion:
    """A change and its predicted gain.

    Attributes:
        change: The name of the change, for programs: "ram", "workers", "persistent_workers", ...
        text: The change in words.
        gain: The predicted speed-up of training, from the recorded times.
        nbytes: The host memory that it needs; 0 if that is not predicted.
    """

    change: str
    text: str
    gain: float
    nbytes: int = 0


# --- the bottleneck --------------------------------------------------------------------------------------


def find_bottleneck(timeline: Timeline) -> tuple[str, str]:
    """The part of loading that takes most of the time, and a sentence about it.

    The part is "start", "worker", a stage, or "" if nothing was recorded of it.
    """
    if timeline.start_share > timeline.data_share / 2:
        return "start", "The bottleneck is the start of epochs: the loop waits for their first batches."
    slow = _slow_worker(timeline)
    if slow:
        return "worker", f"The bottleneck is one slow worker: {slow}."
    outside = _outside(timeline)
    if outside:
        return outside, f"The bottleneck is {STAGE_NAMES[outside]}: workers wait for work meanwhile."
    by_stage = {part.stage: timeline.stage_s(part.stage) for part in timeline.stages}
    total_s = sum(by_stage.values())
    if not total_s:
        return "", "Nothing was recorded about where loading spends its time."
    stage = probes.LOCK if _is_lock_shared(timeline) else max(by_stage, key=lambda name: by_stage[name])
    share, detail = by_stage[stage] / total_s, _detail(timeline, stage)
    text = f"{share:.0%} of the time of making a batch{f' ({detail})' if detail else ''}"
    return stage, f"The bottleneck is {STAGE_NAMES[stage]}: {text}."


def _is_lock_shared(timeline: Timeline) -> bool:
    """Whether workers work one after another: each of N then waits (N - 1) / N of the time."""
    num_workers: int = max(timeline.info["num_workers"], 1)
    return timeline.stage_s(probes.LOCK) > 0.6 * (num_workers - 1) / num_workers * timeline.make_s > 0


def _detail(timeline: Timeline, stage: str) -> str:
    """The most expensive part of a stage in words."""
    part = timeline.parts(stage)[0]
    if stage == probes.DATASET:
        waits = part.blocked_s > part.wall_s / 2 and not timeline.machine.is_saturated
        details = ["mostly waiting instead of computing"] if waits else []
        return ", ".join(details + [f"most often seen in {line}" for line, _ in timeline.lines[:1]])
    if stage == probes.TRANSFORM:
        return f"{part.name} is {part.wall_s / timeline.stage_s(stage):.0%} of the transforms' time"
    return part.name


def _slow_worker(timeline: Timeline) -> str:
    """A worker that takes much longer for its batches than the others; "" if there is none."""
    times = {
        worker: median([batch.make_s / max(batch.num_samples, 1) for batch in batches[1:]])
        for worker, batches in timeline.batches.items()
        if len(batches) > 3
    }
    slowest = max(times, key=lambda worker: times[worker], default=0)
    others = median([time for worker, time in times.items() if worker != slowest])
    if others <= 0 or times[slowest] < _SLOW_WORKER * others:
        return ""
    return f"worker {slowest} takes {times[slowest] / others:.1f} times as long for a batch as the others"


def _outside(timeline: Timeline) -> str:
    """The largest part of the transport, if workers wait for work while the loop waits for data; else ""."""
    utilization = timeline.utilization
    if utilization is None or utilization > 0.7 or not timeline.outside:
        return ""
    stage, spent_s = next(iter(timeline.outside.items()))
    return stage if spent_s >= mean(timeline.waits) / 3 else ""


# --- changes ---------------------------------------------------------------------------------------------


def suggest(timeline: Timeline, available_bytes: int) -> list[Suggestion]:
    """The changes that gain at least `MIN_GAIN`, largest gain first.

    Args:
        timeline: What was recorded.
        available_bytes: The host memory that is free.
    """
    if timeline.data_share < MIN_DATA_SHARE or not timeline.waits or not timeline.warm:
        return []  # also if the workers were started before the profile, so nothing is known of them
    model = LoaderModel.of(timeline)
    # The share of the time that these changes concern; without workers, an epoch starts with a usual batch.
    steady = 1 - timeline.start_share if timeline.info["num_workers"] else 1.0
    suggestions = [
        replace(suggestion, gain=1 / (1 - steady + steady / suggestion.gain))
        for suggestion in (
            *_files(timeline, model, available_bytes),
            *_caches(timeline, model, available_bytes),
            *_regions(timeline, model),
            *_workers(timeline, model),
            *_device_transform(timeline, model),
            *_threads(timeline, model),
            *_slow_parts(timeline, model),
            *_transport(timeline, model),
        )
    ]
    suggestions += _persistent_workers(timeline)
    return sorted(
        (suggestion for suggestion in suggestions if suggestion.gain >= MIN_GAIN),
        key=lambda suggestion: -suggestion.gain,
    )


def _without(
    timeline: Timeline,
    model: LoaderModel,
    parts: Iterable[Stage],
    share: float = 1.0,
    *,
    added_s: float = 0.0,
    after: LoaderModel | None = None,
) -> float:
    """The gain if this share of these parts of making a batch took no time, else as in `after`."""
    spared = list(parts)
    shares = []
    for clock in ("wall_s", "cpu_s"):
        whole_s = sum(getattr(part, clock) for part in timeline.stages)
        left_s = whole_s - share * sum(getattr(part, clock) for part in spared) + added_s
        shares.append(max(left_s / whole_s, 0.0) if whole_s else 1.0)
    return model.gain_to((after or model).scaled(*shares))


def _files(timeline: Timeline, model: LoaderModel, available_bytes: int) -> Iterator[Suggestion]:
    """Remember decoded files, while the dataset's code runs as before, in fastload's loader."""
    info = timeline.info
    decoders = [part for part in timeline.parts(probes.DECODE) if part.name in _REMEMBERED and part.nbytes]
    if not decoders or not info["num_samples"] or info["remembers_files"] or info["is_cached"]:
        return
    opened = [part for part in decoders if part.name.startswith(probes.LOAD)]
    # A resize of all pixels, which the source's size determines, is remembered instead of a photograph.
    resizes = [part for part in timeline.parts(probes.TRANSFORM) if part.name == "Resize" and part.nbytes]
    needed_bytes = _remembered_bytes(timeline, decoders, resizes)
    fitting = min(1.0, 0.8 * available_bytes / needed_bytes)
    if fitting < _WORTH_REMEMBERING:
        return
    names = {part.name for part in decoders}
    spared = [*decoders, *(part for part in timeline.parts(probes.READ) if part.name in names), *resizes]
    # Of an image of Pillow's, the pixels that are used are copied; mostly a crop.
    copied_bytes = _bytes(part for part in decoders if part not in opened)
    added_s = sum(part.num_calls for part in decoders) * _HIT_S + copied_bytes / _COPY_BYTES_PER_S
    if opened:  # reading the file, and a copy in the same mode, cost nothing
        spared += [part for part in timeline.parts(probes.READ) if part.name == "file"]
        spared += [
            part
            for part in timeline.parts(probes.DECODE)
            if part.name == "Image.convert"
            and any(math.isclose(part.nbytes, load.nbytes, rel_tol=0.01) for load in opened)
        ]
    share = sum(part.wall_s for part in spared) / max(sum(part.wall_s for part in timeline.stages), 1e-9)
    after, collating_s = _transported(timeline, model)
    added_s = fitting * added_s - collating_s
    end = [part for part in timeline.parts(probes.TRANSFORM) if part.name in _FUSED]
    if not info["is_fastload"] and any(part.name in _TO_TENSOR for part in end):
        added_s += min(info["nbytes"] / _RAM_BYTES_PER_S - sum(part.wall_s for part in end), 0.0)
    yield Suggestion(
        "files",
        'remember decoded files: DataLoader(dataset, cache="ram"), or fastload run --cache ram. Decoding is '
        f"{share:.0%} of the time of making a batch, and the rest runs as before. It needs at most "
        f"{readable_size(needed_bytes)} of RAM; {readable_size(available_bytes)} are free. The gain begins "
        "in the second epoch",
        _without(timeline, model, spared, fitting, added_s=added_s, after=after),
        needed_bytes,
    )


def _remembered_bytes(timeline: Timeline, decoders: list[Stage], resizes: list[Stage]) -> int:
    """What the decoded files of all samples take, if each of them is read for one sample."""
    num_batches: float = timeline.info["num_samples"] / mean([batch.num_samples for batch in timeline.warm])
    # Of what is resized first, it seems that which has the most bytes per pixel, only results are stored.
    num_resized, needed_bytes = sum(part.num_pixels * part.num_calls for part in resizes), _bytes(resizes)
    for part in sorted(decoders, key=lambda part: -part.nbytes / max(1, part.num_pixels)):
        num_pixels = part.num_pixels * part.num_calls
        num_replaced = min(num_pixels, num_resized) if part.name.startswith(probes.LOAD) else 0
        num_resized -= num_replaced
        needed_bytes += part.nbytes * part.num_calls * (1 - num_replaced / max(1, num_pixels))
    return round(needed_bytes * num_batches)


def _bytes(parts: Iterable[Stage]) -> float:
    """Of the images that they return for a batch."""
    return sum(part.nbytes * part.num_calls for part in parts)


def _caches(timeline: Timeline, model: LoaderModel, available_bytes: int) -> Iterator[Suggestion]:
    info = timeline.info
    if info["is_iterable"] or info["is_cached"] or not info["num_samples"]:
        return
    per_batch = mean([batch.num_samples for batch in timeline.warm])
    image = max(timeline.parts(probes.DECODE), key=lambda part: part.nbytes, default=None)
    image_bytes = image.nbytes if image else 0.0
    content, sample_bytes = "the decoded images", image_bytes
    if not image_bytes:
        content, sample_bytes = "the samples", info["nbytes"] / per_batch
    transform, moved, copied_bytes = "", "", sample_bytes
    if timeline.parts(probes.TRANSFORM):
        content += ", before the transform,"
        moved = "move the transform out of the dataset, to "
        transform, copied_bytes = ", transform", 0.0  # it reads the cached sample in place
    needed_bytes = round(sample_bytes * info["num_samples"])
    sizes = f"{readable_size(needed_bytes)} of RAM; {readable_size(available_bytes)} are free"
    spared = timeline.parts(probes.READ, probes.DECODE, probes.DATASET, probes.LOCK)
    added_s = per_batch * (copied_bytes / _RAM_BYTES_PER_S + _CACHED_SAMPLE_S)
    gain = _without(timeline, model, spared, added_s=added_s)
    if needed_bytes <= 0.8 * available_bytes:
        yield Suggestion(
            "ram",
            f"keep {content} in RAM: {moved}CachedDataset(dataset{transform}), which needs {sizes}. The gain "
            "begins in the second epoch",
            gain,
            needed_bytes,
        )
        return
    yield Suggestion(
        "lmdb",
        f'keep {content} on a fast disk: {moved}CachedDataset(dataset{transform}, cache="lmdb:train.lmdb"), '
        f"because they need {sizes}. The gain begins in the second epoch",
        gain,
    )


def _regions(timeline: Timeline, model: LoaderModel) -> Iterator[Suggestion]:
    """Decode only the region that a crop keeps."""
    decoders = timeline.parts(probes.DECODE)
    images = [part for part in decoders if part.num_pixels]
    crops = [part for part in timeline.parts(probes.TRANSFORM) if part.name in _CROPS]
    if timeline.info["is_iterable"] or not images or not crops:
        return
    regions = [part for part in decoders if part.name.endswith("decode_region")]
    if any(part.num_pixels for part in regions):
        return  # done already
    if regions:  # the dataset is as it should be, but no decoder of regions is installed
        how = f"decode only what {crops[0].name} keeps: pip install 'fastload-torch[regions]'"
    else:
        how = (
            f"decode only what {crops[0].name} keeps, if it is the first transform: use CachedDataset("
            'fastload.ImageFolder(root), transform, cache=None), with the extra "regions" installed'
        )
    num_pixels = max(part.num_pixels for part in images)
    share = next(share for maximum, share in _REGION_SHARES if num_pixels <= maximum)
    yield Suggestion("regions", how, _without(timeline, model, images, 1 - share))


def _workers(timeline: Timeline, model: LoaderModel) -> Iterator[Suggestion]:
    info = timeline.info
    now = info["num_workers"]
    if _is_lock_shared(timeline) or _slow_worker(timeline):
        return  # more workers would wait for the same lock, or for the slow one
    if info["is_iterable"] and now == 0:
        return  # a stream must be divided among workers by its own code
    limit = max(1, round(model.num_cpus))
    if timeline.make_s > 2 * timeline.make_cpu_s and not timeline.machine.is_saturated:
        limit *= 4  # workers that wait for storage or a network share CPUs
    best, gain = now, 1.0
    for number in range(now + 1, limit + 1):
        predicted = model.gain_to(model.with_workers(number))
        if predicted > gain * 1.02:
            best, gain = number, predicted
    if best != now:
        yield Suggestion("workers", f"num_workers={best} instead of {now}", gain)


def _persistent_workers(timeline: Timeline) -> Iterator[Suggestion]:
    info = timeline.info
    spared_s = sum(max(start_s - timeline.make_s, 0.0) for start_s in timeline.starts[1:])
    if info["num_workers"] and not info["persistent_workers"] and timeline.total_s > spared_s > 0:
        yield Suggestion(
            "persistent_workers",
            f"persistent_workers=True: starting workers took {mean(timeline.starts[1:]):.1f} s in each epoch",
            timeline.total_s / (timeline.total_s - spared_s),
        )


def _device_transform(timeline: Timeline, model: LoaderModel) -> Iterator[Suggestion]:
    normalizers = [part for part in timeline.parts(probes.TRANSFORM) if part.name in _NORMALIZERS]
    is_float = timeline.info["image_dtype"] in ("float32", "float64")
    if normalizers and is_float and why_unavailable(None) is None:
        # uint8 batches have a quarter of the bytes.
        collates = [
            replace(part, wall_s=part.wall_s * 0.75, cpu_s=part.cpu_s * 0.75)
            for part in timeline.parts(probes.COLLATE)
        ]
        yield Suggestion(
            "uint8",
            f"send images as uint8 and normalize on the device: without {normalizers[0].name} in the "
            'dataset, and with DataLoader(dataset, device="cuda", '
            "device_transform=fastload.transforms.Normalize(mean, std))",
            _without(timeline, model, [*normalizers, *collates]),
        )


def _threads(timeline: Timeline, model: LoaderModel) -> Iterator[Suggestion]:
    num_workers = timeline.info["num_workers"]
    if num_workers < 2 or timeline.info["worker_type"] == "thread":
        return
    num_busy = mean([seconds(batch.process_cpu_ns) for batch in timeline.warm]) / max(timeline.make_s, 1e-9)
    if num_busy > 1.3 and num_busy * num_workers > 1.2 * model.num_cpus:
        yield Suggestion(
            "threads",
            f"one thread per worker: each keeps {num_busy:.1f} CPUs busy, and {num_workers} workers share "
            f"{model.num_cpus:g} CPUs. Call cv2.setNumThreads(0) and torch.set_num_threads(1) in "
            "worker_init_fn",
            model.gain_to(model.scaled(1 / num_busy, 1.0)),
        )


def _slow_parts(timeline: Timeline, model: LoaderModel) -> Iterator[Suggestion]:
    """Parts of the user's own code, by name."""
    for part in timeline.parts(probes.TRANSFORM)[:1]:
        share = part.wall_s / max(timeline.stage_s(probes.TRANSFORM), 1e-9)
        if share > _DOMINANT and part.name not in _NORMALIZERS | {"Compose"}:  # which is all of them
            text = f"a cheaper transform: {part.name} is {share:.0%} of the transforms' time"
            yield Suggestion("transform", text, _without(timeline, model, [part]))
    for part in timeline.parts(probes.COLLATE)[:1]:
        if part.name not in _FAST_COLLATES:
            text = f"a cheaper collate_fn: {part.name} takes {part.wall_s * 1e3:.1f} ms per batch"
            yield Suggestion("collate", text, _without(timeline, model, [part]))
    for part in timeline.parts(probes.LOCK)[:1]:
        share = timeline.stage_s(probes.LOCK) / max(timeline.make_s, 1e-9)
        text = (
            "no lock between workers, such as a file handle for each worker: workers wait for one during "
            f"{share:.0%} of their time"
        )
        yield Suggestion("lock", text, _without(timeline, model, timeline.parts(part.stage)))
    for part in timeline.parts(probes.DATASET)[:1]:
        if part.wall_s > 0.5 * timeline.make_s and timeline.lines:
            line, share = timeline.lines[0]
            text = f"the dataset's own code: {share:.0%} of the stack samples are at {line}"
            yield Suggestion("code", text, _without(timeline, model, [part]))


def _transport(timeline: Timeline, model: LoaderModel) -> Iterator[Suggestion]:
    after, spared_s = _transported(timeline, model)
    if after is model:
        return
    share = 1 - spared_s / timeline.make_s if timeline.make_s > spared_s else 1.0
    taken_s = timeline.stage_s(probes.SEND) + timeline.receiving_s
    yield Suggestion(
        "fastload",
        "from fastload import DataLoader: its workers write batches directly into shared memory; sending and "
        f"receiving a batch takes {taken_s * 1e3:.1f} ms now",
        model.gain_to(after.scaled(share, share)),
    )


def _transported(timeline: Timeline, model: LoaderModel) -> tuple[LoaderModel, float]:
    """The model with fastload's transport (itself if it has that), and the seconds a batch that it spares."""
    info = timeline.info
    if info["is_fastload"] or not info["num_workers"]:
        return model, 0.0
    sending_s, receiving_s = timeline.stage_s(probes.SEND), timeline.receiving_s
    # torch collates into fresh shared memory, which costs page faults; fastload reuses its memory.
    spared_s = 0.0
    if info["nbytes"] > _LARGE_BYTES:
        collating_s = sum(part.wall_s for part in timeline.stages if part.name == "default_collate")
        spared_s = max(collating_s - info["nbytes"] / _RAM_BYTES_PER_S, 0.0)
    after = replace(
        model,
        computes=[max(compute_s - receiving_s, 0.0) for compute_s in model.computes],
        make_cpu_s=max(model.make_cpu_s - sending_s, 0.0),
        consumer_cpu_s=max(model.consumer_cpu_s - receiving_s, 0.0),
    )
    return after, spared_s
