"""Claims of the command line about wrong arguments, which get one plain line, and about shards of caches."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import fastload
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cli import main
from tests.cli_zoo import NUM_SAMPLES
from tests.test_cli import built, images, run

if TYPE_CHECKING:
    from collections.abc import Iterator


COMMANDS = {"join": ["join"], "info": ["info"], "verify": ["verify"], "ls": ["ls"], "rm": ["rm", "--yes"]}


def complaint(result: Any) -> str:
    """What a command says that failed by one plain line."""
    assert result.exit_code in (1, 2)
    assert result.stdout == ""
    assert "Errno" not in result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("fastload: error: ")
    return lines[0].removeprefix("fastload: error: ")


class Header(ctypes.Structure):
    """Of capset(2)."""

    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class Sets(ctypes.Structure):
    """Of capget(2): capabilities as bits."""

    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inherited", ctypes.c_uint32),
    )


@pytest.fixture
def ordinary_user() -> Iterator[None]:
    """Permissions count in this test, also where root runs it, whom they do not stop otherwise."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = Header(0x20080522, 0), (Sets * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0
    before = sets[0].effective
    sets[0].effective &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(ctypes.byref(header), sets) == 0
    try:
        yield
    finally:
        sets[0].effective = before
        assert libc.capset(ctypes.byref(header), sets) == 0


@contextlib.contextmanager
def closed(path: Path, mode: int = 0) -> Iterator[None]:
    """Nobody but the superuser may read the path; with a mode, what the mode says."""
    before = path.stat().st_mode
    path.chmod(mode)
    try:
        yield
    finally:
        path.chmod(before)


class TestPaths:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_a_path_that_leads_to_no_cache_is_wrong_usage(self, command: str, tmp_path: Path) -> None:
        """One line names it, with --json as well; so does one for a foreign file and a path below it."""
        result = run(*COMMANDS[command], tmp_path / "nope")
        as_json = run(*COMMANDS[command], tmp_path / "nope", "--json")
        (tmp_path / "file").write_text("x")
        below = run(*COMMANDS[command], tmp_path / "file" / "x")
        foreign = run(*COMMANDS[command], tmp_path / "file")

        said = complaint(result)
        assert re.match(r"there is (no|neither) .* at ", said)
        assert said.endswith(f" at {tmp_path}/nope")
        assert result.exit_code == 2
        assert json.loads(as_json.stdout) == {"error": said, "type": "UsageError"}
        assert as_json.exit_code == below.exit_code == 2
        assert f"{tmp_path}/file/x" in complaint(below)
        assert str(tmp_path / "file") in complaint(foreign)
        assert (tmp_path / "file").exists()

    @pytest.mark.parametrize("command", [*COMMANDS, "build"])
    @pytest.mark.parametrize("path", ["", b"\xff.lmdb"])
    def test_a_path_that_cannot_be_one_is_wrong_usage(self, command: str, path: str | bytes) -> None:
        """An empty argument is not the working directory, and LMDB opens only names in UTF-8."""
        words = COMMANDS.get(command, ["build", "tests.cli_zoo:factory"])

        result = run(*words, os.fsdecode(path))

        assert result.exit_code == 2
        assert complaint(result).endswith(
            ("is empty: pass a path", "is not valid UTF-8: use a different name")
        )

    @pytest.mark.parametrize("command", ["info", "verify"])
    def test_a_directory_that_is_no_cache_leads_to_ls(self, command: str, tmp_path: Path) -> None:
        """Whoever names a directory with caches in it learns how to list them."""
        built(tmp_path / "one.lmdb")
        built(tmp_path / "two.lmdb")

        assert f"'fastload cache ls {tmp_path}' lists" in complaint(run(command, tmp_path))

    @pytest.mark.parametrize("command", COMMANDS)
    @pytest.mark.usefixtures("ordinary_user")
    def test_what_may_not_be_read_is_said_in_words(self, command: str, tmp_path: Path) -> None:
        """A cache or a directory without permission is a failure that names it."""
        dest = built(tmp_path / "cache")
        with closed(dest):
            result = run(*COMMANDS[command], dest)

        assert result.exit_code == 1
        assert f"{dest}: Permission denied: change its permissions" in complaint(result)

    @pytest.mark.parametrize("command", COMMANDS)
    @pytest.mark.usefixtures("ordinary_user")
    def test_a_directory_that_may_not_be_entered_is_said_in_words(self, command: str, tmp_path: Path) -> None:
        """It is not taken for a path at which there is nothing."""
        (tmp_path / "locked").mkdir()
        with closed(tmp_path / "locked"):
            result = run(*COMMANDS[command], tmp_path / "locked" / "cache")

        assert result.exit_code == 1
        assert re.search(rf"{tmp_path}/locked/cache.*: Permission denied", complaint(result))

    @pytest.mark.usefixtures("ordinary_user")
    def test_ls_passes_over_what_may_not_be_read(self, tmp_path: Path) -> None:
        """One closed file or folder does not keep the caches beside it from being listed."""
        built(tmp_path / "one")
        shutil.copy(tmp_path / "one", tmp_path / "closed")
        (tmp_path / "folder").mkdir()
        with closed(tmp_path / "closed"), closed(tmp_path / "folder"):
            result = run("ls", tmp_path, "--json")

        assert result.exit_code == 0
        assert [item["path"] for item in json.loads(result.stdout)["disk"]] == [f"{tmp_path}/one"]

    @pytest.mark.usefixtures("ordinary_user")
    def test_rm_in_a_closed_directory_removes_nothing(self, tmp_path: Path) -> None:
        """The lock cannot be made there."""
        (tmp_path / "folder").mkdir()
        dest = built(tmp_path / "folder" / "cache")
        with closed(tmp_path / "folder", 0o500):
            result = run("rm", dest, "--yes")

        assert result.exit_code == 1
        assert "Permission denied" in complaint(result)
        assert dest.exists()


class TestDest:
    def test_a_directory_that_is_not_there_is_told_before_the_source_is_read(self, tmp_path: Path) -> None:
        """Nothing is scanned first, and no directory is made."""
        result = run("build", "tests.no_such_module:x", tmp_path / "no" / "cache")

        assert result.exit_code == 2
        assert complaint(result).startswith(f"there is no directory at {tmp_path}/no: make it first")
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "file").write_text("x")
        below = run("build", "tests.cli_zoo:factory", tmp_path / "file" / "cache")
        assert below.exit_code == 2
        assert complaint(below) == f"DEST should lie in a directory, but {tmp_path}/file is a file"

    @pytest.mark.usefixtures("ordinary_user")
    def test_a_directory_that_may_not_be_written_is_told(self, tmp_path: Path) -> None:
        """The line names the directory."""
        with closed(tmp_path, 0o500):
            result = run("build", "tests.cli_zoo:factory", tmp_path / "cache", "--workers", "0")

        assert result.exit_code == 1
        assert f"Permission denied: change the permissions of {tmp_path}, or" in complaint(result)

    @pytest.mark.parametrize("kind", ["file", "folder"])
    def test_what_is_there_already_and_is_no_cache_is_left_alone(self, kind: str, tmp_path: Path) -> None:
        """The line asks for another path."""
        dest = tmp_path / "dest"
        if kind == "file":
            dest.write_text("mine")
        else:
            dest.mkdir()

        result = run("build", "tests.cli_zoo:factory", dest, "--workers", "0")

        assert "use a path that does not exist yet" in complaint(result)
        assert list(tmp_path.iterdir()) == [dest]


class TestSource:
    @pytest.fixture
    def here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A working directory whose modules can be named."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        return tmp_path

    @pytest.mark.parametrize(
        ("files", "said"),
        [
            ([], "Couldn't find any class folder in photos: images of a class belong in photos/cat"),
            (["1.png"], "Couldn't find any class folder in photos: images of a class belong in photos/cat"),
            (
                ["cat/notes.txt"],
                "Found no valid file for the classes cat in photos. Supported extensions are",
            ),
            (["cat/1.png", "dog/notes.txt"], "Found no valid file for the classes dog in photos."),
        ],
    )
    def test_a_folder_without_images_is_wrong_usage(self, files: list[str], said: str, here: Path) -> None:
        """The line says what a folder should look like."""
        (here / "photos").mkdir()
        for name in files:
            (here / "photos" / name).parent.mkdir(exist_ok=True)
            if name.endswith(".png"):
                Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(here / "photos" / name)
            else:
                (here / "photos" / name).write_text("x")

        result = run("build", "photos", "cache")

        assert result.exit_code == 2
        assert complaint(result).startswith(said)

    @pytest.mark.usefixtures("ordinary_user")
    def test_a_folder_that_may_not_be_read_is_a_failure(self, here: Path) -> None:
        """It is named."""
        images(here / "photos", "cat/1.png")
        with closed(here / "photos" / "cat"):
            result = run("build", "photos", "cache")

        assert result.exit_code == 1
        assert complaint(result).startswith("photos/cat: Permission denied")

    @pytest.mark.parametrize("source", ["nope", "here.py", "here.py:data", "notes.txt", ".here:data"])
    def test_a_source_that_is_neither_says_what_it_should_be(self, source: str, here: Path) -> None:
        """With an example."""
        (here / "here.py").write_text("data = [1]\n")
        (here / "notes.txt").write_text("x")

        result = run("build", source, "cache")

        assert result.exit_code == 2
        assert "such as my_data:train_set" in complaint(result)
        assert f"{source!r} is neither" in complaint(result)

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("1 / 0", "ZeroDivisionError: division by zero (while module"),
            (
                "import not_there_at_all",
                "ModuleNotFoundError: No module named 'not_there_at_all' (while module",
            ),
            ("import os; os.nothing", "AttributeError: module 'os' has no attribute 'nothing' (while module"),
            ("def (", "SyntaxError: "),
            ("open('nowhere')", "nowhere: No such file or directory (while module"),
            ("raise SystemExit(3)", "ended the process with exit code 3"),
            ("def data(): raise MemoryError", "MemoryError"),
        ],
    )
    def test_a_module_that_raises_is_a_failure_that_names_it(self, code: str, said: str, here: Path) -> None:
        """The error is told with its module; an exit of the module is no exit of the command."""
        name = f"raising_{abs(hash(code))}"
        (here / f"{name}.py").write_text(code + "\n")

        result = run("build", f"{name}:data", "cache")

        assert result.exit_code == 1
        assert said in complaint(result)
        assert name in complaint(result) or said == complaint(result)

    def test_a_sample_of_a_wrong_kind_is_named(self, here: Path) -> None:
        """The first look at the dataset says which sample it was; a text is no dataset of characters."""
        (here / "with_objects.py").write_text("data = [object()]\nROOT = '/data/photos'\n")

        text = run("build", "with_objects:ROOT", "cache")
        result = run("build", "with_objects:data", "cache", "--workers", "0")

        assert text.exit_code == 2
        assert complaint(text) == "with_objects:ROOT should be a dataset or a function, but is of type str"

        assert result.exit_code == 1
        assert complaint(result).endswith(" (in sample 0 of the dataset)")


def test_version() -> None:
    """`fastload --version` prints the name and the version, and nothing else."""
    result = CliRunner().invoke(main.app, ["--version"])

    assert (result.exit_code, result.output) == (0, f"fastload {fastload.__version__}\n")


@pytest.mark.parametrize("option", ["--install-completion", "--show-completion"])
def test_completion_of_an_unknown_shell_installs_nothing(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the shells that there are."""
    monkeypatch.setenv("HOME", str(tmp_path))

    result = CliRunner().invoke(main.app, [option, "help"])

    expected = f"{option} knows the shells bash, zsh, fish, powershell, pwsh, but got 'help'"
    assert complaint(result) == expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_for_the_shell_that_was_named(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the one that runs the command."""
    monkeypatch.setenv("HOME", str(tmp_path))

    result = CliRunner().invoke(main.app, ["--install-completion", shell])

    assert result.exit_code == 0, result.output
    assert f"{shell} completion installed in {tmp_path}" in result.output.replace("\n", "")


# --- shards ----------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "howto" / "many-machines.md"
ZOO = "tests.cli_zoo:factory"
# Runs the tasks of an array at the same time, and the command of --wrap after them.
SBATCH = """#!/bin/bash
last="${@: -1}"
if [ "$1" = --parsable ]; then
    range=$(sed -n 's/^#SBATCH --array=//p' "$2")
    for task in $(seq ${range%-*} ${range#*-}); do
        SLURM_ARRAY_TASK_ID=$task bash "$2" >&2 &
    done
    wait
    echo 1234
elif [ "$1" = --dependency=afterany:1234 ]; then
    bash -c "$last"
else
    exit 9
fi
"""


def shard(text: str, dest: Path, *options: str, source: str = ZOO) -> Any:
    return run("build-shard", source, dest, text, "--workers", "0", *options)


@pytest.mark.slow
def test_the_recipe_for_slurm(tmp_path: Path) -> None:
    """The lines of the page, with two tasks that run at the same time as processes of their own."""
    script, submission = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[:2]
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            pixels = np.full((40, 50, 3), 10 * number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "build.sh").write_text(script.replace("64", "2"))
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (
        ("sbatch", SBATCH),
        ("fastload", f'#!/bin/sh\nexec {sys.executable} -m fastload "$@"\n'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        ["bash", "-ec", submission],
        cwd=tmp_path,
        env={**os.environ, **path},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr
    assert "joined: 12 of 12 samples" in done.stdout, (done.stdout, done.stderr)
    assert sorted(os.listdir(tmp_path)) == ["build.sh", "photos", "photos.lmdb", "programs"]
    cache = LMDBCache(tmp_path / "photos.lmdb")
    assert (cache.num_shards, cache.classes, cache.verify()) == (2, ["cat", "dog"], [])


def test_a_shard_is_told(tmp_path: Path) -> None:
    """What was built, and what to do next; as JSON too."""
    first = shard("2/3", tmp_path / "cache")
    again = shard("2/3", tmp_path / "cache", "--json")

    assert first.exit_code == 0, first.stderr
    assert re.fullmatch(
        rf"{tmp_path}/cache: shard 2 of 3: built in .* s: 33 samples, .* kB\n"
        rf"when all shards are built, run 'fastload cache join {tmp_path}/cache'\n",
        first.stdout,
    )
    told = json.loads(again.stdout)
    assert told.pop("elapsed_s") >= 0
    assert told.pop("nbytes") > 0
    assert told == {
        "path": str(tmp_path / "cache"),
        "shard": 2,
        "num_shards": 3,
        "num_samples": 33,
        "num_skipped": 0,
        "was_built": False,
        "is_joined": False,
    }


@pytest.mark.usefixtures("needs_lmdb")
def test_join_is_told(tmp_path: Path) -> None:
    """The first time and the second; a shard that is built afterwards finds the cache."""
    for text in ("1/2", "2/2"):
        assert shard(text, tmp_path / "cache").exit_code == 0
    first, second = run("join", tmp_path / "cache"), run("join", tmp_path / "cache", "--json")

    assert first.stdout.startswith(f"{tmp_path}/cache: joined: {NUM_SAMPLES} of {NUM_SAMPLES} samples, ")
    told = json.loads(second.stdout)
    assert (told["was_joined"], told["num_shards"], second.exit_code) == (False, 2, 0)
    assert "joined already: the cache matches" in shard("1/2", tmp_path / "cache").stdout


@pytest.mark.usefixtures("needs_lmdb")
def test_join_without_all_shards_fails(tmp_path: Path) -> None:
    """One line names a command."""
    shard("2/3", tmp_path / "cache")
    result = run("join", tmp_path / "cache")

    assert result.exit_code == 1
    assert re.match(
        r"2 of 3 shards are missing or damaged: 1, 3\. .*build-shard SOURCE .* 1/3', then", complaint(result)
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0/4", "K from 1 to N"),
        ("1/0", "K from 1 to N"),
        ("3", "such as 3/64"),
        ("1/2/3", "should be K/N"),
    ],
)
def test_a_shard_that_does_not_exist_is_wrong_usage(text: str, said: str, tmp_path: Path) -> None:
    """The line states the form, and that shards count from 1."""
    result = shard(text, tmp_path / "cache")

    assert result.exit_code == 2
    assert said in complaint(result)
    assert os.listdir(tmp_path) == []


def test_ray_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line has the command that installs it; --workers excludes it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    both = run("build", "tests.cli_zoo:nothing", tmp_path / "cache", "--workers", "2", "--ray", "auto")
    assert both.exit_code == 2
    assert "omit --workers" in complaint(both)
    result = run("build", ZOO, tmp_path / "cache", "--ray", "auto")

    assert result.exit_code == 1
    assert complaint(result).endswith('not installed: pip install "fastload-torch[ray]"')


def test_skipped_samples_and_their_limit(tmp_path: Path) -> None:
    """With --strict, exit code 3 of a shard and of join; above `--max-errors`, 1, until it is raised."""
    broken = "tests.cli_zoo:Broken"
    for text, code in (("1/2", 3), ("2/2", 0)):
        words = ("--on-error", "skip", "--max-errors", "1", "--strict")
        result = shard(text, tmp_path / "cache", *words, source=broken)
        assert result.exit_code == code, result.stderr
    joined = run("join", tmp_path / "cache", "--max-errors", "0")
    assert joined.exit_code == 1
    assert "`max_errors` allows 0" in complaint(joined)
    assert run("join", tmp_path / "cache", "--strict").exit_code == 3
