"""The address of the repository. To be filled before a release: then run `python docs/address.py`.

It writes the address into README.md, pyproject.toml and CITATION.cff; mkdocs takes it from here. A test fails
if one of them has another one. Without an address they have none.
"""

from __future__ import annotations

from pathlib import Path

ADDRESS = ""  # such as "https://github.com/OWNER/fastload"

ROOT = Path(__file__).resolve().parents[1]
# By file: the line that comes before the address, and the lines with it.
PLACES = {
    "README.md": ("# fastload\n", "\n[Repository]({address})\n"),
    "pyproject.toml": ("[project.urls]\n", 'Repository = "{address}"\n'),
    "CITATION.cff": ("type: software\n", 'repository-code: "{address}"\n'),
}


def written(name: str, text: str, old: str, new: str) -> str:
    """The text of a file with a new address in place of an old one; each can be empty."""
    before, line = PLACES[name]
    start, found, rest = text.partition(before)
    if not found:
        raise ValueError(f"{name} has no line {before!r}, which comes before the address")
    rest = rest.removeprefix(line.format(address=old) if old else "")
    return start + before + (line.format(address=new) if new else "") + rest


def address_in(name: str) -> str:
    """The address that a file has now."""
    before, line = PLACES[name]
    start, end = line.split("{address}")
    rest = (ROOT / name).read_text().partition(before)[2]
    return rest.removeprefix(start).partition(end)[0] if rest.startswith(start) else ""


if __name__ == "__main__":
    for name in PLACES:
        path = ROOT / name
        path.write_text(written(name, path.read_text(), address_in(name), ADDRESS))
