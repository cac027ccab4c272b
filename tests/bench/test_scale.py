"""Claims of benchmarks/scale.py: its arithmetic, and that its results file is up to date."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import scale

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU_S = ("whole_s", "region_s", "region_from_ram_s", "hit_s")
STORE_S = ("ram_store_s_per_byte", "lmdb_store_s_per_byte", "lmdb_read_s_per_byte")
BANDWIDTHS = ("network_bytes_per_s", "store_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s")
NO_COST = dict.fromkeys((*CPU_S, *STORE_S, "latency_s"), 0.0)
FAST = dict.fromkeys((*BANDWIDTHS, "consumer_images_per_s"), math.inf)


def ideal(**changed: Any) -> Any:
    """A cluster on which nothing takes time but what is changed; images of 100 kB, and 1 MB when decoded."""
    kept = {"images": "made up", "encoded_bytes": 1e5, "decoded_bytes": 1e6, "cores": 10.0}
    rooms = {"ram_bytes": math.inf, "disk_bytes": math.inf, "epochs_per_partition": 5, "epochs": 11}
    return scale.Constants(**(kept | NO_COST | FAST | rooms | changed))


factors = st.floats(1, 1e3)
designs = st.sampled_from(scale.DESIGNS)
nodes = st.integers(1, 200)
sizes = st.floats(1e7, 1e14)
RANGES: dict[str, tuple[float, float]] = (
    dict.fromkeys(CPU_S, (1e-3, 1e3))
    | dict.fromkeys(STORE_S, (0, 1e-8))
    | dict.fromkeys(("ram_bytes", "disk_bytes"), (1e9, 1e16))
    | dict.fromkeys(("disk_read_bytes_per_s", "disk_write_bytes_per_s"), (1e7, 1e11))
    | {"encoded_bytes": (1e3, 1e7), "decoded_bytes": (1e4, 1e8), "cores": (1, 500), "ram_share": (0.1, 1)}
    | {"network_bytes_per_s": (1e6, 1e11), "store_bytes_per_s": (1e7, 1e13), "latency_s": (0, 1)}
    | {"requests_in_flight": (1, 1e4), "images_per_request": (1, 1e3), "consumer_images_per_s": (1, 1e6)}
)
clusters = st.builds(
    scale.Constants,
    images=st.just("made up"),
    epochs_per_partition=st.integers(1, 20),
    epochs=st.integers(1, 200),
    **{name: st.floats(*ends) for name, ends in RANGES.items()},
)


def at_most(one: float, other: float) -> bool:
    """Up to roundings."""
    return one <= other * (1 + 1e-9)


DISK = {"disk_read_bytes_per_s": 1e9, "ram_bytes": 0.2e12, "ram_share": 1.0}
LATENCY = {"latency_s": 0.1, "requests_in_flight": 100.0}
PARTITION = {"epochs_per_partition": 4}
CORES = PARTITION | {"whole_s": 0.004, "region_s": 0.003, "region_from_ram_s": 0.002, "hit_s": 0.001}
CORES |= {"ram_store_s_per_byte": 1e-9, "lmdb_store_s_per_byte": 2e-9, "lmdb_read_s_per_byte": 1e-9}
LIMITS: list[tuple[dict[str, Any], str, float, str, float, str]] = [
    # GPUs for 1,000 images a second in each node: 250 s.
    *(({"consumer_images_per_s": 1e3}, design, 250, "GPU", 250, "GPU") for design in scale.DESIGNS),
    ({"network_bytes_per_s": 1e9}, scale.NO_CACHE, 25, "network", 25, "network"),  # 25 GB into each node
    ({"store_bytes_per_s": 1e9}, scale.NO_CACHE, 100, "object store", 100, "object store"),  # 100 GB into all
    (LATENCY, scale.NO_CACHE, 250, "latency", 250, "latency"),  # 1,000 requests/s
    ({**LATENCY, "images_per_request": 10.0}, scale.NO_CACHE, 25, "latency", 25, "latency"),
    ({"region_s": 0.02}, scale.NO_CACHE, 500, "decoding", 500, "decoding"),  # ten cores: 500 images/s
    # A node reads a fourth of a million images of 1 MB; RAM for a fifth of the set saves a fifth.
    (DISK, scale.LMDB, 200, "disk", 200, "disk"),
    # Each node writes the whole set at 1 GB/s for 1,000 s, and then trains on its fourth for 250 s.
    ({"disk_write_bytes_per_s": 1e9, "consumer_images_per_s": 1e3}, scale.LMDB, 1250, "disk", 250, "GPU"),
    # Of 5 epochs a partition, every fifth brings 25 GB, as the first one does.
    ({"network_bytes_per_s": 1e9}, scale.DECODED, 25, "network", 5, "network"),
    # A millisecond an image is 25 s for a share, 100 s for all.
    (CORES, scale.NO_CACHE, 75, "decoding", 75, "decoding"),  # 3 ms an image: regions
    # 4 + 1 ms: whole images are decoded and stored. Every 4th epoch is a partition.
    (CORES, scale.DECODED, 125, "decoding", (125 + 3 * 25) / 4, "decoding"),
    (CORES, scale.LMDB, 600 + 50, "decoding", 50, "cropping"),  # 4 + 2 ms for each of all, then 1 + 1 ms
    (CORES, scale.ENCODED_WHOLE, 10 + 50, "decoding", 50, "decoding"),  # 0.1 ms for each of all, then 2 ms
    (CORES, scale.ENCODED, 77.5, "decoding", (77.5 + 3 * 50) / 4, "decoding"),  # 3 + 0.1 ms, then 2 ms
]


@pytest.mark.parametrize(("changed", "design", "first_s", "first_limit", "later_s", "later_limit"), LIMITS)
def test_what_each_resource_takes(
    changed: dict[str, Any], design: str, first_s: float, first_limit: str, later_s: float, later_limit: str
) -> None:
    """A million images of 100 kB on 4 nodes of ten cores: the seconds by hand."""
    outcome = scale.simulate(ideal(**changed), design, 1e11, 4)
    assert (outcome.first_limit, outcome.later_limit) == (first_limit, later_limit)
    assert outcome.first_s == pytest.approx(first_s)
    assert outcome.later_s == pytest.approx(later_s)


def test_what_is_too_small() -> None:
    """Of 1 TB, two nodes keep a half each in RAM; the whole set is on each disk, on however many nodes."""
    for room, limit in ((0.51e12, "GPU"), (0.4e12, "does not fit: RAM")):
        outcome = scale.simulate(ideal(ram_bytes=room, ram_share=1.0), scale.DECODED, 1e11, 2)
        assert outcome.ram_bytes == pytest.approx(0.5e12)
        assert outcome.first_limit == outcome.later_limit == limit
        assert math.isinf(outcome.first_s) == limit.startswith("does not fit")
    for num_nodes in (1, 8):
        outcome = scale.simulate(ideal(disk_bytes=0.9e12), scale.LMDB, 1e11, num_nodes)
        assert (outcome.disk_bytes, outcome.later_limit) == (1e12, "does not fit: disk")


@given(clusters, designs, nodes, st.floats(0.5, 0.999), st.floats(1.001, 2))
def test_the_largest_set_that_fits(c: Any, design: str, num_nodes: int, below: float, above: float) -> None:
    """A set slightly below the largest fits, and one slightly above does not."""
    largest = scale.largest_bytes(c, design, num_nodes)
    if math.isinf(largest):
        assert design == scale.NO_CACHE
        return
    assert math.isfinite(scale.simulate(c, design, below * largest, num_nodes).later_s)
    assert math.isinf(scale.simulate(c, design, above * largest, num_nodes).later_s)


HELPS = (
    *BANDWIDTHS,
    *("cores", "ram_bytes", "disk_bytes", "requests_in_flight", "images_per_request"),
    *("consumer_images_per_s", "latency_s", "size"),
)


@given(clusters, designs, sizes, nodes, st.sampled_from(HELPS), factors)
def test_more_of_a_resource_is_never_slower(
    c: Any, design: str, size: float, num_nodes: int, name: str, factor: float
) -> None:
    """More bandwidth, RAM, cores, less latency, or fewer images: no epoch takes longer."""
    before = scale.simulate(c, design, size * (factor if name == "size" else 1), num_nodes)
    if name != "size":
        changed = getattr(c, name) * factor if name != "latency_s" else c.latency_s / factor
        c = dataclasses.replace(c, **{name: changed})
    after = scale.simulate(c, design, size, num_nodes)
    assert at_most(after.first_s, before.first_s)
    assert at_most(after.later_s, before.later_s)


@given(clusters, designs, sizes, nodes)
def test_what_moves_over_the_network(c: Any, design: str, size: float, num_nodes: int) -> None:
    """Without a cache, the set in each epoch; with parts, in each partition; whole sets, once per node."""
    outcome = scale.simulate(c, design, size, num_nodes)
    first, later = outcome.first_network_bytes, outcome.later_network_bytes
    if design in (scale.LMDB, scale.ENCODED_WHOLE):
        assert outcome.total_network_bytes(c.epochs, num_nodes) == pytest.approx(num_nodes * size)
        return
    expected = size
    if design in scale.PARTITIONED:
        expected = size / c.epochs_per_partition if num_nodes > 1 else 0
    assert num_nodes * first == pytest.approx(size)
    assert num_nodes * later == pytest.approx(expected, rel=1e-9, abs=1e-3)
    assert outcome.total_network_bytes(7, num_nodes) == pytest.approx(num_nodes * (first + 6 * later))


def test_crossing_points_by_hand() -> None:
    """On four nodes decoded parts are best up to 400 GB, encoded parts up to 4 TB, then no cache."""
    # A node keeps a fourth: 1 TB of RAM holds the parts of 4 TB of files, or of 400 GB that are decoded.
    # LMDB fits up to 200 GB, and brings the whole set to each node. Above 400 GB all designs decode in each
    # epoch, ten times as long as the network takes: so encoded parts are as fast as no cache, and move less.
    rooms = {"ram_bytes": 1e12, "ram_share": 1.0, "disk_bytes": 2e12, "network_bytes_per_s": 1e9}
    found = scale.ranges(
        ideal(**rooms, region_s=0.01, region_from_ram_s=0.01, epochs_per_partition=1_000_000), 4
    )
    assert [design for _, design in found] == [scale.DECODED, scale.ENCODED, scale.NO_CACHE]
    assert [limit for limit, _ in found] == pytest.approx([400e9, 4e12, 1e14], rel=1e-3)


def test_results_file_is_what_the_measurements_give() -> None:
    """From the measurements. After new ones run: python benchmarks/scale.py --save, then figures.py."""
    saved = json.loads((BENCHMARKS / "results" / "scale.json").read_text())
    kinds = {kind: scale.constants(kind) for kind in scale.KINDS}
    assert scale.results(kinds) == saved
    fields = dataclasses.fields(scale.Constants)
    assert set(scale.ASSUMED) == {one.name for one in fields if one.default is not dataclasses.MISSING}
    assert all(unit and source for unit, source in scale.ASSUMED.values())
