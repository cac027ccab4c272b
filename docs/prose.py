"""Find English in the package that a native speaker of the field would write differently.

`python docs/prose.py` prints each place with what to write instead, and exits with 1 if there is one. It
looks through docstrings, comments, messages and names below fastload/, and through the pages.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parents[1]

# Pattern: what to write instead. A space also stands for a line break in a paragraph, a comment or a message.
PATTERNS = {
    r"so that": "so",
    r"in the place of": "instead of",
    r"at each (access|batch|call|edit|epoch|read)": "on every ..., every time",
    r"the way back": "how to undo it",
    r"of (yours|your own)": "your ...",
    r"of the user's(?! \w)": "the user's ...",
    r"none of the (forms|values) above": "is invalid",
    r"follows? from": "depends on, is derived from",
    r"(an)?other \w+ than": "different ... from, ... other than",
    r"(another (number|order) of|of another (class|kind|length|type))": "a different ...",
    r"the (most|least) (?!recent|common|likely|important|expensive)\w+": "maximum, minimum",
    r"_?(most|least)_(?!recent)\w+": "max_..., min_... (in names)",
    r"may": "can; might for what is uncertain; must for a prohibition",
    r"(refus(e|es|ed|ing)|refusals?)": "rejects, denies, does not allow",
    r"not (opened|used|read) for longest": "least recently used",
    r"(lost )?on (its|their|the) way (to|from|back)": "in transit",
    r"go(es)? on with": "continues with",
    r"lives? on": "stays alive",
    r"dealt anew": "repartitioned",
    r"looks? after": "manages",
    r"owe[sd]? (\w+ )?batch(es)?": "with batches outstanding",
    r"(on|in) another (error|moment|order)": "a different ...",
    r"give another": "use a different ...",
    r"at (the|its|their) first (access|call|touch|use)": "on first use",
    r"for (want of|ever)": "without, forever",
    r"in vain": "wasted, forever",
}
# What matches a pattern and stays, as (end of the file's path, matched text in lower case).
ALLOWED: set[tuple[str, str]] = set()

_GAP = r"(?:\s(?:[\s#>]|[\"'] *\n *f?[\"'])*)"


class Finding(NamedTuple):
    """A place in a file, the text there and what to write instead."""

    path: Path
    line: int
    text: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text!r}: {self.instead}"


def findings_in(path: Path, text: str) -> Iterator[Finding]:
    """The places of one file, by pattern."""
    for pattern, instead in PATTERNS.items():
        for match in re.finditer(rf"(?<![\w']){pattern.replace(' ', _GAP)}\b", text, re.IGNORECASE):
            words = re.sub(_GAP, " ", match[0])
            if not any(str(path).endswith(end) and words.lower() == allowed for end, allowed in ALLOWED):
                yield Finding(path, text.count("\n", 0, match.start()) + 1, words, instead)


def findings(paths: Iterable[Path]) -> list[Finding]:
    """The places of all files."""
    return [found for path in paths for found in findings_in(path, path.read_text(encoding="utf-8"))]


def checked_files(package: Path = ROOT / "fastload") -> list[Path]:
    """The files that have to be free of findings."""
    return sorted(package.rglob("*.py"))


def main() -> None:
    """Print all findings."""
    found = findings(map(Path, sys.argv[1:]) if sys.argv[1:] else checked_files())
    sys.stdout.writelines(f"{finding}\n" for finding in found)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
