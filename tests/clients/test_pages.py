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
    "torchdata": "",
    "MONAI": "",
    "PyTorch Geometric": """
from torch_geometric.data import Data

graphs = [Data(x=torch.ones(n % 3 + 1, 2), edge_index=torch.zeros(2, 1, dtype=torch.long)) for n in range(24)]
""",
}
AFTER = dict.fromkeys(["torchdata", "MONAI", "PyTorch Geometric"], SEES_BATCHES)
AFTER["Accelerate"] = SEES_BATCHES + "accelerator.end_training()\n"


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
