"""With one pipeline, the numbers that are drawn stay those of earlier releases."""

from __future__ import annotations

import pytest

from tests.rng.recorded_zoo import WAYS, digest

# What two epochs draw: without workers, with one, with two, with two that persist, and in two threads.
RECORDED = {
    "crop, worker": "658d26ec 658d26ec 5be57fbd 183a8788 5be57fbd",
    "crop, sample": "8414f0fd 8414f0fd 8414f0fd 760419fa 8414f0fd",
    "single transform, worker": "cb0eb961 cb0eb961 32d7d91b a48be479 32d7d91b",
    "single transform, sample": "89f3d8fb 89f3d8fb 89f3d8fb 829852ab 89f3d8fb",
    "seed, worker": "28d5b26a 28d5b26a be7a43bd b6fb7d24 be7a43bd",
    "seed, sample": "ec2a0794 ec2a0794 ec2a0794 b0ad73e4 ec2a0794",
    "nested, worker": "e3c4192f e3c4192f ae55c059 9afab9fe ae55c059",
    "nested, sample": "bdf885c7 bdf885c7 bdf885c7 a9febb6c bdf885c7",
    "replay, worker": "92809273 92809273 d3883120 ab5d1c21 d3883120",
    "replay, sample": "bbe28c0d bbe28c0d bbe28c0d 820d9e42 bbe28c0d",
    "stream, worker": "d1357c42 d1357c42 f2af4ae5 c01b80c4",
    "collate_fn, worker": "9ccfea2b 9ccfea2b c17acf29 e138fff5 c17acf29",
    "collate_fn, sample": "b45d004f b45d004f b45d004f d9a6fe87 b45d004f",
    "cached, worker": "4e4cef6d 4e4cef6d 4b0e096e 3a296de1 4b0e096e",
    "cached, sample": "8c9cb7e9 8c9cb7e9 8c9cb7e9 53daadb7 8c9cb7e9",
    "encoded, worker": "4917bb1b 4917bb1b fd0a05df 0116e504 fd0a05df",
    "encoded, sample": "ab2d2ed2 ab2d2ed2 ab2d2ed2 f50bd75d ab2d2ed2",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_one_pipeline_draws_what_it_drew(name: str) -> None:
    """Of every shape, wherever samples are read."""
    kind, seeding = name.rsplit(", ", 1)
    ways = list(WAYS)[: len(RECORDED[name].split())]

    assert " ".join(digest(kind, way, seeding) for way in ways) == RECORDED[name]
