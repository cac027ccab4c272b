"""README snippets and examples run, and say what they say they say."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# Those of one page. `train.py` has tests of its own; `pictures.py` is what the others read.
LONG_ONES = {"train"}
EXAMPLES = sorted(
    path
    for path in (ROOT / "examples").glob("*.py")
    if path.stem != "pictures" and path.stem.split("_")[0] not in LONG_ONES
)


def _run(script: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(script)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
def test_readme_snippets_run_as_one_script_and_print_what_the_readme_shows(tmp_path: Path) -> None:
    """All Python blocks of the README, in order, are one program whose output is the README's."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    shown = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))

    done = _run(script, tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(shown)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_holds_its_own_claim(example: Path, tmp_path: Path) -> None:
    """Each example asserts its claim itself, says it in its last line, and ends with exit code 0."""
    done = _run(example, tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_a_page(example: Path) -> None:
    """Each example but train.py is shorter than 80 lines."""
    assert len(example.read_text().splitlines()) < 80


def test_every_figure_comes_from_a_results_file() -> None:
    """benchmarks/figures.py writes benchmarks/README.md and two places of the README; they are up to date."""
    spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)

    assert figures.headline() in README
    assert figures.peers() in README
    assert figures.tables().strip() == (ROOT / "benchmarks" / "README.md").read_text().strip()


def test_readme_never_offers_a_strangers_package() -> None:
    """The name fastload on the package index is not ours: only fastload-torch is ever installed."""
    assert not re.search(r"pip install .?fastload(?!-torch)", README)
