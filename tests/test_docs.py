"""Pages of docs/ and CONTRIBUTING.md: their code runs and prints what they show, their links lead to files.

The Python blocks of a page are one script, in order, in a folder where `photos/` holds a folder of images for
each class. The ```text blocks of the page are what the script prints. A block below the comment
`<!-- not run: REASON -->` is only compiled. `make docs` checks anchors and the site itself.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch.utils.data as tud
from PIL import Image

import fastload
from tests.kit.processes import AS_A_SCRIPT

if TYPE_CHECKING:
    from tests.kit.processes import Interpreter

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = Path(fastload.__file__).parent
PAGES = sorted(DOCS.rglob("*.md"))
ALL = [*PAGES, ROOT / "CONTRIBUTING.md"]
FENCE = re.compile(
    r"(?:^<!-- (not run: [^\n]+) -->\n+)?^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# What torchrun sets for a single process; port 0 is any free one.
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
OF_RANKS = ("ranks", "several-nodes")
# Runs `python -m fastload`. Epochs of a benchmark are repeated for as long as a figure needs, not a command.
COMMAND = """
import runpy
from fastload.bench import measure
measure.LATER_S = 0.01
runpy.run_module("fastload", run_name="__main__", alter_sys=True)
"""


class Block(NamedTuple):
    """A fenced block of a page."""

    note: str
    language: str
    text: str


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix("")).removeprefix("docs/")


def _blocks(page: Path) -> list[Block]:
    return [Block(*match) for match in FENCE.findall(page.read_text())]


def _script(page: Path) -> str:
    return "\n".join(block.text for block in _blocks(page) if block.language == "python" and not block.note)


def _without_code(page: Path) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))


WITH_CODE = [page for page in ALL if _script(page)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with `photos/`, in which two classes have twenty JPEGs each."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(0, 256, (72, 96, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.jpg")
    return tmp_path


def _registry(folder: Path) -> dict[str, str]:
    """A registry of shared caches that no other test uses."""
    return {"FASTLOAD_RUNTIME_DIR": str(folder / "runtime")}


def _hugging_face(folder: Path) -> dict[str, str]:
    """A folder for the files of Hugging Face datasets, which then ask no server."""
    return {"HF_HOME": str(folder / "huggingface"), "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=_name)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(
    page: Path, folder: Path, ready_interpreter: Interpreter
) -> None:
    """All Python blocks of the page, in order, are one program."""
    (folder / "page.py").write_text(_script(page))

    done = ready_interpreter.run(
        AS_A_SCRIPT,
        str(folder / "page.py"),
        cwd=folder,
        environment={
            **_registry(folder),
            **_hugging_face(folder),
            **(ONE_RANK if page.stem in OF_RANKS else {}),
        },
        limit_s=100,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(block.text for block in _blocks(page) if block.language == "text")


@pytest.mark.parametrize("page", ALL, ids=_name)
def test_code_that_is_not_run_compiles(page: Path) -> None:
    """What needs a package that is not installed here is Python at least, and its page says what it needs."""
    for number, block in enumerate(_blocks(page)):
        if block.note:
            assert block.language == "python"
            compile(block.text, f"{page.name}, block {number}", "exec")


@pytest.mark.slow
def test_the_commands_of_the_command_line_page_succeed(folder: Path, ready_interpreter: Interpreter) -> None:
    """Each `$ fastload ...`, in order, in one folder."""
    (folder / "my_data.py").write_text(
        "import fastload\ntrain_set = fastload.ImageFolder('photos', size=32)\n"
        "def random_part(sample): return sample[0][:, ::-1].copy(), sample[1]\n"
    )
    shown = [
        block.text for block in _blocks(DOCS / "howto" / "command-line.md") if block.language == "console"
    ]
    commands = re.findall(r"^\$ fastload ([^#\n]*)", "".join(shown), re.MULTILINE)

    assert len(commands) >= 6
    for command in commands:
        done = ready_interpreter.run(
            COMMAND, *shlex.split(command), cwd=folder, environment=_registry(folder), limit_s=100
        )
        assert done.returncode == 0, (command, done.stderr)


@pytest.mark.parametrize("page", ALL, ids=_name)
def test_relative_links_lead_to_files(page: Path) -> None:
    """Every link of a page is a file of the repository, an anchor, or an address."""
    links = [link for link in LINK.findall(_without_code(page)) if not re.match(r"#|\w+:", link)]
    paths = [os.path.relpath(page.parent / link.partition("#")[0], ROOT) for link in links]
    # The package itself may be installed elsewhere.
    missing = [
        path
        for path in paths
        if not ((PACKAGE.parent if path.startswith("fastload/") else ROOT) / path).exists()
    ]

    assert missing == []


def test_every_error_has_a_section() -> None:
    """The page of errors has a heading for each exception class of fastload.errors, and for no other."""
    classes = {
        name
        for name, value in vars(fastload.errors).items()
        if inspect.isclass(value) and issubclass(value, fastload.FastloadError)
    }
    headings = re.findall(r"^### `?(\w+Error)`?", (DOCS / "errors.md").read_text(), re.MULTILINE)

    assert sorted(headings) == sorted(classes)


def test_every_public_name_is_in_the_reference() -> None:
    """The API page has each name of the package once."""
    names = re.findall(r"^::: fastload\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)

    assert sorted(names) == fastload.__all__


def test_the_table_of_torchs_arguments_is_complete() -> None:
    """A row for each argument of torch's loader, in torch's order, with torch's default."""
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", (DOCS / "api.md").read_text(), re.MULTILINE)
    parameters = list(inspect.signature(tud.DataLoader.__init__).parameters.values())[1:]

    assert rows == [
        (one.name, "required" if one.default is inspect.Parameter.empty else repr(one.default))
        for one in parameters
    ]


@pytest.mark.parametrize("page", ALL, ids=_name)
def test_a_page_never_offers_a_strangers_package(page: Path) -> None:
    """The name fastload on the package index is not ours: only fastload-torch is ever installed."""
    assert not re.search(r"pip install .?fastload(?!-torch)", page.read_text())
