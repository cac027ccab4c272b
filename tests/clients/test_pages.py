"""The blocks of docs/ that need a client run in the client's environment."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.clients.harness import ROOT, run

if TYPE_CHECKING:
    from pathlib import Path

PAGE = ROOT / "docs" / "guides" / "frameworks.md"
# Other blocks of the page run in tests/test_docs.py.
BLOCK = re.compile(r"^<!-- not run: needs [^\n]+ -->\n+```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What the blocks of the page take for granted.
COMMON = """
import fastload

dataset, model = Photos(), Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""
SEES_BATCHES = """
record("batches", len([record("batch", batch) for batch in loader]))
"""
# By heading: what comes before the block; and what comes after it. Each records batches.
BEFORE = {
    "Accelerate": """
photos(64, 64, 16)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64 * 64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
""",
    "Trainer of transformers": """
import transformers

dataset, model = Rows(), Classifier()
arguments = transformers.TrainingArguments(
    str(FOLDER / "out"),
    use_cpu=True, num_train_epochs=1, remove_unused_columns=False, report_to=[], save_strategy="no"
)
""",
    "torchdata": "",
    "timm": "import timm.data\ndataset = timm.data.ImageDataset(str(photos(40, 48, 16)))\n",
    "ignite": """
from ignite.engine import Engine


def step(engine, batch):
    record("batch", batch)
""",
    "MONAI": "",
    "skorch": "from skorch import NeuralNetClassifier\n",
    "fastai": """
from fastai.callback import progress
from fastai.data.core import DataLoaders
from fastai.learner import Learner
""",
    "torchmetrics and kornia": """
import kornia.augmentation as K
from torchmetrics.classification import MulticlassAccuracy

accuracy, augment = MulticlassAccuracy(24), K.RandomHorizontalFlip(p=0.5)
""",
    "PyTorch Geometric": """
from torch_geometric.data import Data

graphs = [Data(x=torch.ones(n % 3 + 1, 2), edge_index=torch.zeros(2, 1, dtype=torch.long)) for n in range(24)]
""",
    "LitData": """
import litdata
from litdata.streaming.writer import BinaryWriter

writer = BinaryWriter("chunks", chunk_size=4)
for number in range(24):
    writer[number] = {"label": number}
writer.done()
writer.merge()
""",
}
AFTER = dict.fromkeys(["torchdata", "timm", "MONAI", "PyTorch Geometric", "LitData"], SEES_BATCHES)
AFTER["Accelerate"] = SEES_BATCHES + "accelerator.end_training()\n"
AFTER["fastai"] = "with learner.no_bar(), learner.no_logging():\n    learner.fit(1, 0.05)\n"


def _blocks(heading: str) -> str:
    """The blocks below a heading of the page that need its client."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return "\n".join(BLOCK.findall(section))


@pytest.mark.parametrize("heading", BEFORE)
def test_the_block_of_a_client_runs(heading: str, tmp_path: Path) -> None:
    """The lines that a user writes give batches, through fastload's loader alone."""
    block = _blocks(heading).replace("accelerator = Accelerator()", "accelerator = Accelerator(cpu=True)")
    assert block, heading
    ended = run(COMMON + BEFORE[heading] + block + AFTER.get(heading, ""), tmp_path, "torch").check()

    assert ended.named() != [[]]
    assert ended.ranks[0].got("epochs of torch") == [0]
    assert ended.ranks[0].got("epochs of fastload") != [0]
