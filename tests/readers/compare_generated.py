"""Compare batches of random datasets through torch's loader, ours, and ours with `cache="ram"`, bit for bit.

    FASTLOAD_VERIFY=1 python -m tests.readers.compare_generated --batches 10000 [--seed 0]

Prints the recipe of each dataset that differs, and what was compared at the end; exits with 1 if any did.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastload
from fastload.augmentation import torchvision_end
from fastload.readers import identity, patches
from tests.readers.generated import ByBatch, Generated, Stream, draw_recipe, write_files

EPOCHS, BATCH = 3, 4
STATEFUL = {"memo", "counted", "opened before"}  # forms whose samples depend on those before in a worker
START_METHODS = [None] * 30 + ["fork"] * 28 + ["spawn"] * 2  # a spawned worker imports for seconds


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def batches(loader_class: Any, dataset: Any, method: str | None, seed: int, cache: dict[str, Any]) -> Any:
    """All batches of a few epochs, and what the cache did."""
    workers = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": True}
    is_stream = isinstance(dataset, Stream)
    random.seed(seed)
    np.random.seed(seed)
    generator = torch.Generator().manual_seed(seed)
    loader = loader_class(
        *(dataset, BATCH, None if is_stream else True),
        **(workers if method else {}),
        generator=generator,
        collate_fn=list,
        **cache,
    )
    epochs = []
    for epoch in range(EPOCHS):
        torch.manual_seed(seed + epoch)
        epochs.append(list(loader))
    stats = loader.stats() if cache else None
    if loader_class is fastload.DataLoader:
        loader.close()
    return epochs, stats


def compare(seed: int, folder: Path) -> Counter[str]:
    """Compare the loaders of a random dataset; what was compared, and what differed."""
    rng = random.Random(seed)
    write_files(folder, rng)
    method = rng.choice(START_METHODS)
    recipe = draw_recipe(rng)
    kind = rng.choice([Generated, Generated, ByBatch, Stream])

    def make() -> Any:
        return Stream(Generated(recipe, folder)) if kind is Stream else kind(recipe, folder)

    time.sleep(2.2 if method == "spawn" else 0)  # such workers know nothing of a shorter wait
    counts: Counter[str] = Counter()
    plain, _ = batches(fastload.DataLoader, make(), method, seed, {})
    remembered, stats = batches(fastload.DataLoader, make(), method, seed, {"cache": "ram"})
    counts["batches"] = sum(map(len, remembered))
    counts["hits"] = int(getattr(stats, "cache_hits", 0) or 0)
    counts[f"datasets by {method}"] = 1
    if remembered != plain:
        counts["WRONG"] += 1
        say(f"WRONG: seed {seed}, {method}, {kind.__name__}, {recipe}")
    is_seeded = recipe.transform != "albumentations" and recipe.form not in STATEFUL
    if is_seeded:
        expected, _ = batches(torch.utils.data.DataLoader, make(), method, seed, {})
        counts["compared with torch"] = 1
        if expected != plain:
            counts["unlike torch"] += 1
            say(f"unlike torch without a cache, too: seed {seed}, {method}, {kind.__name__}, {recipe}")
    return counts


def main() -> int:
    """See above."""
    patches.meet()  # before datasets hold functions, which would then be left alone
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    identity.SETTLED_S = 0
    torchvision_end._MIN_PIXELS = 0
    counts: Counter[str] = Counter()
    seed = arguments.seed
    while counts["batches"] < arguments.batches:
        with tempfile.TemporaryDirectory() as folder:
            counts += compare(seed, Path(folder))
        seed += 1
        if seed % 20 == 0:
            say(f"seed {seed}: {dict(counts)}")
    say(f"{seed - arguments.seed} datasets from seed {arguments.seed}: {dict(counts)}")
    return int(counts["WRONG"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
