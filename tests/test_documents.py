"""README snippets and examples run, and say what they say they say."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from tests.kit.processes import AS_A_SCRIPT

if TYPE_CHECKING:
    from tests.kit.processes import Interpreter

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# Those of one page. `train.py` has tests of its own; `pictures.py` is what the others read.
LONG_ONES = {"train"}
ALL_EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
EXAMPLES = [
    path for path in ALL_EXAMPLES if path.stem != "pictures" and path.stem.split("_")[0] not in LONG_ONES
]
# The last lines that each example prints, as a regular expression, and the package that it needs.
LAST_LINES = {
    "ddp": r"rank 0: .*; 24 of 24 images are cached\n"
    r"rank 1: .*; 24 of 24 images are cached\n"
    r"2 ranks ended with equal weights",
    "detection": r"24 of 24 images kept all of their boxes, in order and in size",
    "huggingface_datasets": r"datasets \S+: 24 of 24 rows are cached",
    "iterable": r"0 workers: 24 of 24 images came once, short batches: 1\n"
    r"1 workers: 24 of 24 images came once, short batches: 1\n"
    r"2 workers: 24 of 24 images came once, short batches: 2",
    "lightning_module": r"lightning \S+: 6 steps, validation accuracy \d+%",
    "lmdb_cache": r"24 of 24 images in the file are equal to the decoded ones",
    "mixup_cutmix": r"([1-9]|1\d|2[0-4]) of 24 images have a label of two classes\n"
    r"the same seed gives the same mixed labels",
    "prefetch": r"3 of 3 batches on (cpu|cuda) are equal",
    "quickstart": r"epoch 2: loss \d\.\d{3}\n24 of 24 images are cached: no later epoch decodes them",
    "ram_cache": r"the second process found 24 of 24 images in memory",
    "segmentation": r"24 of 24 masks lie on their images after crops, flips and turns",
    "two_views": r"24 of 24 images have two different views",
    "webdataset_shards": r"webdataset \S+: 24 of 24 images came once in an epoch",
}
PACKAGES = {
    "huggingface_datasets": "datasets",
    "lightning_module": "lightning",
    "webdataset_shards": "webdataset",
}


@pytest.mark.slow
def test_readme_snippets_run_as_one_script_and_print_what_the_readme_shows(
    tmp_path: Path, ready_interpreter: Interpreter
) -> None:
    """All Python blocks, in order, are one program over a folder of images; its output is the README's."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    shown = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    for number in range(64):
        path = tmp_path / "photos" / "train" / f"class {number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (96, 72), (number, 0, 0)).save(path)
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))

    done = ready_interpreter.run(AS_A_SCRIPT, str(script), cwd=tmp_path, limit_s=100)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(shown)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_ends_with_what_it_shows(
    example: Path, tmp_path: Path, ready_interpreter: Interpreter
) -> None:
    """Each example trains on the drawn photographs, and its last lines are those of the table above."""
    done = ready_interpreter.run(AS_A_SCRIPT, str(example), cwd=tmp_path, limit_s=100)

    assert done.returncode == 0, done.stderr
    assert re.search(rf"(?:^|\n){LAST_LINES[example.stem]}\n$", done.stdout), done.stdout


@pytest.mark.parametrize("name", PACKAGES)
def test_example_without_its_package_names_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example whose package is missing ends with one line, which has the command that installs it."""
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)  # makes the import fail
    monkeypatch.syspath_prepend(ROOT / "examples")
    with pytest.raises(SystemExit, match=rf"^This example needs .*: pip install {PACKAGES[name]}$"):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_a_template_first(example: Path) -> None:
    """Each example is about a page, and its checks come behind the training loop, below one comment."""
    text = example.read_text()
    template, found, rest = text.partition("\n# --- The template ends here. ")

    assert found
    assert len(text.splitlines()) < 120
    assert "    for " in template or "trainer.fit(" in template
    assert "assert " not in template
    assert "print(f" in rest


def test_every_example_is_in_the_list() -> None:
    """examples/README.md names each file, and test cases exist for exactly those of one page."""
    listed = (ROOT / "examples" / "README.md").read_text()

    assert [path.name for path in ALL_EXAMPLES if path.name not in listed] == []
    assert sorted(LAST_LINES) == [path.stem for path in EXAMPLES]


def test_every_figure_comes_from_a_results_file() -> None:
    """benchmarks/figures.py writes benchmarks/README.md and parts of other pages; they are up to date."""
    spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)

    for page, parts in figures.blocks().items():
        for name, content in parts.items():
            assert f"<!-- {name} -->\n{content}\n<!-- /{name} -->" in page.read_text()
    assert figures.tables().strip() == (ROOT / "benchmarks" / "README.md").read_text().strip()
