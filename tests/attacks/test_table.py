"""The table of attacks names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_attack_names_a_test_that_exists() -> None:
    """Each row says what must happen, and which test holds it."""
    text = (ROOT / "tests" / "attacks" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| (?!attack )\w", line)]
    assert len(rows) >= 24
    for row in rows:
        _, _, answer, held_by, _ = row.split("|")
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", held_by)
        assert answer.strip(), row
        assert named, row
        for file, name in named:
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)
