"""Clients whose datasets are streams or rows: WebDataset, LitData and Hugging Face datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.clients import contract
from tests.clients.harness import run

if TYPE_CHECKING:
    from pathlib import Path


class TestWebDataset(contract.Batches, contract.Ranks):
    script = """
import webdataset as wds
from torch.utils.data import DataLoader

shards = FOLDER / f"shards-{RANK}"  # each rank writes the same ones
shards.mkdir()
for shard in range(4):
    with wds.TarWriter(str(shards / f"{shard:04d}.tar")) as writer:
        for number in range(shard, NUM_SAMPLES, 4):
            pixels = (255 * image_of(number)).byte().permute(1, 2, 0).numpy()
            writer.write({"__key__": f"{number:06d}", "png": pixels, "cls": number})


def checked(pair):
    check(pair[1])
    return pair


def raised(error):
    raise error


torch.manual_seed(1)
url, options = f"{shards}/{{0000..0003}}.tar", {"shardshuffle": False, "nodesplitter": wds.split_by_node}
samples = wds.WebDataset(url, handler=raised, **options)
samples = samples.decode("torchrgb").to_tuple("png", "cls").map(checked)
with training() as step:
    loader = DataLoader(samples, batch_size=3, num_workers=NUM_WORKERS)
    for epoch in range(num_epochs(2)):
        for images, labels in loader:
            step(images, labels)
"""


class TestWebLoader(contract.Batches):
    """`wds.WebLoader` builds torch's loader by itself; `patch_torch()` exchanges it."""

    script = TestWebDataset.script.replace("torch.utils.data import", "webdataset import WebLoader as")
    ways = ("patch_torch",)


LITDATA = """
from litdata import StreamingDataset
from litdata.streaming.writer import BinaryWriter

writer = BinaryWriter(str(FOLDER / "chunks"), chunk_size=4)
for number in range(NUM_SAMPLES):
    writer[number] = {"image": image_of(number), "label": number}
writer.done()
writer.merge()
dataset = StreamingDataset(str(FOLDER / "chunks"), shuffle=True, seed=1)
"""


class TestLitData(contract.Batches):
    """LitData's loader, which derives from fastload's after `patch_torch()`, and keeps its own iterators."""

    script = f"""{LITDATA}
from litdata import StreamingDataLoader as DataLoader

loader = DataLoader(dataset, batch_size=2, num_workers=NUM_WORKERS)
record("number of batches", len(loader))
for epoch in range(2):
    for batch in loader:
        record("train", [batch["image"], batch["label"]])
"""
    ways = ("patch_torch",)


class TestLitDataInAnotherLoader(contract.Batches):
    """Batches are those of torch's loader; LitData's own tells its dataset the size of batches."""

    script = TestLitData.script.replace("litdata import StreamingDataLoader as", "torch.utils.data import")
    ways = ("fastload",)


def test_litdata_is_not_resumed_in_mid_epoch_by_fastload(tmp_path: Path) -> None:
    """The state of its dataset needs arguments: the error says so, and no sample is lost in silence."""
    script = f"""{LITDATA}
import fastload

loader, fresh = (fastload.DataLoader(dataset, batch_size=2, num_workers=NUM_WORKERS) for _ in range(2))
next(iter(loader))
try:
    fresh.load_state_dict(loader.state_dict())
    next(iter(fresh))
except fastload.errors.ResumeError as error:
    record("error", str(error))
"""
    ended = run(script, tmp_path, "torch", num_workers=2).check()

    (error,) = ended.ranks[0].got("error")
    assert "a state that fastload cannot save or load" in error


class TestHuggingFaceRows(contract.Batches, contract.Ranks):
    script = """
import numpy as np
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

torch.manual_seed(1)
images = np.stack([image_of(number).numpy() for number in range(NUM_SAMPLES)])
rows = Dataset.from_dict({"image": images, "label": list(range(NUM_SAMPLES))}).with_format("torch")


def noisy(batch):
    for number in batch["label"]:
        check(int(number))
    images = [torch.as_tensor(image) + torch.rand(()) for image in batch["image"]]
    return {"image": images, "label": batch["label"]}


with training() as step:
    rows = split_dataset_by_node(rows.with_transform(noisy), RANK, RANKS)
    loader = DataLoader(rows, batch_size=4, shuffle=True, num_workers=NUM_WORKERS)
    record("number of batches", len(loader))
    for epoch in range(num_epochs(2)):
        for batch in loader:
            step(batch["image"], torch.as_tensor(batch["label"]))
"""


class TestHuggingFaceStream(contract.Batches):
    script = TestHuggingFaceRows.script.replace(
        "loader = DataLoader(rows, batch_size=4, shuffle=True, num_workers=NUM_WORKERS)\n"
        '    record("number of batches", len(loader))',
        "rows = rows.with_format(None).to_iterable_dataset(num_shards=4)\n"
        '    rows = rows.map(noisy, batched=True, batch_size=2).with_format("torch")\n'
        "    loader = DataLoader(rows, batch_size=4, num_workers=NUM_WORKERS)",
    )
