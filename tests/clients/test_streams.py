"""Clients whose datasets are streams or rows: WebDataset, LitData and Hugging Face datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tests.clients import contract
from tests.clients.harness import run

if TYPE_CHECKING:
    from pathlib import Path

WEBDATASET = """
import random
import torch
import torch.distributed as dist
import webdataset as wds
from torch.utils.data import DataLoader

from tests.clients.in_rank import FOLDER, NUM_SAMPLES, NUM_WORKERS, RANKS, Model
from tests.clients.in_rank import check, image_of, num_epochs, rank

shards = FOLDER / f"shards-{rank()}"  # each rank writes the same ones
shards.mkdir()
for shard in range(4):
    with wds.TarWriter(str(shards / f"{shard:04d}.tar")) as writer:
        for number in range(shard, NUM_SAMPLES, 4):
            pixels = (255 * image_of(number)).byte().permute(1, 2, 0).numpy()
            writer.write({"__key__": f"{number:06d}", "png": pixels, "cls": number})
torch.manual_seed(1)
model = Model()
if RANKS > 1:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)


def checked(pair):
    image, label = pair
    check(label)
    return image, label


def raised(error):
    raise error


samples = (
    wds.WebDataset(
        f"{shards}/{{0000..0003}}.tar", shardshuffle=False, nodesplitter=wds.split_by_node, handler=raised
    )
    .decode("torchrgb")
    .to_tuple("png", "cls")
    .map(checked)
)
loader = DataLoader(samples, batch_size=3, num_workers=NUM_WORKERS)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(num_epochs(2)):
    for images, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
if RANKS > 1:
    dist.destroy_process_group()
"""


class TestWebDataset(contract.Batches, contract.Ranks):
    script = WEBDATASET


class TestWebLoader(contract.Batches):
    """`wds.WebLoader` builds torch's loader by itself; `patch_torch()` exchanges it."""

    script = WEBDATASET.replace(
        "from torch.utils.data import DataLoader", "from webdataset import WebLoader as DataLoader"
    )
    ways = ("patch_torch",)


LITDATA = """
import sys
import torch
from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming.writer import BinaryWriter

from tests.clients.in_rank import FOLDER, NUM_SAMPLES, NUM_WORKERS, check, image_of, record

NUM_BEFORE_STOP = 3
what, state = (sys.argv[1:] + ["train", None])[:2]
writer = BinaryWriter(str(FOLDER / "chunks"), chunk_size=4)
for number in range(NUM_SAMPLES):
    writer[number] = {"image": image_of(number), "label": number}
writer.done()
writer.merge()


class Samples(StreamingDataset):
    def __getitem__(self, index):
        row = super().__getitem__(index)
        check(row["label"])
        return row


dataset = Samples(str(FOLDER / "chunks"), shuffle=True, seed=1)
loader = StreamingDataLoader(dataset, batch_size=2, num_workers=NUM_WORKERS)
record("number of batches", len(loader))
if what == "resume":
    loader.load_state_dict(torch.load(f"{state}.pt", weights_only=False))
for epoch in range(1 if what != "train" else 2):
    for number, batch in enumerate(loader, 1):
        record("train", [batch["image"], batch["label"]])
        if what == "stop" and number == NUM_BEFORE_STOP:
            torch.save(loader.state_dict(), f"{state}.pt")
            break
"""


OF_LITDATA = "from litdata import StreamingDataLoader, StreamingDataset\n"
OF_TORCH = (
    "from litdata import StreamingDataset\nfrom torch.utils.data import DataLoader as StreamingDataLoader\n"
)
OF_FASTLOAD = "from litdata import StreamingDataset\nfrom fastload import DataLoader as StreamingDataLoader\n"


class TestLitData(contract.Batches):
    """LitData's loader, which derives from fastload's after `patch_torch()`, and keeps its own iterators."""

    script = LITDATA
    ways = ("patch_torch",)


class TestLitDataInAnotherLoader(contract.Batches):
    """Batches are those of torch's loader; LitData's own tells its dataset the size of batches."""

    script = LITDATA.replace(OF_LITDATA, OF_TORCH)
    replacements: ClassVar[dict[str, str]] = {OF_TORCH: OF_FASTLOAD}
    ways = ("fastload",)


def test_litdata_is_not_resumed_in_mid_epoch_by_fastload(tmp_path: Path) -> None:
    """The state of its dataset needs arguments: the error says so, and no sample is lost in silence."""
    script = (
        LITDATA.partition("loader = ")[0]
        + """
import fastload

loader = fastload.DataLoader(dataset, batch_size=2, num_workers=NUM_WORKERS)
next(iter(loader))
try:
    fresh = fastload.DataLoader(dataset, batch_size=2, num_workers=NUM_WORKERS)
    fresh.load_state_dict(loader.state_dict())
    next(iter(fresh))
except fastload.errors.ResumeError as error:
    record("error", str(error))
"""
    )
    ended = run(script, tmp_path, "torch", num_workers=2).check_end()

    (error,) = ended.ranks[0].got("error")
    assert "a state that fastload cannot save or load" in error


ROWS = """
import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from tests.clients.in_rank import NUM_SAMPLES, NUM_WORKERS, RANKS, Model
from tests.clients.in_rank import check, image_of, num_epochs, rank, record

torch.manual_seed(1)
images = np.stack([image_of(number).numpy() for number in range(NUM_SAMPLES)])
rows = Dataset.from_dict({"image": images, "label": list(range(NUM_SAMPLES))}).with_format("torch")


def noisy(batch):
    for number in batch["label"]:
        check(int(number))
    images = [torch.as_tensor(image) + torch.rand(()) for image in batch["image"]]
    return {"image": images, "label": batch["label"]}


rows = rows.with_transform(noisy)
model = Model()
if RANKS > 1:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    rows = split_dataset_by_node(rows, rank(), RANKS)
loader = DataLoader(rows, batch_size=4, shuffle=True, num_workers=NUM_WORKERS)
record("number of batches", len(loader))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(num_epochs(2)):
    for batch in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch["image"]), torch.as_tensor(batch["label"])).backward()
        optimizer.step()
if RANKS > 1:
    dist.destroy_process_group()
"""


class TestHuggingFaceRows(contract.Batches, contract.Ranks):
    script = ROWS


STREAMED_ROWS = ROWS.replace(
    "loader = DataLoader(rows, batch_size=4, shuffle=True, num_workers=NUM_WORKERS)\n"
    'record("number of batches", len(loader))',
    "rows = rows.with_format(None).to_iterable_dataset(num_shards=4).map(noisy, batched=True, batch_size=2)"
    '.with_format("torch")\n'
    "loader = DataLoader(rows, batch_size=4, num_workers=NUM_WORKERS)",
)


class TestHuggingFaceStream(contract.Batches):
    script = STREAMED_ROWS
