"""The README's table of figures, from the results files: so that none is typed by hand.

Command: python benchmarks/figures.py   (rewrites the section "Figures" of README.md in place)
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHOWN = {
    "throughput": "Ratios of medians of interleaved runs, each side at its best worker count of 0, 1 and 2:",
    "never_slower": (
        "Time of torch's loader / time of ours, only the import changed, samples that cost their dataset "
        "nothing; above 1 is faster:"
    ),
    "training": "Steps a second of a small model on the same two cores; ratios to torch's loader:",
    "peers": (
        "Other loaders as their documentation advises, two workers each, the best of a loader's rows; ratios "
        "of images a second, above 1 is faster:"
    ),
    "sharing": "Memory is the sum of PSS, in which a page that n processes map counts 1/n in each:",
    "lmdb": "LMDB through the page cache, every record read once before:",
    "workers": "Worker threads against worker processes, each at its best of 1 and 2; above 1 is faster:",
    "reproducibility": "What is added to a sample, and how long a resumed loader takes to its next batch:",
    "startup": "Time from `iter(loader)` to the first batch with two workers; below 1 is faster:",
}


def table() -> str:
    """The section's text."""
    lines: list[str] = []
    for name in SHOWN:
        results = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        machine = results["machine"]
        gpu = machine["gpu"] or "no GPU"
        header = (
            f"`{results['command']}` on {machine['cores']} cores ({machine['cpu']}), {gpu}, "
            f"torch {machine['torch']}, Python {machine['python']}. {SHOWN[name]}"
        )
        lines += [
            header,
            "",
            "| question | comparison | figure |",
            "|---|---|---|",
        ]
        for question in results["questions"]:
            for label, ratio in question["ratios"].items():
                unit = ratio.get("unit", "x")
                space = "" if unit == "x" else " "
                lines.append(f"| {question['title']} | {label} | {ratio['value']:.2f}{space}{unit} |")
            for label, reason in question.get("cannot", {}).items():
                lines.append(f"| {question['title']} | {label} | cannot: {reason} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    section = f"## Figures\n\n{table()}\n"
    if "<!-- figures -->" in text:
        text = text.replace("<!-- figures -->\n\n", section)
    else:
        text = re.sub(
            r"## Figures\n.*?(?=\n## )", lambda _: section.rstrip("\n") + "\n", text, flags=re.DOTALL
        )
    readme.write_text(text)


if __name__ == "__main__":
    main()
