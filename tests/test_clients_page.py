"""The table of docs/howto/clients.md names the releases that `make test-clients` installs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINS = ROOT / "tests" / "clients" / "requirements"
PAGE = ROOT / "docs" / "howto" / "clients.md"


def _pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def test_the_table_names_each_client_with_its_pinned_release() -> None:
    """A row for each client, and no other row."""
    clients = (PINS / "shared.txt").read_text().split("# The clients.\n")[1].partition("#")[0]
    pinned = _pins(clients) | {
        "albumentationsx": _pins((PINS / "albumentationsx.txt").read_text())["albumentationsx"]
    }
    rows = dict(re.findall(r"^\| \[[^]]+\]\([^)]+\) \| ([\w-]+) ([\d.]+) \|", PAGE.read_text(), re.MULTILINE))

    assert rows == pinned


def test_each_requirement_is_pinned() -> None:
    """A run of the clients' tests is the same on any day, and the Makefile makes each environment."""
    makefile = (ROOT / "Makefile").read_text()
    for path in PINS.glob("*.txt"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
        assert (
            path.name in makefile
            or f"{path.stem}" in makefile.split("CLIENTS_ENVIRONMENTS := ")[1].splitlines()[0]
        )


def test_albumentationsx_is_no_dependency() -> None:
    """Its licence is the AGPL: only an environment of its own has it."""
    assert "albumentationsx==" not in (ROOT / "pyproject.toml").read_text().lower()
    assert "albumentationsx==" not in (PINS / "shared.txt").read_text().lower()
