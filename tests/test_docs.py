"""Pages of docs/ and CONTRIBUTING.md: their code runs and prints what they show, their links lead to files.

The Python blocks of a page are one script, in order, in a folder where `photos/` holds a folder of images for
each class. The ```text blocks of the page are what the script prints. A block below the comment
`<!-- not run: REASON -->` is only compiled. `make docs` checks anchors and the site itself.
"""

from __future__ import annotations

import inspect
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch.utils.data as tud
from PIL import Image

import fastload
from docs import address, signatures
from tests.kit.processes import AS_A_SCRIPT

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess

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
OF_RANKS = ("multi-gpu",)
# Runs `python -m fastload`. Epochs of a benchmark are repeated for as long as a figure needs, not a command.
COMMAND = """
import runpy
from fastload.bench import run
run.LATER_S = 0.01
runpy.run_module("fastload", run_name="__main__", alter_sys=True)
"""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix("")).removeprefix("docs/")


def _blocks(page: Path) -> list[tuple[str, str, str]]:
    """The fenced blocks of a page: why each is not run, its language, and its text."""
    return FENCE.findall(page.read_text())


def _script(page: Path) -> str:
    return "\n".join(text for note, language, text in _blocks(page) if language == "python" and not note)


def _shown(page: Path, shown: str = "text") -> str:
    return "".join(text for _, language, text in _blocks(page) if language == shown)


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


@pytest.fixture
def run(folder: Path, ready_interpreter: Interpreter) -> Callable[..., CompletedProcess[str]]:
    """Runs a program in the folder, with a registry of caches of its own; Hugging Face asks no server."""
    environment = {"FASTLOAD_RUNTIME_DIR": f"{folder}/runtime", "HF_HOME": f"{folder}/huggingface"}
    environment["HF_HUB_OFFLINE"] = "1"

    def run(*words: str, program: str = AS_A_SCRIPT, **more: str) -> CompletedProcess[str]:
        return ready_interpreter.run(
            program, *words, cwd=folder, environment={**environment, **more}, limit_s=100, exits=False
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=_name)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(page: Path, folder: Path, run: Any) -> None:
    """All Python blocks of the page, in order, are one program."""
    (folder / "page.py").write_text(_script(page))
    done = run("page.py", **(ONE_RANK if page.stem in OF_RANKS else {}))
    assert done.returncode == 0, done.stderr
    assert done.stdout == _shown(page)


@pytest.mark.slow
def test_the_recipe_with_checkpoints_goes_on_after_a_kill(folder: Path, run: Any) -> None:
    """Killed in the middle of its first epoch, the script continues there, and ends as the page shows."""
    page = DOCS / "guides" / "multi-gpu.md"
    script, checkpoint = _script(page), "                save(epoch)\n"
    (folder / "killed.py").write_text(
        script.replace(checkpoint, f"{checkpoint}                os._exit(9)\n")
    )
    (folder / "train.py").write_text(
        script.replace("optimizer.step()", "optimizer.step(); steps = globals().get('steps', 0) + 1", 1)
        .replace("def main():", "def main():\n    global steps", 1)
        .replace('print(f"trained', "print(steps, 'steps'); print(f\"trained", 1)
    )
    killed = run("killed.py", **ONE_RANK)
    assert killed.returncode == 9, killed.stderr
    done = run("train.py", **ONE_RANK)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "11 steps\n" + _shown(page)  # of 15, four were trained before


def test_code_that_is_not_run_compiles() -> None:
    """What needs a package that is not installed here is Python at least, and its page says what it needs."""
    for page in ALL:
        for text in (text for note, language, text in _blocks(page) if note and language == "python"):
            compile(text, page.name, "exec")
        assert all(language == "python" for note, language, _ in _blocks(page) if note), page


@pytest.mark.slow
def test_the_commands_of_the_command_line_page_succeed(folder: Path, run: Any) -> None:
    """Each `$ fastload ...`, in order, in one folder."""
    (folder / "my_data.py").write_text(
        "import fastload\ntrain_set = fastload.ImageFolder('photos', size=32)\n"
        "def random_part(sample): return sample[0][:, ::-1].copy(), sample[1]\n"
    )
    shown = _shown(DOCS / "command-line.md", "console")
    commands = re.findall(r"^\$ fastload ([^#\n]*)", shown, re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        done = run(*shlex.split(command), program=COMMAND)
        assert done.returncode == 0, (command, done.stderr)


def test_relative_links_lead_to_files() -> None:
    """Every link of a page is a file of the repository, an anchor, or an address."""
    for page in ALL:
        for link in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))):
            path = os.path.relpath(page.parent / link.partition("#")[0], ROOT)
            root = PACKAGE.parent if path.startswith("fastload/") else ROOT  # it may be installed elsewhere
            assert re.match(r"#|\w+:", link) or (root / path).exists(), (page, link)


def _errors() -> list[str]:
    kinds = {name: one for name, one in vars(fastload.errors).items() if inspect.isclass(one)}
    return sorted(name for name, kind in kinds.items() if issubclass(kind, fastload.FastloadError))


def _arguments() -> list[tuple[str, str]]:
    parameters = list(inspect.signature(tud.DataLoader.__init__).parameters.values())[1:]
    empty = inspect.Parameter.empty
    return [(one.name, "required" if one.default is empty else repr(one.default)) for one in parameters]


def _own_arguments() -> list[str]:
    theirs = inspect.signature(tud.DataLoader.__init__).parameters
    return sorted(set(inspect.signature(fastload.DataLoader.__init__).parameters) - set(theirs))


def _names_of_modules() -> list[str]:
    """Those that are not also names of the package itself."""
    names = [
        f"{module}.{name}"
        for module in ("cache", "profiling", "training", "transforms")
        for name in getattr(fastload, module).__all__
        if name not in fastload.__all__
    ]
    return sorted(names)


def _variables() -> list[str]:
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    return sorted(set(re.findall(r"FASTLOAD_[A-Z_]+", code)))


@pytest.mark.parametrize(
    ("page", "line", "expected"),
    [
        ("troubleshooting", r"^####? `(\w+Error)`", _errors),
        ("api", r"^::: fastload\.(?!errors$)(\w+)$", lambda: fastload.__all__),
        ("api", r"^::: fastload\.((?!integrations)\w+\.\w+)$", _names_of_modules),
        ("api", r"^\| `(\w+)` \| `([^`]*)` \|", _arguments),
        ("api", r"^\| `(\w+)` \| [^`]", _own_arguments),
        ("command-line", r"^\| `(FASTLOAD_\w+)` \|", _variables),
    ],
    ids=["errors", "public names", "names of modules", "torch's arguments", "own arguments", "variables"],
)
def test_a_page_lists_all(page: str, line: str, expected: Callable[[], list[Any]]) -> None:
    """Each exception, public name, argument and environment variable; torch's in order, with defaults."""
    found = re.findall(line, (DOCS / f"{page}.md").read_text(), re.MULTILINE)
    assert (found if expected is _arguments else sorted(found)) == expected()


def test_the_landing_page_and_the_navigation_have_every_page() -> None:
    """docs/index.md links each page, and mkdocs.yml lists each once."""
    pages = sorted(str(page.relative_to(DOCS)) for page in PAGES)
    linked = {link.partition("#")[0] for link in LINK.findall((DOCS / "index.md").read_text())}
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    assert set(pages) - linked == {"index.md"}
    assert sorted(re.findall(r"- (\S+\.md)$", navigation, re.MULTILINE)) == pages


def test_the_page_of_the_api_has_the_signatures_of_the_code() -> None:
    """Fails until `python docs/signatures.py` has been run."""
    assert signatures.signatures() in (DOCS / "api.md").read_text()


def test_the_address_of_the_repository_is_the_same_everywhere() -> None:
    """Fails until `python docs/address.py` has been run; a new address replaces an old one, and can go."""
    urls = "", "https://example.org/a", "https://example.org/b"
    for name in address.PLACES:
        assert address.address_in(name) == address.ADDRESS
        text = (ROOT / name).read_text()
        none, first, second = (address.written(name, text, address.ADDRESS, url) for url in urls)
        assert address.written(name, first, urls[1], urls[2]) == second
        assert address.written(name, second, urls[2], "") == none
        assert second.count(urls[2]) == 1


def test_pages_install_our_package() -> None:
    """The name on the package index without the suffix is not ours."""
    strangers = re.compile(r"pip install .?fastload(?!-torch)")
    assert [page for page in (*ALL, ROOT / "README.md") if strangers.search(page.read_text())] == []


def test_the_recipe_for_tensorboard_writes_the_known_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the number of the epoch, by at most five lines of code."""
    recipes = [text for note, _, text in _blocks(DOCS / "profile.md") if "tensorboard" in note]
    (recipe,) = recipes
    assert sum(map(bool, recipe.splitlines())) <= 5
    writer = Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Mock(SummaryWriter=lambda: writer))
    loader = fastload.DataLoader(np.arange(24), batch_size=4)
    assert len(list(loader)) == 6
    exec(recipe, {"loader": loader, "epoch": 7})
    written = {call.args[0]: call.args[1:] for call in writer.add_scalar.call_args_list}
    assert written["loader/num_batches"] == (6, 7)
    assert "loader/wait_p95_s" in written
    assert "loader/cache_hits" not in written


# --- README and examples ---------------------------------------------------------------------------------


ALL_EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Those of one page. `train.py` has tests of its own; `pictures.py` is what the others read.
PARTS = (
    "pictures",
    "train",
    *(f"train_{part}" for part in ("ablate", "data", "model", "step", "techniques")),
)
EXAMPLES = [path for path in ALL_EXAMPLES if path.stem not in PARTS]
RUN_HERE = [path for path in EXAMPLES if path.stem != "ray_workers"]  # which tests/clients runs
# The last lines that each example prints, as a regular expression, and the package that it needs.
LAST_LINES = {
    "ddp": r"(rank [01]: .*; 24 of 24 images are cached\n){2}2 ranks ended with equal weights",
    "detection": r"24 of 24 images kept all of their boxes, in order and in size",
    "huggingface_datasets": r"datasets \S+: 24 of 24 rows are cached",
    "iterable": r"([01] workers: 24 of 24 images came once, short batches: 1\n){2}"
    r"2 workers: 24 of 24 images came once, short batches: 2",
    "lightning_module": r"lightning \S+: 6 steps, 3 in the last epoch, validation accuracy \d+%",
    "lmdb_cache": r"24 of 24 images in the file are equal to the decoded ones",
    "mixup_cutmix": r"([1-9]|1\d|2[0-4]) of 24 images have a label of two classes\n"
    r"the same seed gives the same mixed labels",
    "prefetch": r"3 of 3 batches on (cpu|cuda) are equal",
    "quickstart": r"epoch 2: loss \d\.\d{3}\n24 of 24 images are cached: no later epoch decodes them",
    "ram_cache": r"the second process found 24 of 24 images in memory",
    "segmentation": r"24 of 24 masks lie on their images after crops, flips and turns",
    "train_cifar": r"epoch 2: loss \d\.\d{3}\n[\d,]+ images/s, with the training step",
    "two_views": r"24 of 24 images have two different views",
    "webdataset_shards": r"webdataset \S+: 24 of 24 images came once in an epoch",
}
PACKAGES = {
    "huggingface_datasets": "datasets",
    "lightning_module": "lightning",
    "ray_workers": "ray",
    "webdataset_shards": "webdataset",
}


@pytest.mark.slow
def test_readme_snippets_run_as_one_script_and_print_what_the_readme_shows(folder: Path, run: Any) -> None:
    """All Python blocks, in order, are one program over a folder of images; its output is the README's."""
    for number in range(64):
        path = folder / "photos" / "train" / f"class {number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (96, 72), (number, 0, 0)).save(path)
    (folder / "readme.py").write_text(_script(ROOT / "README.md"))
    done = run("readme.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == _shown(ROOT / "README.md")


@pytest.mark.slow
@pytest.mark.parametrize("example", RUN_HERE, ids=lambda path: path.stem)
def test_example_ends_with_what_it_shows(example: Path, run: Any) -> None:
    """Each example trains on the drawn photographs, and its last lines are those of the table above."""
    done = run(str(example))
    assert done.returncode == 0, done.stderr
    assert re.search(rf"(?:^|\n){LAST_LINES[example.stem]}\n$", done.stdout), done.stdout


@pytest.mark.parametrize(("name", "package"), PACKAGES.items())
def test_example_without_its_package_names_the_command(name: str, package: str, monkeypatch: Any) -> None:
    """An example whose package is missing ends with one line, which has the command that installs it."""
    monkeypatch.setitem(sys.modules, package, None)  # makes the import fail
    monkeypatch.syspath_prepend(ROOT / "examples")
    with pytest.raises(SystemExit, match=rf"^This example needs .*: pip install {package}$"):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


def test_examples_are_templates_first() -> None:
    """Each example is about a page, and its checks come behind the training loop, below one comment."""
    for example in EXAMPLES:
        text = example.read_text()
        template, found, rest = text.partition("\n# --- The template ends here. ")
        assert found, example
        assert len(text.splitlines()) < 120, example
        assert "    for " in template or "trainer.fit(" in template, example
        assert "assert " not in template, example
        assert "print(f" in rest, example


def test_every_example_is_in_the_list() -> None:
    """examples/README.md names each file, and test cases exist for exactly those of one page."""
    listed = (ROOT / "examples" / "README.md").read_text()
    assert [path.name for path in ALL_EXAMPLES if path.name not in listed] == []
    assert sorted(LAST_LINES) == [path.stem for path in RUN_HERE]


def test_every_figure_comes_from_a_results_file() -> None:
    """benchmarks/figures.py writes benchmarks/README.md and parts of other pages; they are up to date."""
    figures = runpy.run_path(str(ROOT / "benchmarks" / "figures.py"))
    for page, parts in figures["blocks"]().items():
        for name, content in parts.items():
            assert f"<!-- {name} -->\n{content}\n<!-- /{name} -->" in page.read_text()
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert figures["tables"]().strip() == page.strip()
    assert len(page.splitlines()) <= 250


GENERATED = re.compile(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", re.DOTALL)
# What only a measurement can say: rates, times and ratios. Sizes and limits are arithmetic, or settings.
MEASURED = re.compile(
    r"\d[\d.,]*(?<=\d)x\b|"
    r"\d[\d.,]* (?:times (?:the|as|torch|faster|slower)|(?:image|sample)s/s\b|us\b|microseconds|percent)",
)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=_name)
def test_no_measured_figure_is_typed_by_hand(page: Path) -> None:
    """Outside of code, every rate and ratio stands in a part that benchmarks/figures.py writes."""
    typed = FENCE.sub("", GENERATED.sub("", page.read_text()))
    assert MEASURED.findall(typed) == []
