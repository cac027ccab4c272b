"""benchmarks/README.md, and parts of README.md and of pages below docs/, from the results files.

No figure is typed by hand.

Command: python benchmarks/figures.py
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
SHOWN = {
    "demo": (
        "Seconds per epoch of loaders that take turns; nothing is trained, and the first epoch fills the "
        "cache. Ratios are those of medians."
    ),
    "throughput": "Ratios of medians of interleaved runs, each side with its best number of workers up to 2.",
    "zero_cost": (
        "Time of torch's loader / time of ours with only the import changed, on zero-cost datasets; above 1 "
        "fastload is faster."
    ),
    "training": "Training steps per second of a small model on the same two cores.",
    "accuracy": (
        "The ImageNet recipe with a small network and pieces of photographs: losses and accuracies of three "
        "loaders with one seed."
    ),
    "peers": (
        "Other loaders, configured as their documentation advises, with two workers each. Ratios compare the "
        "best rows of each loader; above 1 fastload is faster."
    ),
    "efficiency": (
        "torch's loader and fastload's on n cores with n workers. Efficiency is the rate divided by n times "
        'the rate of one core; "copy" is n threads that only copy memory.'
    ),
    "any_dataset": (
        "torchvision's ImageFolder and classes as users write them, unchanged, two workers; the batches are "
        "equal, bit for bit, except those of a CachedDataset."
    ),
    "ray_workers": (
        "Ray's actors beside worker processes, for samples that cost nothing: the price of the transport. "
        "The nodes of the cluster share one machine, which other programs kept busy: only ratios count."
    ),
    "augment": (
        "Crops and flips of whole batches by a `device_transform`, on the CPU; [on a GPU](#gpu), other "
        "kernels make them. Above 1, fastload is faster."
    ),
    "remote": (
        "Photographs from an object store on the same machine, by the latency added to each request; a plain "
        "dataset reads one object per access."
    ),
    "partition": (
        "NodePartitionSampler against torch's DistributedSampler: which samples share a batch, and the "
        "accuracy of a model. The script's header defines the counts."
    ),
    "sharing": "Memory is the sum of PSS: a page mapped by n processes counts 1/n in each.",
    "worker_memory": (
        "Own memory is the USS of a forked worker: pages that no other process maps. Times are CPU times."
    ),
    "huge_pages": (
        "Processor time with pages of 4 KiB and of 2 MiB, which Linux was set to give shared memory. The "
        "samples cost nothing to make, so the first epoch shows the whole price of the larger pages."
    ),
    "lmdb": "LMDB through the page cache, after every record was read once.",
    "workers": (
        "Worker threads against worker processes, each at its best of 1 and 2; above 1, threads are faster."
    ),
    "reproducibility": "The added time per sample, and the time from resuming a loader to its next batch.",
    "profile_truth": (
        "Ten scripts whose limit is known: gains and memory that a profile predicts, divided by measured "
        "ones, and steps under `fastload.profile` against steps without it (above 1 is slower)."
    ),
}
MAX_FAILURES = 5  # that the page names
MAX_ROWS = 8  # a question with more shows its ratios alone
LEVEL = 1.05
FIRST = ", the first epoch"
# Ratios above 1 where fastload is faster than another loader.
AGAINST = re.compile(
    r" / (torch|FFCV|DALI|SPDL|Grain|albumentations|torchvision|kornia)[^()]*$|^torch / fastload"
)

INTRODUCTION = """# Benchmarks

Each script in this folder answers one question; its header has the question, what it leaves out, and the command.
`make bench` runs the benchmarks that judge changes to the transport, and `make bench-peers` compares other
libraries, each in its own environment. `make efficiency` measures loaders on 1, 2, 4, ... all cores of a machine, and
draws `build/efficiency.svg`. `python benchmarks/gate.py OLD NEW` compares two checkouts of fastload on the rows that must
not get slower. [NOTES.md](NOTES.md) has the experiments behind design decisions. Every figure below
comes from the file of that name under `results/`; `python benchmarks/figures.py` writes this page. Look at the date:
the code may have changed since.

A figure is the median of interleaved runs, and the range beside it covers all of them. Machines differ, and shared
machines have busy neighbors: compare ratios, and run the command on your own machine.

In the labels, "import only" is fastload's loader over the same dataset, "cached" its loader over a `CachedDataset` in
RAM, "bulk" torch's loader over a dataset that returns a whole batch at a time, and "/" divides two medians.
"""  # noqa: E501  # lines as in the other Markdown files


def digits(value: float) -> str:
    """A figure for people: two digits after the first, and no more."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.2g}"


def spread(figures: list[float]) -> str:
    """The lowest and the highest of some runs."""
    lowest, highest = digits(min(figures)), digits(max(figures))
    return lowest if lowest == highest else f"{lowest} to {highest}"


def tables() -> str:
    """The page: where another loader wins or ties, then a section for each results file that is there."""
    found = {
        name: json.loads((RESULTS / f"{name}.json").read_text().replace("rng=", "seeding="))  # once its name
        for name in SHOWN
        if (RESULTS / f"{name}.json").exists()
    }
    lines = [INTRODUCTION, *lost_or_level(found)]
    for name, results in found.items():
        machine = results["machine"]
        lines += [
            f"## {name}",
            (
                f"{SHOWN[name]} `{results['command']}`, {results['date']}, commit {results['commit']}, "
                f"{machine['cores']} cores ({machine['cpu']}), {machine['gpu'] or 'no GPU'}, torch "
                f"{machine['torch']}, Python {machine['python']}."
            ),
            *(section(question, results["commit"]) for question in results["questions"]),
            "",
        ]
    return "\n".join(
        [
            *lines,
            "## gpu\n\n[What was tested](../docs/guides/gpu.md#what-was-tested) has the table.\n",
            "## compatibility\n",
            f"[Tested releases](../docs/index.md#tested-releases) has the table.\n\n{tested()[1]}",
        ]
    )


def section(question: dict[str, Any], commit: str) -> str:
    """One question in a line: its ratios, then its rows, unless there are many.

    Args:
        question: As in the results file.
        commit: That of the file.
    """
    ratios = [f"{label} **{with_unit(one)}**" for label, one in question["ratios"].items()]
    ratios += [f"{label} cannot: {reason}" for label, reason in question.get("cannot", {}).items()]
    rows = {label: row for label, row in question.get("rows", {}).items() if "figures" in row}
    parts = ["; ".join(ratios)] * bool(ratios)
    if 0 < len(rows) <= MAX_ROWS:
        figures = [
            f"{label} {digits(row['median'])} ({spread(row['figures'])})" for label, row in rows.items()
        ]
        parts.append(f"{question['unit']}: {'; '.join(figures)}")
    if question.get("commit", commit) != commit:
        parts.append(f"Commit {question['commit']}")
    return f"- **{question['title']}**: " + ". ".join(parts)


def with_unit(ratio: dict[str, Any]) -> str:
    """A ratio as the page shows it."""
    unit = ratio.get("unit", "x")
    return f"{ratio['value']:.2f}{'' if unit == 'x' else ' '}{unit}"


def lost_or_level(found: dict[str, dict[str, Any]]) -> list[str]:
    """Where another loader is faster than fastload, or about as fast."""
    lines = ["## Where another loader wins or ties\n"]
    lines.append(f"All ratios of at most {LEVEL} to other loaders; below 1 the other one is faster.\n")
    for name, results in found.items():
        for question in results["questions"]:
            few = [
                f"{label} **{with_unit(one)}**"
                for label, one in question["ratios"].items()
                if (name == "zero_cost" or AGAINST.search(label)) and one["value"] <= LEVEL
            ]
            if few:
                lines.append(f"- [{question['title']}](#{name}): {'; '.join(few)}")
    return [*lines, ""]


def headline() -> str:
    """What each change brings the demo's pictures, and `cache="ram"` brings torchvision's ImageFolder."""
    demo, folders = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("demo", "any_dataset"))
    first, steady, _ = (question["rows"] for question in demo["questions"])
    base = "torch DataLoader"
    rounds = len(first[base]["figures"])
    changes = {
        "fastload, import only": ("the import", "none, unless samples cost nothing to read"),
        'fastload, cache="ram"': ('the import, and `cache="ram"`', "0.56 MB of memory a photograph"),
        "fastload, CachedDataset": (
            "the dataset: augmentation moves into [`CachedDataset`](docs/guides/caching.md)",
            "the same memory",
        ),
        "fastload, crop only": (
            "the same, but [`cache=None`](docs/guides/caching.md#decode-only-the-crop): only crops decoded",
            "the extra `regions`",
        ),
    }
    lines = [
        "| you change | speed-up over torch, later epochs | first epoch | price |",
        "|---|---:|---:|---|",
    ]
    for label, (change, price) in changes.items():
        later, begins = (
            range_of_rounds(epochs[base]["figures"], epochs[label]["figures"], rounds)
            for epochs in (steady, first)
        )
        lines.append(f"| {change} | {later} | {begins} | {price} |")
    remembered = {
        question["title"].removeprefix("ImageFolder, "): question["ratios"]['cache="ram" / torch']["value"]
        for question in folders["questions"]
    }
    (small, large), (resized, large_resized) = (
        [remembered[f"{first}(224), v1, JPEGs of {size}"] for size in ("500 x 375", "2048 x 1536")]
        for first in ("RandomResizedCrop", "Resize(256), RandomCrop")
    )
    cores, cpu = demo["machine"]["cores"], demo["machine"]["cpu"]
    return (
        "\n".join(lines) + "\n\n"
        f"Albumentations' `RandomResizedCrop` and a flip of small JPEGs; {cores} cores ({cpu}), no GPU, no "
        "model. The loaders take turns; a figure is the ratio of their median epochs, in the worst and in "
        f"the best of {rounds} rounds. For torchvision's `ImageFolder` with a random crop, `ToTensor` and "
        f'`Normalize`, `cache="ram"` is {small:.1f} times as fast as torch at 500 x 375 pixels and '
        f"{large:.1f} times at 2048 x 1536 (9.4 MB of memory each); with `Resize(256)` first, {resized:.1f} "
        f"and {large_resized:.0f} times. {beside_a_model()} "
        "[All figures](benchmarks/README.md) include those where torch's loader is faster."
    )


def beside_a_model() -> str:
    """What is left of it in a training, on both kinds of machines."""
    training, gpu = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("training", "gpu"))
    memory, photos = (
        question["ratios"]["fastload, cached / torch"]["value"] for question in training["questions"]
    )
    runs = gpu["checks"]["resnet_50_from_a_cache"]["result"]["figures"]
    pairs = zip(runs["fastload"], runs["torch"], strict=True)
    gains = spread([own["images_per_s"] / torch["images_per_s"] for own, torch in pairs])
    own, torch = ([run["wait_share"] for run in runs[name]] for name in ("fastload", "torch"))
    where = f"{gpu['machine']['gpu']} with {gpu['machine']['cores']} cores"
    return (
        f"Beside a small model on the same cores, cached photographs give {photos:.1f} times as many steps "
        f"as torch's loader, and arrays in memory {memory:.1f} times. ResNet-50 on an {where} waits "
        f"{max(own):.2%} of the time, and {min(torch):.1%} to {max(torch):.1%} with torch's loader: {gains} "
        "times as many steps."
    )


def ratio(rates: list[float], others: list[float]) -> float:
    """The ratio of the medians of interleaved runs."""
    return statistics.median(rates) / statistics.median(others)


def range_of_rounds(torch_s: list[float], own_s: list[float], rounds: int) -> str:
    """The lowest and the highest ratio of a round of the demo, each the median of its epochs."""
    size = len(torch_s) // rounds
    starts = range(0, len(torch_s), size)
    ratios = [ratio(torch_s[start : start + size], own_s[start : start + size]) for start in starts]
    ends = dict.fromkeys(f"{end:.2g}" for end in (min(ratios), max(ratios)))
    return " to ".join(ends)


RIVALS = ("torch", "fastload, only the import", "fastload, cached", "FFCV", "DALI", "SPDL")


def peers() -> str:
    """Images a second of some loaders with pictures that are cropped, each at its best row, and of ours."""
    results = json.loads((RESULTS / "peers.json").read_text())
    machine = results["machine"]
    questions = [question for question in results["questions"] if "RandomResizedCrop" in question["title"]]
    lines = ["| images/s | " + " | ".join(RIVALS) + " |", "|---" + "|---:" * len(RIVALS) + "|"]
    for question in questions:
        best = dict.fromkeys(RIVALS, 0.0)
        for label, row in question["rows"].items():
            name = loader_of(label)
            best[name] = max(best.get(name, 0.0), row.get("median", 0.0))
        cells = (digits(best[name]) for name in RIVALS)
        lines.append(f"| {question['title']} | " + " | ".join(cells) + " |")
    where = f"{machine['cores']} cores, {machine['cpu']}, {machine['gpu'] or 'no GPU'}"
    return (
        "Images a second for the same work, with two workers or threads, each loader configured as its own "
        f"documentation recommends ({where}; `make bench-peers`; "
        "[more loaders, and small images](benchmarks/README.md#peers)). At 32 x 32 without augmentation, "
        f"FFCV is {ffcv():.1f} times as fast as fastload:\n\n" + "\n".join(lines)
    )


def ffcv() -> float:
    """How much faster FFCV is than fastload with small images that nothing augments."""
    results = json.loads((RESULTS / "peers.json").read_text())
    (small,) = (one for one in results["questions"] if one["title"].startswith("32 x 32 x 3 uint8"))
    (ours,) = (one["value"] for label, one in small["ratios"].items() if "cached / FFCV" in label)
    return 1 / float(ours)


def tested() -> tuple[str, str]:
    """The releases that `make test-matrix` has run the tests on: a table; and what failed or did not run."""
    results = json.loads((RESULTS / "compatibility.json").read_text())
    columns = ("torch", "numpy", "albumentations", "pillow", "lmdb", "fsspec")
    lines = [
        "| Python | PyTorch | NumPy | albumentations | Pillow | lmdb | fsspec | tests that passed | failed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    missing: dict[str, list[str]] = {}
    notes = []
    for row in results["rows"]:
        python, torch, libraries = row["asked"]
        if "not_available" in row:
            missing.setdefault(row["not_available"], []).append(f"Python {python} with torch {torch}")
            continue
        name = row["python"] + (", without the GIL" if python.endswith("t") else "")
        name += {"oldest": ", lower bounds", "newest": ", newest libraries"}.get(libraries, "")
        releases = " | ".join(row.get(column, "") or "none" * (column in row) for column in columns)
        lines.append(f"| {name} | {releases} | {row['passed']:,} | {row['failed']} |")
        if row["failed"]:
            some = ", ".join(f"`{test}`" for test in row["failures"][:MAX_FAILURES])
            others = row["failed"] - MAX_FAILURES
            rest = f" and {others} others" if others > 0 else ""
            notes.append(f"Failed on {name} with {row['torch']}: {some}{rest}.")
        if row["not_installed"]:
            left_out = ", ".join(requirement.partition("==")[0] for requirement in row["not_installed"])
            notes.append(
                f"For {name}, the package index has no wheels of {left_out}; {len(row['not_run'])} tests, or "
                "files of tests, that import them did not run."
            )
    notes += [f"Not run: {', '.join(rows)} ({reason})." for reason, rows in missing.items()]
    dates = sorted({row["date"] for row in results["rows"]})
    days = " to ".join(sorted({dates[0], dates[-1]}))
    introduction = (
        "`make test-matrix` runs the tests of `make test-fast` on these releases, each with the tests and "
        f"the lower bounds of its day ({days}, Linux on x86-64, no GPU; "
        "[what failed](../benchmarks/README.md#compatibility)):"
    )
    return "\n".join([introduction, "", *lines]), "\n".join(f"- {note}" for note in notes)


def loader_of(label: str) -> str:
    """Whose row this is: a loader has several, and ours count apart where images are kept."""
    name, *rest = label.split(", ")
    if name != "fastload":
        return name
    for word, name in (
        ("regions", "fastload, decoding only the crop"),
        ("batch_transform", "fastload, batch_transform"),
    ):
        if word in rest:
            return name
    return "fastload, cached" if "cached" in rest else "fastload, only the import"


def latencies() -> str:
    """Images a second by the latency of an object store, a column for each latency."""
    results = json.loads((RESULTS / "remote.json").read_text())
    questions, machine = results["questions"], results["machine"]
    columns = [question["title"].rpartition(", ")[2] for question in questions]
    lines = ["| images/s | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for label in questions[0]["rows"]:
        rates = (digits(question["rows"][label]["median"]) for question in questions)
        lines.append(f"| {label} | " + " | ".join(rates) + " |")
    where = f"{machine['cores']} cores, {machine['cpu']}"
    return (
        "Photographs of 500 x 375 pixels in a store on the same machine, which answers each request after a "
        "pause; two workers read, decode and crop them, and the store and its clients share their cores "
        f"({where}; [details](../../benchmarks/README.md#remote)):\n\n" + "\n".join(lines)
    )


def on_a_gpu() -> str:
    """What the checks on a GPU measured, a line for each question."""
    results = json.loads((RESULTS / "gpu.json").read_text())
    checks, machine = {name: one["result"] for name, one in results["checks"].items()}, results["machine"]
    copies, loaders = checks["copy_bandwidth"], checks["loaders_to_the_device"]
    registered = [
        row for rows in checks["cost_of_registering"].values() if isinstance(rows, list) for row in rows
    ]
    wait = checks["waits_against_the_devices_idle_time"]["device=, step of 30.0 ms"]
    crops = checks["ways_to_crop_and_resize"]
    without_triton = crops["torch's operations, 256 px"]["ms"]
    leaves, training = checks["cost_of_leaves"], checks["resnet_50_from_a_cache"]
    decode = checks["decode_on_the_device"]

    def medians(way: dict[str, Any]) -> str:
        return digits(statistics.median(way["images_per_s"][1:]))

    def steps(source: str, what: str) -> float:
        return statistics.median(run[what] for run in training["figures"][source])

    found = {
        "copies of 256 MB, GB/s: from batch buffers, pinned, pageable memory": ", ".join(
            digits(copies[f"{kind}, 256 MB"]["GB_per_s"]) for kind in ("registered", "pinned", "pageable")
        ),
        "share of a copy from batch buffers that a step hides": digits(
            checks["copies_overlap_with_compute"]["registered"]["hidden_share_of_copy"]
        ),
        "pinning a batch buffer of 38.5 MB, once, ms": digits(
            statistics.median(row["register_ms"] for row in registered)
        ),
        "uint8 images of 224 x 224 to the GPU, 8 workers, images/s": f"{medians(loaders['device='])} "
        f"(`pin_memory=True` and `to()`: {medians(loaders['pin_memory and to()'])})",
        "ResNet-50, bfloat16, batch 256: step from a cache in RAM / step on resident data": (
            f"{steps('fastload', 'step_ms') / steps('resident', 'step_ms'):.3f}"
        ),
        "the GPU's wait for data in these steps": f"{steps('fastload', 'wait_share'):.2%} (torch's loader: "
        f"{steps('torch', 'wait_share'):.1%})",
        "a step of 30 ms that is launched at once: idle share of the GPU, and `wait_share`": (
            f"{wait['idle_share']:.2%}, {wait['stats']['wait_share']:.1%}"
        ),
        "`RandomResizedCrop` of 256 images of 256 x 256, ms": f"{digits(crops['resample, 256 px']['ms'])} "
        f"(without Triton: {digits(without_triton)})",
        "`Normalize` of 256 images of 256 x 256 to bfloat16, ms": digits(
            checks["transforms_on_the_device"]["Normalize"]["ms"]
        ),
        "a batch of 4 tensors, and of 1,024 small ones, ms": ", ".join(
            digits(way["ms_per_batch"]) for way in leaves.values()
        ),
        "JPEGs of 500 x 375, images/s: torchvision's decoder on the GPU, OpenCV on one core": ", ".join(
            digits(decode[f"{way}, images/s"]) for way in ("torchvision on the device", "OpenCV on one core")
        ),
    }
    lines = ["| | |", "|---|---:|", *(f"| {question} | {answer} |" for question, answer in found.items())]
    where = f"{machine['gpu']}, {machine['cores']} cores of an {machine['cpu']}, torch {machine['torch']}"
    return f"`{results['command']}` ({where}):\n\n" + "\n".join(lines)


def small_images() -> str:
    """Images a second of small images, beside FFCV."""
    results = json.loads((RESULTS / "peers.json").read_text())
    (question,) = (one for one in results["questions"] if "padded" in one["title"])
    lines = ["| 32 x 32, padded crop and flip, batch 512 | images/s |", "|---|---:|"]
    for label, row in question["rows"].items():
        lines.append(f"| {label} | {digits(row['median'])} |")
    machine = results["machine"]
    return (
        f"Two workers or threads ({machine['cores']} cores, {machine['cpu']}; "
        "[details](../../benchmarks/README.md#peers)):\n\n" + "\n".join(lines)
    )


def accuracy() -> str:
    """What a small network learns from the batches of each loader."""
    results = json.loads((RESULTS / "accuracy.json").read_text())
    losses, accuracies = (list(question["epochs"].values()) for question in results["questions"])
    num_epochs = len(losses[0])
    is_equal = all(ways.count(ways[0]) == len(ways) for ways in (losses, accuracies))
    return (
        "A small network learned from torch's loader, from fastload's with only the import changed, and from "
        'one with a cache, with one seed and `seeding="torch"`. Losses and accuracies of all '
        f"{num_epochs} epochs were {'equal' if is_equal else 'different'}: after the last one, "
        f"{losses[0][-1]:.4f} and {accuracies[0][-1]:.1f}% with torch's loader, {losses[-1][-1]:.4f} and "
        f"{accuracies[-1][-1]:.1f}% with the cache ([details](../../benchmarks/README.md#accuracy)). "
        f"`{results['command']}` repeats it in a few minutes without a GPU. The script's own "
        '`seeding="sample"` draws different crops, of the same kind.'
    )


def unchanged_classes() -> str:
    """What the import and the caches by file bring classes that nobody changed."""
    results = json.loads((RESULTS / "any_dataset.json").read_text())
    names = ("import only", 'cache="ram"', "cache=lmdb")
    lines = [
        "| speed-up over torch | the import | in RAM | first epoch | on disk | first epoch |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    later, first = {}, {}
    for question in results["questions"]:
        title = question["title"].removesuffix(FIRST)
        ratios = [question["ratios"][f"{name} / torch"]["value"] for name in names]
        (first if question["title"].endswith(FIRST) else later)[title] = ratios
    for title, (only, ram, disk) in later.items():
        if ", v2, " in title:
            continue  # nearly those of v1
        begins = [f"{value:.2g}" for value in first[title][1:]] if title in first else ["", ""]
        lines.append(f"| {title} | {only:.2g} | {ram:.2g} | {begins[0]} | {disk:.2g} | {begins[1]} |")
    machine = results["machine"]
    return (
        f"Two workers, {machine['cores']} cores ({machine['cpu']}), no model; the first epoch fills the "
        "cache ([details](../../benchmarks/README.md#any_dataset)):\n\n" + "\n".join(lines)
    )


def watching() -> str:
    """What `fastload profile` costs, and how exact its predictions are."""
    gains, memory, costs = json.loads((RESULTS / "profile_truth.json").read_text())["questions"]
    ratios = [ratio["value"] for ratio in gains["ratios"].values()]
    sizes = [ratio["value"] for ratio in memory["ratios"].values()]
    figures = [figure for row in costs["rows"].values() for figure in row["figures"]]
    right = sum(share == 1 for share in gains["verdicts"].values())
    busy = "On two cores that other programs kept busy, so that no time repeats itself: " * (
        max(figures) > 1.5
    )
    return (
        f"**How exact, at what cost.** {busy}Of {len(gains['verdicts'])} scripts whose limit is known, the "
        f"verdict was right in {right}. Predicted gains were {min(ratios):.2f} to {max(ratios):.2f} times "
        f"the measured ones, {sum(0.75 <= ratio <= 1.25 for ratio in ratios)} of {len(ratios)} within 25%, "
        f"and the predicted memory {min(sizes):.2f} to {max(sizes):.2f}. Steps under the profile took "
        f"{statistics.median(figures):.2f} times as long ({min(figures):.2f} to {max(figures):.2f}; "
        "[details](../benchmarks/README.md#profile_truth))."
    )


def seeding() -> str:
    """What seeding before each sample costs."""
    results = json.loads((RESULTS / "reproducibility.json").read_text())
    costs_us = [round(ratio["value"]) for ratio in results["questions"][0]["ratios"].values()]
    return (
        f"It costs {spread(costs_us)} microseconds a sample with 0 to 100 transforms "
        "([details](../../benchmarks/README.md#reproducibility))."
    )


def metadata() -> str:
    """The memory of workers that read a list, and that read a SharedList; and what an access costs."""
    results = json.loads((RESULTS / "worker_memory.json").read_text())
    memory, access = results["questions"]
    own = {label: digits(row["median"]) for label, row in memory["rows"].items()}
    costs_us = {label: digits(row["median"]) for label, row in access["rows"].items()}
    return (
        f"With {memory['title'].split(', ', 1)[1]}, each worker had {own['torch, list']} MB of its own with "
        f"torch's loader and {own['fastload, list']} MB with fastload's. With a `SharedList`, it had "
        f"{own['torch, SharedList']} MB and {own['fastload, SharedList']} MB. Reading one of the dicts took "
        f"{costs_us['SharedList']} us instead of {costs_us['list']} us "
        "([details](../../benchmarks/README.md#worker_memory))."
    )


def suite() -> str:
    """What a run of `make test` took, and its slowest tests."""
    path = RESULTS / "suite.json"
    if not path.exists():
        return "No run of the suite has been recorded yet."
    results = json.loads(path.read_text())
    lines = ["| seconds | test |", "|---|---|"]
    lines += [f"| {seconds:.1f} | `{test}` |" for seconds, test in results["slowest"]]
    where = f"{results['machine']['cores']} cores, {results['machine']['cpu']}, load {results['load']}"
    return (
        f"{results['tests']:,} tests took {results['wall_s']} s, {results['cpu_s']} s of processor time and "
        f"{results['forks']:,} forks ({where}; two processes are the tests' own). The ten slowest:\n\n"
        + "\n".join(lines)
    )


def blocks() -> dict[Path, dict[str, str]]:
    """The parts of the documents that lie between comments with their names: page -> name -> text."""
    return {
        ROOT / "README.md": {
            "headline": headline(),
            "peers": peers(),
        },
        ROOT / "CONTRIBUTING.md": {"suite": suite()},
        DOCS / "profile.md": {"profiling": watching()},
        DOCS / "index.md": {"tested": tested()[0]},
        DOCS / "guides" / "caching.md": {"any_dataset": unchanged_classes()},
        DOCS / "guides" / "gpu.md": {"gpu": on_a_gpu()},
        DOCS / "guides" / "multi-gpu.md": {"accuracy": accuracy()},
        DOCS / "guides" / "recipes.md": {"small_images": small_images(), "remote": latencies()},
        DOCS / "guides" / "reproducibility.md": {"seeding": seeding()},
        DOCS / "guides" / "workers.md": {"worker_memory": metadata()},
    }


def main() -> None:
    (ROOT / "benchmarks" / "README.md").write_text(tables().rstrip("\n") + "\n")
    for page, parts in blocks().items():
        text = page.read_text()
        for name, content in parts.items():
            before, rest = text.split(f"<!-- {name} -->\n")
            after = rest.split(f"<!-- /{name} -->")[1]
            text = f"{before}<!-- {name} -->\n{content}\n<!-- /{name} -->{after}"
        page.write_text(text)


if __name__ == "__main__":
    main()
