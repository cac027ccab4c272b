"""How long an epoch takes on 1, 8 and 64 nodes, by arithmetic: which design fits which amount of data?

This is a model on paper. No cluster was measured. It takes what one machine was measured to do (rates of
decoding and of cropping cached images, bytes of an image, the cost of storing a byte; each with the results
file and the field that it comes from) and what a cluster is assumed to have (`Constants`), and computes for
each design and for 10 GB to 100 TB of JPEGs the time of the first epoch, the mean time of later epochs, the
bytes over the network, and the resource that limits the rate.

The designs:

* no cache: in each epoch every node reads its share from the object store, and decodes the crops.
* decoded, RAM: every node trains on its own part for `epochs_per_partition` epochs, and keeps the decoded
  images of this part in RAM. Then the dataset is repartitioned, and the cache starts empty.
* decoded, LMDB: every node first builds an LMDB file of the whole set on its own disk, and trains from it.
* encoded, RAM, whole set: every node first reads all files into RAM, and decodes the crops in each epoch.
* encoded, RAM: as "decoded, RAM", with files instead of decoded images.

Held out: see docs/sizing.md. The parts of an epoch overlap entirely, so an epoch takes as long as its
slowest resource; nodes are equal.

Command: python benchmarks/scale.py [--save] [--set latency_s=0.005 ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NO_CACHE, DECODED, LMDB = "no cache", "decoded, RAM", "decoded, LMDB on disk"
ENCODED_WHOLE, ENCODED = "encoded, RAM, whole set", "encoded, RAM"
DESIGNS = (NO_CACHE, DECODED, LMDB, ENCODED_WHOLE, ENCODED)
PARTITIONED = (DECODED, ENCODED)
NUM_NODES = (1, 8, 64)
SIZES_BYTES = (1e10, 1e11, 1e12, 1e13, 1e14)
ALIKE = 0.01  # designs whose times differ by less are equally fast


@dataclass(frozen=True)
class Constants:
    """What the model computes with. Times of the CPU are those of one core.

    Attributes:
        images: The kind of images, in words.
        encoded_bytes: Of one image.
        decoded_bytes: Of one image.
        whole_s: CPU time to read, decode and crop an image.
        region_s: The same, if only the region of the crop is decoded.
        region_from_ram_s: The same, from a file that is in RAM.
        hit_s: CPU time to crop a decoded image in RAM.
        ram_store_s_per_byte: CPU time to store a byte in RAM.
        lmdb_store_s_per_byte: CPU time to store a byte in an LMDB file.
        lmdb_read_s_per_byte: CPU time that reading a byte from LMDB takes beyond reading it from RAM.
        cores: Of a node.
        ram_bytes: Of a node.
        ram_share: The part of the RAM that a cache, or the page cache, can take.
        disk_bytes: Size of a node's own disk.
        disk_read_bytes_per_s: Of a node's own disk.
        disk_write_bytes_per_s: Of a node's own disk.
        network_bytes_per_s: From the object store to one node.
        store_bytes_per_s: From the object store to all nodes together.
        latency_s: Of a request to the object store.
        requests_in_flight: Of a node at one time.
        images_per_request: 1 if each image is a file; more if requests read shards.
        consumer_images_per_s: That the GPUs of a node train on.
        epochs_per_partition: Epochs until the dataset is repartitioned.
        epochs: Of a training run.
    """

    images: str
    encoded_bytes: float
    decoded_bytes: float
    whole_s: float
    region_s: float
    region_from_ram_s: float
    hit_s: float
    ram_store_s_per_byte: float
    lmdb_store_s_per_byte: float
    lmdb_read_s_per_byte: float
    cores: float = 96
    ram_bytes: float = 1152 * 2**30
    ram_share: float = 0.8
    disk_bytes: float = 8e12
    disk_read_bytes_per_s: float = 16e9
    disk_write_bytes_per_s: float = 8e9
    network_bytes_per_s: float = 25e9 / 8
    store_bytes_per_s: float = 100e9
    latency_s: float = 0.1
    requests_in_flight: float = 64 * 96
    images_per_request: float = 1
    consumer_images_per_s: float = 16_621
    epochs_per_partition: int = 5
    epochs: int = 90


# Where the defaults of `Constants` come from: parameter -> (unit, source).
ASSUMED = {
    "cores": ("CPUs a node", "assumed: an AWS p4d.24xlarge has 96 vCPUs"),
    "ram_bytes": ("bytes a node", "assumed: an AWS p4d.24xlarge has 1,152 GiB"),
    "ram_share": ("of the RAM", '`max_memory="auto"`'),
    "disk_bytes": ("bytes a node", "assumed: an AWS p4d.24xlarge has eight disks of 1 TB"),
    "disk_read_bytes_per_s": ("bytes/s a node", "assumed: eight NVMe disks of 2 GB/s"),
    "disk_write_bytes_per_s": ("bytes/s a node", "assumed: half the rate of reading"),
    "network_bytes_per_s": ("bytes/s a node", "assumed: 25 Gbit/s"),
    "store_bytes_per_s": ("bytes/s, all nodes", "assumed"),
    "latency_s": ("s a request", "the guidelines of Amazon S3 name 100 to 200 ms for small objects"),
    "requests_in_flight": (
        "requests a node",
        "assumed: a worker for each CPU; `ImageFolder` keeps 64 requests in flight in each",
    ),
    "images_per_request": ("images", "assumed: each image is a file"),
    "consumer_images_per_s": (
        "images/s a node",
        "NVIDIA DeepLearningExamples, ResNet-50 v1.5 for PyTorch: eight A100, mixed precision",
    ),
    "epochs_per_partition": ("epochs", "assumed"),
    "epochs": ("epochs", "the same recipe of NVIDIA"),
}


# --- the model -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a design takes, in seconds and in bytes.

    Attributes:
        first_s: The first epoch, with what must be done before it; infinite if the data do not fit.
        first_limit: The resource that the first epoch takes longest for.
        later_s: The mean of the later epochs; infinite if the data do not fit.
        later_limit: The resource that takes most of the time of later epochs.
        first_network_bytes: Into each node in the first epoch and before it.
        later_network_bytes: Into each node in a mean later epoch.
        ram_bytes: That a node needs for its cache.
        disk_bytes: That a node needs on its disk.
    """

    first_s: float
    first_limit: str
    later_s: float
    later_limit: str
    first_network_bytes: float
    later_network_bytes: float
    ram_bytes: float
    disk_bytes: float

    def total_s(self, epochs: int) -> float:
        """Seconds of a run of so many epochs."""
        return self.first_s + (epochs - 1) * self.later_s

    def total_network_bytes(self, epochs: int, num_nodes: int) -> float:
        """Bytes over the network in such a run, into all nodes."""
        return num_nodes * (self.first_network_bytes + (epochs - 1) * self.later_network_bytes)


def slowest(
    c: Constants,
    num_nodes: int,
    *,
    trained: float = 0,
    fetched: float = 0,
    cpu_s: float = 0,
    cpu: str = "decoding",
    disk_read_bytes: float = 0,
    disk_write_bytes: float = 0,
) -> tuple[float, str]:
    """Seconds of work that overlaps, and the resource that needs them; all numbers are those of one node.

    Args:
        c: The constants.
        num_nodes: That do the same at the same time.
        trained: Images that the GPUs train on.
        fetched: Images that come from the object store.
        cpu_s: Seconds of one core.
        cpu: What the cores do.
        disk_read_bytes: From the node's disk.
        disk_write_bytes: To the node's disk.
    """
    fetched_bytes = fetched * c.encoded_bytes
    times_s = {
        "GPU": trained / c.consumer_images_per_s,
        cpu: cpu_s / c.cores,
        "network": fetched_bytes / c.network_bytes_per_s,
        "object store": num_nodes * fetched_bytes / c.store_bytes_per_s,
        "latency": fetched / c.images_per_request * c.latency_s / c.requests_in_flight,
        "disk": disk_read_bytes / c.disk_read_bytes_per_s + disk_write_bytes / c.disk_write_bytes_per_s,
    }
    limit = max(times_s, key=lambda name: times_s[name])  # the first of several, so the GPU wins a draw
    return times_s[limit], limit


def simulate(c: Constants, design: str, data_bytes: float, num_nodes: int) -> Outcome:
    """What a design takes for so many bytes of JPEGs, on so many nodes."""
    images = data_bytes / c.encoded_bytes
    share = images / num_nodes  # that a node trains on in an epoch
    epoch = functools.partial(slowest, c, num_nodes, trained=share)
    max_bytes = c.ram_share * c.ram_bytes
    ram_bytes = disk_bytes = later_fetched = 0.0
    first_fetched = share
    before = (0.0, "")  # seconds and limit of the work that precedes the first epoch
    if design == NO_CACHE:
        later_fetched = share
        first = later = epoch(fetched=share, cpu_s=share * c.region_s)
    elif design in PARTITIONED:
        if design == DECODED:
            stored_bytes = c.decoded_bytes
            read_s, decode_s, cpu = c.hit_s, c.whole_s, "cropping"
        else:
            stored_bytes = c.encoded_bytes
            read_s, decode_s, cpu = c.region_from_ram_s, c.region_s, "decoding"
        miss_s = decode_s + stored_bytes * c.ram_store_s_per_byte
        ram_bytes = stored_bytes * share
        first = epoch(fetched=share, cpu_s=share * miss_s)
        others = later = epoch(cpu_s=share * read_s, cpu=cpu)
        if num_nodes > 1:  # with every partition the cache starts empty
            later_fetched = share / c.epochs_per_partition
            later = mean(first, others, c.epochs_per_partition)
    elif design == LMDB:
        first_fetched = images
        disk_bytes = images * c.decoded_bytes
        build_s = c.whole_s + c.decoded_bytes * c.lmdb_store_s_per_byte
        before = slowest(c, num_nodes, fetched=images, cpu_s=images * build_s, disk_write_bytes=disk_bytes)
        missed = max(0.0, 1 - max_bytes / disk_bytes)  # by the page cache
        read_s = c.hit_s + c.decoded_bytes * c.lmdb_read_s_per_byte
        first = later = epoch(
            cpu_s=share * read_s, cpu="cropping", disk_read_bytes=missed * share * c.decoded_bytes
        )
    elif design == ENCODED_WHOLE:
        first_fetched = images
        ram_bytes = data_bytes
        store_s = c.encoded_bytes * c.ram_store_s_per_byte
        before = slowest(c, num_nodes, fetched=images, cpu_s=images * store_s, cpu="storing")
        first = later = epoch(cpu_s=share * c.region_from_ram_s)
    else:
        raise ValueError(f"there is no design {design!r}: expected one of {', '.join(DESIGNS)}")
    first = (before[0] + first[0], max(before, first)[1])
    for place, needed_bytes, limit_bytes in (
        ("RAM", ram_bytes, max_bytes),
        ("disk", disk_bytes, c.disk_bytes),
    ):
        if needed_bytes > limit_bytes:
            first = later = (math.inf, f"does not fit: {place}")
    network_bytes = (first_fetched * c.encoded_bytes, later_fetched * c.encoded_bytes)
    return Outcome(*first, *later, *network_bytes, ram_bytes, disk_bytes)


def mean(partition: tuple[float, str], others: tuple[float, str], epochs: int) -> tuple[float, str]:
    """The mean of the epochs of one partition, and the resource that takes most of this time."""
    deal_s, others_s = partition[0], (epochs - 1) * others[0]
    return (deal_s + others_s) / epochs, partition[1] if deal_s > others_s else others[1]


# --- which design is best --------------------------------------------------------------------------------


def designs(num_nodes: int) -> tuple[str, ...]:
    """The designs that differ: on one node, a node's part is the whole set."""
    return tuple(d for d in DESIGNS if num_nodes > 1 or d != ENCODED_WHOLE)


def label(design: str, num_nodes: int) -> str:
    """The design, as tables call it."""
    return f"{design}, a part per node" if design in PARTITIONED and num_nodes > 1 else design


def best(c: Constants, data_bytes: float, num_nodes: int) -> str:
    """The design of the shortest run.

    Of equally fast ones, the one with the fewest bytes over the network; then the first in `DESIGNS`, where
    decoded images come before encoded ones.
    """
    found = {d: simulate(c, d, data_bytes, num_nodes) for d in designs(num_nodes)}
    shortest_s = min(outcome.total_s(c.epochs) for outcome in found.values())
    fast = [d for d, outcome in found.items() if outcome.total_s(c.epochs) <= (1 + ALIKE) * shortest_s]
    return min(fast, key=lambda d: found[d].total_network_bytes(c.epochs, num_nodes))


def largest_bytes(c: Constants, design: str, num_nodes: int) -> float:
    """The largest set of JPEGs that fits, in bytes; infinite without a cache."""
    decoded_per_encoded = c.decoded_bytes / c.encoded_bytes
    ram_bytes = c.ram_share * c.ram_bytes
    return {
        NO_CACHE: math.inf,
        DECODED: num_nodes * ram_bytes / decoded_per_encoded,
        LMDB: c.disk_bytes / decoded_per_encoded,
        ENCODED_WHOLE: ram_bytes,
        ENCODED: num_nodes * ram_bytes,
    }[design]


def rates(c: Constants) -> dict[str, float]:
    """Images a second that each resource of one node allows, if all others are infinitely fast."""
    return {
        "GPU": c.consumer_images_per_s,
        "cropping, decoded image in RAM": c.cores / c.hit_s,
        "decoding of crops": c.cores / c.region_s,
        "decoding of whole images": c.cores / c.whole_s,
        "network": c.network_bytes_per_s / c.encoded_bytes,
        "object store, if 64 nodes share it": c.store_bytes_per_s / 64 / c.encoded_bytes,
        "latency": c.requests_in_flight * c.images_per_request / c.latency_s if c.latency_s else math.inf,
        "disk, decoded images": c.disk_read_bytes_per_s / c.decoded_bytes,
    }


def ranges(c: Constants, num_nodes: int) -> list[tuple[float, str]]:
    """The best design from the smallest to the largest size: (up to so many bytes, design)."""
    steps_per_decade = 100
    count = round(math.log10(SIZES_BYTES[-1] / SIZES_BYTES[0]) * steps_per_decade)
    sizes = [SIZES_BYTES[0] * 10 ** (step / steps_per_decade) for step in range(count)] + [SIZES_BYTES[-1]]
    found: list[tuple[float, str]] = []
    before, design = sizes[0], best(c, sizes[0], num_nodes)
    for size in sizes[1:]:
        if best(c, size, num_nodes) != design:
            low, high = before, size
            while high / low > 1.0001:
                middle = math.sqrt(low * high)
                if best(c, middle, num_nodes) == design:
                    low = middle
                else:
                    high = middle
            found.append((low, design))
            design = best(c, size, num_nodes)
        before = size
    return [*found, (sizes[-1], design)]


# --- constants from the results files --------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """A figure in a results file.

    Attributes:
        file: The name of the file, without its ending.
        title: How the question's title begins; it is the first such question.
        row: The label of the row.
        run: The place in the row's `figures`, or None for the median.
    """

    file: str
    title: str
    row: str
    run: int | None = None

    def value(self) -> float:
        """The figure, in the question's unit."""
        questions = json.loads((RESULTS / f"{self.file}.json").read_text())["questions"]
        row = next(q for q in questions if q["title"].startswith(self.title))["rows"][self.row]
        return float(row["median"] if self.run is None else row["figures"][self.run])

    def __str__(self) -> str:
        place = "median" if self.run is None else f"figures[{self.run}]"
        return f"{self.file}.json, {self.title!r}, {self.row!r}, {place}"


MEASURED_CORES = 2  # of the machine of all these results, with as many workers
EPOCH_IMAGES = 2_000  # of first_epoch.json
LMDB_ROW_BYTES = 224 * 224 * 3  # of the question about reading in lmdb.json
KINDS = {"500 x 375": "500 x 375 JPEGs", "2048 x 1536": "2048 x 1536 JPEGs"}


def measured(kind: str) -> dict[str, tuple[float, str, str]]:
    """The measured constants of a kind of images: name -> (value, unit, source)."""
    decode = functools.partial(Field, "decode", f"{kind} JPEGs of")
    memory = functools.partial(Field, "decode", f"Memory of the caches of {kind}")
    filling = functools.partial(Field, "first_epoch", "2,000 photos, decoded and cropped, memory as it comes")
    build = functools.partial(Field, "lmdb", "raw LMDB of 2,000 JPEG photos, 500 x 375")
    rows = functools.partial(Field, "lmdb", "224 x 224 x 3 uint8 from caches")
    small_bytes = Field("decode", "Memory of the caches of 500 x 375", 'cache="ram"').value() * 1e3
    found: dict[str, tuple[float, str, str]] = {}
    for name, field in (
        ("encoded_bytes", memory('cache="ram-encoded"')),
        ("decoded_bytes", memory('cache="ram"')),
    ):
        found[name] = (field.value() * 1e3, "bytes an image", str(field))
    for name, field in (
        ("whole_s", decode("whole images, Pillow")),
        ("region_s", decode('decode="exact"')),
        ("region_from_ram_s", decode('cache="ram-encoded", decode="exact"')),
        ("hit_s", Field("cached", f"{kind} images in RAM", 'cache="ram", decoded')),
    ):
        found[name] = (
            MEASURED_CORES / field.value(),
            "s of a core, for an image",
            f"{MEASURED_CORES} / {field}",
        )
    stored, not_stored = filling("cached, all at once", 0), filling("fastload, import only", 0)
    value = MEASURED_CORES * (stored.value() - not_stored.value()) / EPOCH_IMAGES / small_bytes
    source = f"({stored}) - ({not_stored}), for {EPOCH_IMAGES:,} images of {small_bytes:,.0f} bytes"
    found["ram_store_s_per_byte"] = (value, "s of a core, for a byte", source)
    built, alone = build("build, 2 workers"), build("decoding alone, one core")
    value = (MEASURED_CORES / built.value() - 1 / alone.value()) / small_bytes
    source = f"{MEASURED_CORES} / ({built}) - 1 / ({alone}), for {small_bytes:,.0f} bytes"
    found["lmdb_store_s_per_byte"] = (value, "s of a core, for a byte", source)
    on_disk, in_ram = rows("fastload over LMDB, 2 workers"), rows("fastload over RAM, 2 workers")
    value = MEASURED_CORES * (1 / on_disk.value() - 1 / in_ram.value()) / LMDB_ROW_BYTES
    source = f"{MEASURED_CORES} / ({on_disk}) - {MEASURED_CORES} / ({in_ram}), for {LMDB_ROW_BYTES:,} bytes"
    found["lmdb_read_s_per_byte"] = (value, "s of a core, for a byte", source)
    return found


def constants(kind: str) -> Constants:
    """The measured constants of a kind of images, and the defaults of all others."""
    return Constants(images=KINDS[kind], **{name: value for name, (value, _, _) in measured(kind).items()})


# --- results and table -----------------------------------------------------------------------------------


def rounded(value: float) -> float | None:
    """Six digits, so the file is the same on all machines; None if it is infinite."""
    return None if math.isinf(value) else float(f"{value:.6g}")


def answer(c: Constants) -> dict[str, Any]:
    """The best designs and all cells for a kind of images, as plain data."""
    best_ranges, cells = {}, []
    for num_nodes in NUM_NODES:
        best_ranges[str(num_nodes)] = [
            {"up_to_bytes": rounded(limit), "design": label(design, num_nodes)}
            for limit, design in ranges(c, num_nodes)
        ]
        for data_bytes in SIZES_BYTES:
            for design in designs(num_nodes):
                outcome = simulate(c, design, data_bytes, num_nodes)
                plain = {
                    name: value if isinstance(value, str) else rounded(value)
                    for name, value in dataclasses.asdict(outcome).items()
                }
                head = {"num_nodes": num_nodes, "data_bytes": data_bytes, "design": label(design, num_nodes)}
                cells.append(head | plain)
    return {
        "title": c.images,
        "rates": {name: rounded(rate) for name, rate in rates(c).items()},
        "largest_bytes": {
            str(num_nodes): {
                label(design, num_nodes): rounded(largest_bytes(c, design, num_nodes))
                for design in designs(num_nodes)
            }
            for num_nodes in NUM_NODES
        },
        "best": best_ranges,
        "cells": cells,
    }


def results(kinds: dict[str, Constants]) -> dict[str, Any]:
    """The content of the results file."""
    first = next(iter(kinds.values()))
    return {
        "command": "python benchmarks/scale.py --save",
        "measured": {
            kind: {
                name: {"value": rounded(value), "unit": unit, "source": source}
                for name, (value, unit, source) in measured(kind).items()
            }
            for kind in kinds
        },
        "parameters": {
            name: {"value": getattr(first, name), "unit": unit, "source": source}
            for name, (unit, source) in ASSUMED.items()
        },
        "questions": [answer(c) for c in kinds.values()],
    }


def size_name(nbytes: float) -> str:
    """A size in words, with three digits at most."""
    unit, divisor = ("TB", 1e12) if nbytes >= 0.9995e12 else ("GB", 1e9)
    return f"{float(f'{nbytes / divisor:.3g}'):,g} {unit}"


def show(kinds: dict[str, Constants]) -> None:
    """Print the best designs."""
    for c in kinds.values():
        print(c.images)
        for num_nodes in NUM_NODES:
            print(f"  {num_nodes} node{'s' if num_nodes > 1 else ''}")
            for limit_bytes, design in ranges(c, num_nodes):
                outcome = simulate(c, design, limit_bytes, num_nodes)
                print(
                    f"    up to {size_name(limit_bytes):>8}: {label(design, num_nodes):<35} "
                    f"{outcome.later_s:,.0f} s a later epoch ({outcome.later_limit})"
                )


def overrides(words: list[str]) -> dict[str, float]:
    """Parameters from NAME=VALUE."""
    found: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in ASSUMED:
            raise SystemExit(f"--set {word}: expected NAME=VALUE with one of {', '.join(ASSUMED)}")
        try:
            found[name] = int(value) if name in ("epochs", "epochs_per_partition") else float(value)
        except ValueError:
            raise SystemExit(f"--set {word}: expected a number, got {value!r}") from None
        if not (found[name] > 0 or (found[name] == 0 and name == "latency_s")):
            raise SystemExit(f"--set {word}: expected a number above 0")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="other parameters")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/scale.json")
    args = parser.parse_args()
    if args.save and args.set:
        parser.error("--save writes the results of the default parameters: leave --set away")
    kinds = {kind: dataclasses.replace(constants(kind), **overrides(args.set)) for kind in KINDS}
    show(kinds)
    if args.save:
        (RESULTS / "scale.json").write_text(json.dumps(results(kinds), indent=1) + "\n")


if __name__ == "__main__":
    main()
