"""Claims of the command line: exit codes, clean output, builds that go on, nothing foreign removed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

import fastload
from fastload.cache import inventory
from fastload.cache.file_cache import forget_stores
from fastload.cache.finished import LMDBCache
from fastload.cache.ram.store import open_store
from fastload.cli import cache_commands, main
from fastload.images.opened_files import OpenedImages
from fastload.readers import identity
from tests.cache.build_zoo import building
from tests.cli_zoo import NUM_SAMPLES, pixels
from tests.kit.processes import ROOT, on_a_terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


MODULE = "import runpy; runpy.run_module('fastload', run_name='__main__', alter_sys=True)"
ZOO = "tests.cli_zoo:factory"


def fastload_(*words: Any) -> Any:
    """Run `fastload ...` in this process."""
    return CliRunner().invoke(main.app, list(map(str, words)))


def run(*words: Any) -> Any:
    """Run `fastload cache ...` in this process."""
    return fastload_("cache", *words)


def told(*words: Any, code: int = 0) -> Any:
    """The JSON object of `fastload cache ... --json`."""
    result = run(*words, "--json")
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout)


def advised(line: str) -> Any:
    """The dataset that a line tells the user to make."""
    code = re.search(r"fastload\.CachedDataset\.from_cache\((['\"]).*?\1\)", line)
    assert code is not None, line
    return eval(code[0])


def streamed(capfd: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    """The exit code of `fastload cache ...`, and what came out of this process, from Python or below."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        typer.main.get_command(main.app)(["cache", *map(str, words)])
    return ended.value.code, *capfd.readouterr()  # type: ignore[return-value]


def from_shell(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` in a new interpreter."""
    command, environment = [sys.executable, *words], {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)


def built(dest: Path, *options: str, source: str = ZOO) -> Path:
    """A cache of the zoo."""
    pytest.importorskip("lmdb")
    result = run("build", source, dest, "--num-workers", "0", "--quiet", *options)
    assert result.exit_code == 0, result.stderr
    return dest


def images(root: Path, *names: str, shape: tuple[int, ...] = (20, 30, 3)) -> Path:
    """Write a picture under each name."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full(shape, number, np.uint8)).save(path, "PNG")
    return root


def flip_a_bit(path: Path, content: bytes) -> None:
    """Damage a file wherever it has this content: LMDB leaves old copies in unused pages."""
    data = bytearray(path.read_bytes())
    at = data.index(content)
    while at >= 0:
        data[at] ^= 1
        at = data.find(content, at + 1)
    path.write_bytes(data)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files that changed a moment ago can be remembered; stores are this test's own."""
    monkeypatch.setattr(identity, "SETTLED_S", 0)
    monkeypatch.setattr(identity, "_file_systems", {})
    yield
    forget_stores()


# --- mistakes ---------------------------------------------------------------------------------------------

MODULES = {
    "divides": "1 / 0",
    "imports_nothing": "import not_there",
    "exits": "raise SystemExit(3)",
    "with_objects": "data, listed, number, ROOT = [object()], [1], 3, '/data/photos'",
}
PLAIN_FILES = """
file movie.partial half_photos/dog/notes.txt notes.txt
half_photos/cat/1.png flat/1.png
"""
CACHE_PATHS = ("verify", "ls", "rm --yes")
NEITHER = "such as my_data:train_set.* {!r} is neither"


def for_each(*rows: Any) -> list[Any]:
    """Rows for each command that takes the path of a cache."""
    return [(f"cache {command} {path}", *rest) for command in CACHE_PATHS for path, *rest in rows]


# Command lines in a folder with the files above: the exit code, and the error after its type.
MISTAKES: list[tuple[str, int, str]] = [
    *for_each(
        ("nope", 2, "UsageError: there is (no|neither) .* at .*nope$"),
        ("file/x", 2, "UsageError: .*file/x"),
        ("''", 2, "is empty: pass a path$"),
        ("gs://b/c", 2, "on this machine, but is gs://b/c: first copy the cache to a local disk, and pass"),
    ),
    *((f"cache {command} file", 2 if command == "ls" else 1, ": .*file") for command in CACHE_PATHS),
    ("cache build ZOO ''", 2, "is empty: pass a path$"),
    ("cache build ZOO \udcff.lmdb", 2, "is not valid UTF-8: use a different path$"),
    ("cache verify caches", 1, "caches is a directory, but a cache on disk is one file"),
    ("cache verify left", 2, "left.partial is left of a build: run it again"),
    ("cache verify caches/damaged", 1, "^CacheCorruptError: "),
    *((f"cache rm --yes {path}", 1, f": .*{path}") for path in ("empty", "mixed", "movie", "link")),
    ("cache rm --yes caches/one nope", 2, "nope$"),
    ("cache rm caches/one", 2, "--yes"),
    # DEST
    ("cache build tests.no_such_module:x no/cache", 2, "/no is no directory: make it first"),
    ("cache build ZOO file/cache", 2, "/file is no directory: make it first, or use a different path$"),
    ("cache build ZOO file", 1, "use a different path"),
    ("cache build ZOO empty", 1, "use a different path"),
    ("cache build ZOO file --force", 1, "file"),
    (
        "cache build ZOO s3://b/c",
        2,
        "'DEST': it should be a path on this machine, .* aws s3 cp s3://b/c DEST",
    ),
    (
        "cache build ZOO",
        2,
        r"^UsageError: Missing argument 'DEST'. \(see `fastload cache build --help`\)$",
    ),
    # SOURCE
    ("cache build empty made", 2, "find any class folder in empty: images of .* belong in empty/cat"),
    ("cache build flat made", 2, "find any class folder in flat: images of a class belong in flat/"),
    ("cache build half_photos made", 2, "Found no valid file for the classes dog in half_photos."),
    *(
        (f"cache build {source} made", 2, NEITHER.format(source))
        for source in ("fotos", "no/such/folder", "file.py:data", "notes.txt", ".here:data", "tests.cli_zoo:")
    ),
    ("cache build with_objects:dat made", 2, "has no 'dat': did you mean data[?]$"),
    ("cache build tests.no_such_module:factory made", 2, "no module"),
    ("cache build tests.cli_zoo:no_such_name made", 2, "has no 'no_such_name'"),
    ("cache build with_objects:number made", 2, ":number should be a map-style .* of type int$"),
    ("cache build with_objects:ROOT made", 2, ":ROOT should be a map-style dataset, .* of type str$"),
    (
        "cache build tests.cli_zoo:pixels made",
        2,
        "tests.cli_zoo:pixels should be called without arguments, but missing .* 'index': name a dataset",
    ),
    ("cache build builtins:dict made", 2, "builtins:dict should be called without arguments, but"),
    ("cache build with_objects:data made", 1, r" \(in sample 0 of the dataset\)$"),
    ("cache build divides:data made", 1, r"^(Zero\w+: ){2}division by zero \(while module 'divides'"),
    ("cache build imports_nothing:data made", 1, r"^Module.* 'not_there' \(while module 'imports_nothing'"),
    ("cache build exits:data made", 1, "the dataset ended the process with exit code 3: put"),
    ("cache build tests.cli_zoo:fails made", 1, "^RuntimeError: RuntimeError: the factory failed$"),
    ("cache build tests.cli_zoo:Random made", 1, "^NondeterministicDatasetError: "),
    # options
    ("cache build ZOO made --size 64", 2, "--size is for folders"),
    (
        "cache build photos made --size 64x",
        2,
        "Invalid value for '--size': it should be like 256 or .*, but is '64x'$",
    ),
    ("cache build ZOO made --max-errors 9", 2, "--max-errors is for --on-error skip: add it, or omit"),
    ("cache build ZOO made --num-workers -1", 2, "Invalid value for '--num-workers': "),
    (
        "cache build ZOO made --no-such-option",
        2,
        r"^UsageError: No such option:? '?--no-such-option'?.* \(see `fastload cache build --help`\)$",
    ),
    ("cache build ZOO made --wokers 2", 2, "--wokers'?\\.? .*--num-workers"),
    (
        "cache build ZOO made --on-error replace",
        2,
        "Invalid value for '--on-error': .*'replace' is not one of 'raise', 'skip'",
    ),
    ("cache build ZOO made --by files", 2, "Invalid value for '--by': .*'files' is not one of"),
    ("cache build ZOO made more", 2, "unexpected extra argument.*more.*see `fastload cache build --help`"),
    ("cach ls", 2, r"No such command 'cach'.*\(see `fastload --help`\)$"),
    ("cache biuld", 2, r"No such command 'biuld'.*\(see `fastload cache --help`\)$"),
    ("cache ls caches more", 2, "unexpected extra argument.*more.*see `fastload cache ls --help`"),
    ("cache hold --for 2h", 2, r"No such option:? '?--for.*\(see `fastload cache hold --help`\)$"),
    # bench
    ("bench tests.cli_zoo:Empty", 1, "has no samples"),
    ("bench ZOO --transform with_objects:number", 2, "is not callable"),
    ("bench ZOO --transform 'no name'", 2, "should be MODULE:NAME"),
    ("bench ZOO --transform tests.cli_zoo:nothing", 2, "has no 'nothing'"),
    ("bench ZOO --num-workers 0,two", 2, "Invalid value for '--num-workers': "),
    ("bench ZOO --size 64", 2, "--size is for folders"),
    (
        "bench ZOO --cache disk",
        2,
        "Invalid value for '--cache': .*'disk' is not one of 'none', 'ram', 'lmdb'",
    ),
    ("bench ZOO --by files", 2, "Invalid value for '--by': "),
    ("bench", 2, r"^UsageError: Missing argument 'SOURCE'. \(see `fastload bench --help`\)$"),
    ("doctor tests.cli_zoo:Empty", 1, "has no samples"),
]
# What may not be read or written in these command lines, and the mode that it has.
CLOSED: list[tuple[str, str, int, str]] = [
    *for_each(
        ("caches/one", "caches/one", 0, "caches/one: Permission denied: change its permissions"),
        ("locked/cache", "locked", 0, "locked/cache.*: Permission denied"),
    ),
    ("cache rm --yes caches/one", "caches", 0o500, "Permission denied"),
    (
        "cache build ZOO empty/made --num-workers 0",
        "empty",
        0o500,
        "denied: check that the directory .*empty exists and can be written",
    ),
    ("cache build photos made", "photos/cat", 0, "photos/cat: Permission denied"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches, one of them damaged, and what is no cache."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name in ("caches/folder", "empty", "locked"):
        (folder / name).mkdir(parents=True)
    for name in ("one", "damaged"):
        built(folder / "caches" / name)
    os.truncate(folder / "caches" / "damaged", 12_000)
    (folder / "left.partial").touch()
    (folder / "mixed").mkdir()  # as caches were in earlier formats
    (folder / "mixed" / "00000-of-00001.lmdb").write_text("FLlmdb1")
    for name, code in MODULES.items():
        (folder / f"{name}.py").write_text(f"{code}\n")
    for name in PLAIN_FILES.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "notes.txt").write_text("FLlmdb1")  # what a cache ends with
    (folder / "link").symlink_to(folder / "caches" / "one")
    images(images(folder / "photos", "cat/1.png"), "cat/2.png", shape=(30, 20, 3))
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder is the working directory; its modules can be named, and leave no bytecode in it."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, "ray", None)
    return folder


@pytest.mark.parametrize(("line", "code", "said"), MISTAKES, ids=lambda value: ascii(value)[:60])
def test_a_mistake_is_one_line(line: str, code: int, said: str, here: Path) -> None:
    """Exit code 2 for wrong usage, 1 for failures; what to change; also as JSON; and no file is touched."""
    words = [ZOO if word == "ZOO" else word for word in shlex.split(line)]
    before = sorted(here.rglob("*"))
    plain, as_json = fastload_(*words), fastload_(*words, "--json")
    assert (plain.exit_code, as_json.exit_code, plain.stdout) == (code, code, ""), plain.output
    found = json.loads(as_json.stdout)
    assert plain.stderr == as_json.stderr == f"fastload: error: {found['error']}\n"
    assert "Errno" not in plain.stderr
    assert re.search(said, f"{found['type']}: {found['error']}"), found
    assert (found["type"] == "UsageError") == (code == 2)
    assert sorted(here.rglob("*")) == before


@pytest.fixture
def close() -> Iterator[Callable[..., None]]:
    """Takes permissions of a path away. They count in this test, also where root runs it."""
    libc, modes = ctypes.CDLL(None, use_errno=True), {}
    header, sets = (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)()  # as in capset(2)
    assert libc.capget(header, sets) == 0
    effective = sets[0]
    sets[0] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH

    def close(path: Path, mode: int = 0) -> None:
        modes[path] = path.stat().st_mode
        path.chmod(mode)

    assert libc.capset(header, sets) == 0
    yield close
    for path, mode in modes.items():
        path.chmod(mode)
    sets[0] = effective
    assert libc.capset(header, sets) == 0


@pytest.mark.parametrize(("line", "path", "mode", "said"), CLOSED)
def test_what_may_not_be_read_or_written_is_said_in_words(
    line: str, path: str, mode: int, said: str, here: Path, close: Callable[..., None]
) -> None:
    """It is named, not taken for a path at which there is nothing, and still there afterwards."""
    close(here / path, mode)
    plain = fastload_(*(ZOO if word == "ZOO" else word for word in shlex.split(line)))
    assert (plain.exit_code, plain.stdout, plain.stderr.count("\n")) == (1, "", 1)
    assert re.search(said, plain.stderr)
    assert (here / path).exists()
    assert (here / "caches" / "one").exists()


def test_a_file_that_may_not_be_written_is_refused_at_once(here: Path, monkeypatch: Any) -> None:
    """Before the script runs, although its folder can be written."""
    monkeypatch.setattr(os, "execv", Mock())
    monkeypatch.setattr(os, "access", lambda path, mode: path != "file")
    result = fastload_("profile", "-o", "file", "train.py")
    assert (result.exit_code, os.execv.called) == (2, False)  # type: ignore[attr-defined]


def test_ls_passes_over_what_may_not_be_read(here: Path, close: Callable[..., None]) -> None:
    """One closed file or folder does not keep the caches beside it from being listed."""
    close(here / "caches" / "damaged"), close(here / "caches" / "folder")
    listed = [item["path"] for item in told("ls", here / "caches")["disk"]]
    assert listed == [f"{here}/caches/one"]


def test_debugging_shows_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FASTLOAD_DEBUG=1 adds where it happened, and changes nothing else."""
    monkeypatch.setenv("FASTLOAD_DEBUG", "1")
    result = fastload_("cache", "build", "tests.cli_zoo:fails", tmp_path / "cache")
    assert (result.exit_code, "Traceback" in result.stderr) == (1, True)
    assert result.stderr.endswith("fastload: error: RuntimeError: the factory failed\n")


# --- help -------------------------------------------------------------------------------------------------

# Prints the modules that some commands have brought, beside those that any command of typer imports:
# releases before 0.26 bring rich.
_BROUGHT = """
import sys, typer
from typer.testing import CliRunner
nothing = typer.Typer(rich_markup_mode=None)
nothing.command()(lambda: None)
CliRunner().invoke(nothing, ["--help"])
before = set(sys.modules)
from fastload.cli.main import app
for commands in (HELP, ON_DISK, IN_MEMORY):
    for words in commands:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (words, done.output)
    print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.slow
def test_commands_import_nothing_heavy(tmp_path: Path) -> None:
    """Help needs neither NumPy nor LMDB, and caches are managed without torch: answers come sooner."""
    one, two = built(tmp_path / "a"), built(tmp_path / "b")
    samples = [(torch.arange(9), 0)]
    cached = fastload.CachedDataset(samples, cache_key="listed without torch", max_memory="1MB")
    assert cached[0][0].tolist() == list(range(9))
    on_disk = [*(["cache", command, str(one)] for command in ("ls", "verify"))]
    on_disk += [["cache", "ls", str(tmp_path)], ["cache", "rm", str(two), "--yes"]]
    settings = f"HELP = {[['--help'], ['--version'], ['cache', 'build', '--help']]}\nON_DISK = {on_disk}\n"
    done = from_shell("-c", f"{settings}IN_MEMORY = [['cache', 'ls']]\n{_BROUGHT}")
    cached.cache.close()
    assert done.returncode == 0, done.stderr
    for_help, for_disk, in_memory = (set(line.split()) for line in done.stdout.splitlines())
    assert not {"torch", "numpy", "lmdb", "rich", "PIL", "psutil"} & for_help
    assert "fastload.cache.finished" in for_disk
    assert "fastload.cache.ram.registry" in in_memory
    assert not {"torch", "PIL", "psutil", "rich"} & in_memory


@pytest.mark.slow
def test_without_a_command_the_help_is_printed_line_by_line() -> None:
    """As --help has it; `python -m fastload` does so, too. A group of commands names its help."""
    wrong = fastload_("cache")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert wrong.stderr == "fastload: error: Missing command. (see `fastload cache --help`)\n"
    done = from_shell("-m", "fastload")
    assert (done.returncode, done.stdout, done.stderr) == (0, fastload_("--help").stdout, "")
    assert re.match(r"Usage: fastload \[OPTIONS\] \[?COMMAND\]? \[ARGS\]\.\.\.\n", done.stdout)
    assert "\n  cache    Build and manage caches of decoded samples and files.\n" in done.stdout
    assert fastload_("--version").output == f"fastload {fastload.__version__}\n"


COMMANDS = {
    **{name: {0, 1, 2, 130} for name in ("", "bench", "doctor")},
    **{name: {2} for name in ("run", "profile")},
    **{f"cache {name}": {0, 1, 2, 130} for name in ("build", "ls", "verify", "rm", "hold")},
}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_help_ends_with_the_exit_codes(command: str) -> None:
    """Of this command; all commands are in the table, and no option has two meanings."""
    _, _, codes = fastload_(*command.split(), "--help").stdout.partition("Exit codes:\n")
    assert {int(number) for number in re.findall(r"^ +(\d+) ", codes, re.MULTILINE)} == COMMANDS[command]
    assert "fine" not in codes
    named = {name for group in (main.app, cache_commands.app) for name in _names_of(group)}
    assert {name for words in COMMANDS for name in words.split()} == named


def test_an_option_without_its_value_is_named() -> None:
    """At the end of the line, where nothing can be taken for the value."""
    for option in ("--size", "--num-workers"):
        result = run("build", ZOO, "made", option)
        assert result.exit_code == 2
        assert re.match(f"fastload: error: Option '{option}' requires an argument", result.stderr)


def _names_of(group: typer.Typer) -> set[str]:
    own: Any = typer.main.get_command(group)
    return set(own.commands)


def test_the_last_frame_of_a_bar_is_all_of_it(tmp_path: Path) -> None:
    """Of a build with samples left out, and of a check."""
    pytest.importorskip("lmdb")
    words = ("build", "tests.cli_zoo:Broken", "--on-error", "skip", "--max-errors", "9", "--num-workers", "0")
    for command in (words, ("verify",)):
        code, frames = on_a_terminal("cache", *command[:2], str(tmp_path / "cache"), *command[2:])
        assert code == 0, frames
        counts = [count for frame in frames for count in re.findall(r" (\d+)/(\d+) ", frame)]
        assert counts[-1][0] == counts[-1][1], frames


def test_completion_is_installed_for_the_shell_that_runs_the_command(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """By typer, which fastload's own handling of errors leaves alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    result = fastload_("--install-completion")
    assert result.exit_code == 0, result.output
    assert f"bash completion installed in {tmp_path}" in result.output.replace("\n", "")


# --- build, info and verify ------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_folder_of_images_becomes_a_cache_that_training_opens(scheme: str, tmp_path: Path) -> None:
    """CachedDataset finds every sample of the same folder and size in it; `ls` says what it is made of."""
    folder, dest = images(tmp_path / "photos", "a/1.png", "a/2.png", "b/3.png"), tmp_path / "made"
    done = run("build", f"{scheme}{folder}", f"{scheme}{dest}", "--size", "10")
    assert done.exit_code == 0, done.output
    source = fastload.ImageFolder(folder, size=10)
    opened = fastload.CachedDataset.from_cache(f"{scheme}{dest}")
    dataset = fastload.CachedDataset(source, cache=f"lmdb:{scheme}{dest}")
    assert len(opened) == dataset.cache_info().num_cached == 3
    for index in range(3):
        assert dataset[index][1] == source[index][1]
        assert np.array_equal(dataset[index][0], source[index][0])
    opened.cache.close(), dataset.cache.close()

    (facts,), text = told("ls", f"{scheme}{dest}")["disk"], run("ls", dest).stdout
    assert facts["classes"] == ["a", "b"]
    assert (facts["num_samples"], facts["nbytes"], facts["parts"]["size"]) == (3, dest.stat().st_size, "10")
    assert "3 of 3 samples" in text
    assert "3 files, digest" in text
    assert "\nmade of\n  dataset " in text
    assert told("verify", f"{scheme}{dest}")["num_damaged"] == 0


@pytest.mark.usefixtures("needs_lmdb")
def test_the_advice_after_a_build_runs_as_printed(tmp_path: Path) -> None:
    """Whatever the size of the images and the path."""
    folder = images(tmp_path / "photos", "a/1.png", "a/2.png", "b/3.png")
    whole = run("build", folder, tmp_path / "my 'own' cache", "--size", "8x10")
    assert whole.exit_code == 0, whole.stderr
    assert advised(whole.stdout.splitlines()[-1])[2][0].shape == (8, 10, 3)


def test_a_function_a_class_or_a_dataset_can_be_named(tmp_path: Path) -> None:
    """MODULE:NAME gives a dataset by whatever NAME is."""
    for name in ("factory", "Plain", "ready"):
        cache = LMDBCache(built(tmp_path / name, source=f"tests.cli_zoo:{name}"))
        assert [cache.get(index)[1] for index in range(NUM_SAMPLES)] == list(range(NUM_SAMPLES))


@pytest.mark.slow
@pytest.mark.usefixtures("needs_lmdb")
def test_a_finished_cache_is_left_alone_without_force(tmp_path: Path) -> None:
    """The same command again has nothing to do; one that does not fit is refused, and --force builds anew."""
    dest = tmp_path / "cache"
    quiet = run("build", ZOO, dest, "--quiet")
    assert (quiet.exit_code, quiet.output) == (0, "")
    before = dest.stat()
    assert told("build", ZOO, dest)["was_built"] is False
    refused = told("build", images(tmp_path / "photos", "a/1.png"), dest, code=1)
    assert refused["type"] == "CacheMismatchError"
    assert refused["error"].count("--force") == 1
    assert dest.stat() == before
    assert told("build", ZOO, dest, "--force")["was_built"]
    (tmp_path / "half.partial").touch()
    assert run("build", ZOO, tmp_path / "half", "--force").exit_code == 0


@pytest.mark.usefixtures("needs_lmdb")
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_bad_sample_ends_the_build_with_one_line(workers: str, tmp_path: Path) -> None:
    """The line names the error, its type and the sample, wherever it was read."""
    result = run("build", "tests.cli_zoo:Broken", tmp_path / "cache", "--num-workers", workers, "--json")
    error = json.loads(result.stdout)
    assert (result.exit_code, error["type"]) == (1, "ValueError")
    assert error["error"].startswith("ValueError: sample thirty is broken (in sample 30 of the dataset)")
    assert "--on-error skip) leaves out" in error["error"]
    assert f"fastload: error: {error['error']}\n" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("needs_lmdb")
def test_a_build_that_skips_finishes_and_says_what_is_missing(tmp_path: Path, monkeypatch: Any) -> None:
    """In a later run too; the advice then is from_cache(), and says why."""
    monkeypatch.chdir(images(tmp_path, *(f"photos/{name}.png" for name in ("a/1", "a/2", "b/3"))))
    broken, report = tmp_path / "photos" / "a" / "2.png", tmp_path / "cache.errors.jsonl"
    broken.write_bytes(b"no image")
    words = ("build", tmp_path / "photos", tmp_path / "cache", "--on-error", "skip")
    refused = run(*words, "--max-errors", "0").stderr
    assert "1 of 3 samples could not be read, and max_errors=0 allows 0" in refused
    assert "(the option is --max-errors)" in refused
    result = run(*words)
    assert result.exit_code == 0
    assert told(*words)["num_skipped"] == 1
    assert result.output.count("could not be read") == 1 + result.output.count(" that could not be read")
    assert f"1 of 3 samples could not be read and are left out: see {report}" in result.stderr
    assert json.loads(report.read_text())["path"] == str(broken)
    info = run("ls", tmp_path / "cache").stdout
    assert f"1 of 3 samples could not be read: see {report}" in info
    for text in (run("build", "photos", "cache").stdout, info):
        line = text.splitlines()[-1]
        labels = [int(label) for _, label in fastload.DataLoader(advised(line), batch_size=None)]
        assert labels == [0, 1]
        assert "would read them from the dataset again and fail" in line


@pytest.mark.slow
@pytest.mark.usefixtures("needs_lmdb")
@pytest.mark.filterwarnings("error:This DataLoader will create")
@pytest.mark.parametrize("workers", ["0", "2"])
def test_json_is_alone_on_standard_output(workers: str, tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    """What a dataset prints, in Python or below, goes to standard error; many workers are no warning."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    words = ("build", "tests.cli_zoo:Chatty", tmp_path / "cache", "--json", "--num-workers", workers)
    code, out, err = streamed(capfd, *words)
    assert (code, out.count("\n")) == (0, 1), err
    assert json.loads(out)["num_cached"] == NUM_SAMPLES
    assert "reading 7" in err
    assert "from below" in err


def test_json_needs_no_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose standard output is closed tells by its exit code alone."""
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as ended:
        typer.main.get_command(main.app)(["cache", "ls", "--json"])
    assert ended.value.code == 0


@pytest.mark.usefixtures("needs_lmdb")
def test_a_cache_may_lie_at_any_path(tmp_path: Path) -> None:
    """Moved to a name that is not valid UTF-8, or behind a link, it is listed and verified."""
    moved, link = built(tmp_path / "cache").rename(tmp_path / "\udcff.lmdb"), tmp_path / "link"
    link.symlink_to(moved)
    for path in (moved, link):
        (found,) = told("ls", path)["disk"]
        assert (found["path"], found["state"]) == (str(moved), "finished")
        assert told("verify", path)["num_damaged"] == 0
    assert told("rm", moved, "--yes")["caches"][0]["removed"] == [str(moved)]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_the_exit_code_needs_no_output(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the error, also where the error cannot be written, such as on a full disk."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, stream, full)
        with pytest.raises(SystemExit) as ended:
            typer.main.get_command(main.app)(["cache", "ls", "no/such", "--json"])
        assert ended.value.code == 2
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_verify_finds_a_flipped_bit(tmp_path: Path) -> None:
    """Damage is exit code 1, and the samples are named."""
    folder = tmp_path / "photos"
    images(folder, "a/0.png", "a/1.png", "a/2.png", shape=(60, 80, 3))
    dest = built(tmp_path / "cache", source=str(folder))
    flip_a_bit(dest, bytes([1]) * 5000)
    assert told("verify", dest, code=1)["damaged"] == [1]


# --- interruption -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "workers"), [("SIGINT", "0"), ("SIGINT", "2"), ("SIGKILL", "0")])
def test_a_build_that_was_ended_runs_again(sent: str, workers: str, tmp_path: Path, interpreter: Any) -> None:
    """Ctrl-C (exit code 130, one line) says how to continue; what is left then, and by SIGKILL, is listed."""
    dest = f"{tmp_path}/cache"
    words = ("build", "tests.cli_zoo:Signalled", dest, "--num-workers", workers)
    signals = {"CLI_ZOO_SIGNAL": sent, "CLI_ZOO_AFTER": f"{dest}.partial"}
    stopped = interpreter.run(MODULE, "cache", *words, "--json", environment=signals, limit_s=90)
    if sent == "SIGINT":
        assert stopped.returncode == 130, stopped.stderr
        assert json.loads(stopped.stdout)["type"] == "KeyboardInterrupt"
        kept = rf"interrupted; \d+ records are stored in {dest}.partial: run the same build"
        assert re.search(kept, stopped.stderr)
        assert "Traceback" not in stopped.stderr
    else:
        assert stopped.returncode == -9
    listed = told("ls", tmp_path)["disk"]
    assert [(item["path"], item["state"]) for item in listed] == [(dest, "unfinished")]
    assert run(*words).exit_code == 0
    cache = LMDBCache(dest)
    assert all(np.array_equal(cache.get(index)[0], pixels(index)) for index in range(NUM_SAMPLES))
    assert cache.verify() == []
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_ctrl_c_ends_every_command_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer would end it without a word; --json has its object here too."""
    monkeypatch.setattr(inventory, "list_caches", Mock(side_effect=KeyboardInterrupt))
    result = run("ls", tmp_path, "--json")
    assert (result.exit_code, result.stderr) == (130, "fastload: error: interrupted\n")
    assert json.loads(result.stdout) == {"error": "interrupted", "type": "KeyboardInterrupt"}


@pytest.mark.usefixtures("needs_lmdb")
def test_what_is_being_built_is_not_removed(tmp_path: Path) -> None:
    """`rm` fails; `ls` tells it from one left."""
    (tmp_path / "cache.partial").touch()
    with building(tmp_path / "cache"):
        assert told("rm", tmp_path / "cache", "--yes", code=1)["type"] == "CacheBusyError"
        assert "building" in run("ls", tmp_path).stdout
    assert (tmp_path / "cache.partial").is_file()
    assert "unfinished" in run("ls", tmp_path).stdout


# --- ls and rm --------------------------------------------------------------------------------------------


def test_ls_lists_caches_and_nothing_else(here: Path) -> None:
    """Finished, damaged and unfinished ones of a directory, or the cache itself; nothing foreign."""
    listed = {Path(item["path"]).name: item["state"] for item in told("ls", here / "caches")["disk"]}
    assert listed == {"one": "finished", "damaged": "damaged"}
    listed = {Path(item["path"]).name: item["state"] for item in told("ls", here)["disk"]}
    assert listed == {"left": "unfinished"}
    assert run("ls", here / "empty").stdout == f"no caches in {here}/empty\n"


def test_without_a_directory_ls_lists_memory_and_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches in memory, with their keys and holders, and those on disk here."""
    monkeypatch.chdir(built(tmp_path / "on disk").parent)
    key = f"cli-{os.getpid()}"
    dataset = fastload.CachedDataset(fastload.ImageFolder(images(tmp_path, "a/1.png")), cache_key=key)
    (found,) = [item for item in told("ls")["memory"] if item["key"] == key]
    text = run("ls").stdout
    assert (found["users"], found["num_samples"]) == ([os.getpid()], len(dataset))
    assert found["label"] == f"ImageFolder({str(tmp_path)!r})"
    assert all(part in text for part in (key, found["label"], f"{tmp_path}/on disk"))


def test_decoded_files_in_memory_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their number and their holders."""
    monkeypatch.setenv("FASTLOAD_RUNTIME_DIR", str(tmp_path / "registry"))
    store = open_store("64MB")
    assert store.put(bytes(16), [bytes(8000)])
    (listed,) = told("ls")["memory"]
    assert (listed["num_cached"], listed["users"]) == (1, [os.getpid()])
    assert f"{listed['name']}  1 decoded files" in run("ls").stdout
    store.close()


@pytest.mark.usefixtures("settled")
def test_decoded_files_on_disk_are_built_listed_verified_and_removed(tmp_path: Path) -> None:
    """From a folder as torchvision reads it, into a finished file; a second build has nothing to do."""
    root, dest = images(tmp_path / "photos", "a/1.png", "b/c/3.png"), tmp_path / "files"
    Image.new("RGB", (30, 20), "red").save(root / "a" / "2.jpg")  # its copy is decoded when it is used
    first = told("build", root, dest, "--by", "file", "--num-workers", "0")
    assert (first["num_cached"], first["num_contents"]) == (3, 3)
    assert (first["state"], os.listdir(tmp_path).count("files.partial")) == ("finished", 0)
    (root / "b" / "c" / "3.png").unlink()
    again = told("build", root, dest, "--by", "file", "--num-workers", "0")
    assert (again["num_cached"], again["nbytes"]) == (3, first["nbytes"])
    (listed,) = told("ls", tmp_path)["disk"]
    assert (listed["path"], listed["state"], listed["num_cached"]) == (str(dest), "finished", 3)
    assert told("ls", dest)["disk"] == [listed]
    assert "3 decoded files" in run("ls", dest).stdout
    assert told("verify", dest)["num_damaged"] == 0
    flip_a_bit(dest, Image.open(root / "a" / "1.png").tobytes())
    assert told("verify", dest, code=1)["num_damaged"] >= 1
    assert told("build", root, dest, "--by", "file", "--force", "--num-workers", "0")["num_cached"] == 2
    assert told("rm", dest, "--yes")["caches"][0]["removed"] == [str(dest)]
    assert not dest.exists()


@pytest.mark.usefixtures("settled")
def test_a_finished_file_of_decoded_files_is_read_and_not_filled(tmp_path: Path) -> None:
    """What is missing in it is decoded each time."""
    root, dest = images(tmp_path / "photos", "a/1.png"), tmp_path / "files"
    told("build", root, dest, "--by", "file", "--num-workers", "0")
    Image.new("RGB", (30, 20), "red").save(root / "a" / "2.png")
    before = dest.read_bytes()
    for _ in range(2):
        with fastload.DataLoader(
            OpenedImages(str(root)), 1, cache=f"lmdb:{dest}", collate_fn=decoded
        ) as loader:
            assert list(loader) == [1, 1]
        assert (loader.stats().cache_hits, loader.stats().cache_misses) == (1, 1)
    forget_stores()
    assert dest.read_bytes() == before


def decoded(samples: list[Any]) -> int:
    """Decode the images of a batch."""
    return len([image.load() for image in samples])


@pytest.mark.usefixtures("settled")
def test_images_that_cannot_be_decoded_are_skipped_by_file(tmp_path: Path) -> None:
    """And reported, within --max-errors; without --on-error skip they end the build, which then continues."""
    root, dest = images(tmp_path / "photos", "a/1.png", "b/3.png"), tmp_path / "files"
    (root / "b" / "2.png").write_bytes(b"no image")
    assert "2.png" in told("build", root, dest, "--by", "file", "--num-workers", "0", code=1)["error"]
    options = ("--by", "file", "--on-error", "skip", "--max-errors", "1")
    assert told("build", root, dest, *options, "--num-workers", "2")["num_cached"] == 2
    assert "2.png" in Path(f"{dest}.errors.jsonl").read_text()


def test_a_cache_of_no_files_is_no_success(tmp_path: Path) -> None:
    """Of a dataset that decodes with nothing known, nothing is left that would never be filled."""
    said = told("build", "tests.cli_zoo:Plain", tmp_path / "cache", "--by", "file", code=1)["error"]
    assert "no supported library decoded a file" in said
    assert list(tmp_path.iterdir()) == []


def test_options_of_samples_are_not_for_decoded_files(tmp_path: Path, monkeypatch: Any) -> None:
    """Nor the other way around, and a finished cache of samples is left alone. No cache is not filled."""
    root = images(tmp_path / "photos", "a/1.png")
    error = told("build", root, tmp_path / "files", "--by", "file", "--size", "8", code=2)["error"]
    assert "--size" in error
    samples = built(tmp_path / "samples")
    assert "is a cache of samples" in told("build", root, samples, "--by", "file", code=1)["error"]
    monkeypatch.setenv("FASTLOAD_CACHE", "off")
    assert "unset it" in told("build", root, tmp_path / "files", "--by", "file", code=2)["error"]
    assert not (tmp_path / "files").exists()
    assert told("verify", samples)["num_damaged"] == 0


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_decoded_files_are_held_until_a_signal(sent: int, tmp_path: Path, monkeypatch: Any) -> None:
    """What a process stored meanwhile is there after its end, and gone after the command's.

    After Ctrl-C, the command says what it held.
    """
    monkeypatch.setenv("FASTLOAD_RUNTIME_DIR", str(tmp_path / "registry"))
    words = [sys.executable, "-m", "fastload", "cache", "hold", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as holder:
        assert holder.stderr is not None
        assert "holding 0 decoded files" in holder.stderr.readline()
        store = open_store("64MB")
        assert store.put(bytes(16), [bytes(8000)])
        store.close()
        store = open_store("64MB")
        assert store.get(bytes(16)) is not None
        store.close()
        holder.send_signal(sent)
        out, err = holder.communicate(timeout=60)
    assert err == ""
    if sent == signal.SIGINT:
        assert holder.returncode == 0
        assert json.loads(out)["num_files"] == 1
    else:
        assert holder.returncode == -sent
    store = open_store("64MB")
    assert store.get(bytes(16)) is None
    store.close()


def test_without_shared_memory_nothing_is_held(monkeypatch: Any) -> None:
    """The command says so."""
    monkeypatch.setenv("FASTLOAD_RUNTIME_DIR", "/proc/no/such")
    assert "share no memory here" in told("hold", code=1)["error"]


@pytest.mark.slow
@pytest.mark.usefixtures("needs_lmdb")
def test_rm_removes_all_of_several_caches(tmp_path: Path) -> None:
    """With what an earlier build left, the lock and the report; nothing beside them."""
    (tmp_path / "other").write_text("mine")
    words = ("build", "tests.cli_zoo:Broken", tmp_path / "cache", "--on-error", "skip")
    assert run(*words).exit_code == 0
    (tmp_path / "cache.partial").touch()
    (tmp_path / ".cache.fastload-lock").touch()
    removed = told("rm", tmp_path / "cache", built(tmp_path / "two"), "--yes")["caches"]
    assert [one["nbytes"] > 0 for one in removed] == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_on_a_terminal_rm_asks(tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    """Only yes is yes; the question goes to standard error."""
    dest = built(tmp_path / "cache")
    monkeypatch.setattr(sys, "stdin", None)  # closed
    assert "is not a terminal to confirm on" in streamed(capfd, "rm", dest)[2]
    ours, theirs = pty.openpty()
    with open(ours, "wb", 0) as user, open(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        user.write(b"n\n")
        assert "remove" not in streamed(capfd, "rm", dest)[1]
        for answer, expected in ((b"n\n", 1), (b"y\n", 0)):
            user.write(answer)
            code, out, err = streamed(capfd, "rm", dest, dest, "--json")
            assert (code, dest.exists()) == (expected, expected == 1), err
            assert f"remove {dest} and all" in err
            said = json.loads(out)
            assert said.get("type") == "Abort" if code else said["caches"][0]["removed"] == [str(dest)]
