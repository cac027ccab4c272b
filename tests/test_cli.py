"""Claims of the command line: exit codes, clean output, builds that go on, nothing foreign removed."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fastload
from fastload.cache.build import inventory
from fastload.cache.codecs import CACHE_CODECS
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cli import cache_commands, main
from tests.cache.build_zoo import building
from tests.cli_zoo import NUM_SAMPLES, SIGNAL_AT, pixels

if TYPE_CHECKING:
    from tests.kit.processes import Interpreter

ROOT = Path(__file__).parents[1]  # of the checkout: the package itself may be an installed wheel
COMMANDS = ("build", "build-shard", "join", "info", "verify", "ls", "rm")


def run(*words: Any) -> Any:
    """Run `fastload cache ...` in this process."""
    return CliRunner().invoke(main.app, ["cache", *map(str, words)])


def advised(line: str) -> Any:
    """The dataset that a line tells the user to make."""
    code = re.search(r"fastload\.CachedDataset\.from_cache\((['\"]).*?\1\)", line)
    assert code is not None, line
    return eval(code[0])


def start(interpreter: Interpreter, *words: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `fastload cache ...` in a process of its own, which has torch."""
    module = "import runpy; runpy.run_module('fastload', run_name='__main__', alter_sys=True)"
    return interpreter.run(module, "cache", *map(str, words), environment=environment, limit_s=90)


def first_shard(directory: Path) -> str:
    """The first of five finished shards of an unfinished cache."""
    return str(directory / "cache.partial" / "00000-of-00005.lmdb")


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


def built(dest: Path, *options: str, source: str = "tests.cli_zoo:factory") -> Path:
    """A cache of the zoo."""
    result = run("build", source, dest, "--workers", "0", "--quiet", *options)
    assert result.exit_code == 0, result.stderr
    return dest


def images(root: Path, *names: str) -> Path:
    """Write a picture under each name."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 30, 3), number, np.uint8)).save(path, "PNG")
    return root


def flip_a_bit(path: Path, index: int) -> None:
    """Damage the pixels of a sample of the zoo."""
    content = bytearray(path.read_bytes())
    content[content.index(pixels(index).tobytes())] ^= 1
    path.write_bytes(content)


def test_file_urls_are_paths(tmp_path: Path) -> None:
    """For the source, the destination, and whoever opens the cache."""
    source = images(tmp_path / "photos", "a/1.png", "b/2.png")

    done = run("build", f"file://{source}", f"file://{tmp_path}/made")
    assert done.exit_code == 0, done.output
    assert run("verify", f"file://{tmp_path}/made").exit_code == 0

    opened = fastload.CachedDataset.from_cache(f"file://{tmp_path}/made")
    cached = fastload.CachedDataset(fastload.ImageFolder(source), cache=f"lmdb:file://{tmp_path}/made")
    assert len(opened) == len(cached) == cached.cache_info().num_cached == 2
    opened.cache.close()
    cached.cache.close()


@pytest.mark.slow
def test_commands_import_nothing_heavy(tmp_path: Path) -> None:
    """Help needs neither NumPy nor LMDB, and caches are managed without torch: answers come sooner."""
    one, two = built(tmp_path / "a", "--codec", "png"), built(tmp_path / "b")
    cached = fastload.CachedDataset(
        [(torch.arange(9), 0)], cache_key="listed without torch", max_memory="1MB"
    )
    assert cached[0][0].tolist() == list(range(9))
    commands = {
        "HELP": [["--help"], ["--version"], ["cache", "build", "--help"]],
        "ON_DISK": [
            *(["cache", command, str(one)] for command in ("info", "verify")),
            *(["cache", "ls", str(tmp_path)], ["cache", "rm", str(two), "--yes"]),
        ],
        "IN_MEMORY": [["cache", "ls"]],
    }
    program = "".join(f"{name} = {words!r}\n" for name, words in commands.items()) + _BROUGHT
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        cached.cache.close()

    assert done.returncode == 0, done.stderr
    for_help, on_disk, in_memory = (set(line.split()) for line in done.stdout.splitlines())
    assert not {"torch", "numpy", "lmdb", "rich", "PIL", "psutil"} & for_help
    assert "fastload.cache.lmdb.lmdb_cache" in on_disk
    assert "fastload.cache.ram.registry" in in_memory
    assert not {"torch", "PIL", "psutil", "rich"} & in_memory


class TestHelp:
    def test_the_help_lists_the_exit_codes(self) -> None:
        """A script's author finds them without leaving the terminal."""
        result = CliRunner().invoke(main.app, ["--help"])

        assert result.exit_code == 0
        listed = [line.split()[0] for line in result.stdout.partition("Exit codes:")[2].splitlines() if line]
        assert listed == ["0", "1", "2", "3", "4", "75", "130"]

    @pytest.mark.parametrize("words", [[], ["cache"]])
    def test_without_a_command_the_help_is_printed_line_by_line(self, words: list[str]) -> None:
        """As --help has it, but on standard error and with the exit code of wrong usage."""
        result = CliRunner().invoke(main.app, words)

        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr == CliRunner().invoke(main.app, [*words, "--help"]).stdout

    @pytest.mark.slow
    def test_the_module_without_a_command_prints_its_help(self) -> None:
        """`python -m fastload` does so, too."""
        done = subprocess.run(
            [sys.executable, "-m", "fastload"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )

        assert (done.returncode, done.stdout) == (2, "")
        assert re.match(r"Usage: python -m fastload \[OPTIONS\] \[?COMMAND\]? \[ARGS\]\.\.\.\n", done.stderr)
        assert "\n  cache    Caches of decoded samples" in done.stderr

    def test_codecs_are_those_of_the_caches(self) -> None:
        """What --codec offers is what there is."""
        assert tuple(codec.value for codec in cache_commands.Codec) == CACHE_CODECS


class TestBuild:
    def test_a_folder_of_images_becomes_a_cache_that_training_opens(self, tmp_path: Path) -> None:
        """CachedDataset takes the cache for the same folder and size, and finds every sample in it."""
        folder = images(tmp_path / "photos", "a/1.png", "a/2.png", "b/3.png")
        dest = built(tmp_path / "cache", "--size", "10", source=str(folder))

        source = fastload.ImageFolder(folder, 10)
        dataset = fastload.CachedDataset(source, cache=f"lmdb:{dest}")

        assert dataset.cache.num_cached == 3
        for index in range(3):
            assert dataset[index][1] == source[index][1]
            assert np.array_equal(dataset[index][0], source[index][0])

    @pytest.mark.usefixtures("needs_lmdb")
    def test_the_advice_after_a_build_runs_as_printed(self, tmp_path: Path) -> None:
        """The code, and the command that joins shards, whatever the size of the images and the path."""
        folder = images(tmp_path / "photos", "a/1.png", "a/2.png", "b/3.png")
        dest = tmp_path / "my 'own' cache"

        whole = run("build", folder, tmp_path / "whole", "--size", "8x10")
        shard = run("build-shard", folder, dest, "1/1", "--size", "8x10")
        command = shlex.split(shard.stdout.splitlines()[-1].partition("run '")[2][:-1])
        joined = run(*command[2:])

        assert command[:3] == ["fastload", "cache", "join"]
        for result in (whole, joined):
            assert result.exit_code == 0, result.stderr
            assert advised(result.stdout.splitlines()[-1])[2][0].shape == (8, 10, 3)

    def test_mixed_shapes_are_told_with_the_fix(self, tmp_path: Path) -> None:
        """--size 10 scales the shorter side alone: the build says so."""
        folder = images(tmp_path / "photos", "a/1.png", "a/2.png")
        Image.fromarray(np.zeros((30, 20, 3), np.uint8)).save(folder / "a" / "3.png")

        mixed = run("build", folder, tmp_path / "mixed", "--size", "10", "--json")
        equal = run("build", folder, tmp_path / "equal", "--size", "10x12", "--json")

        assert "2 different shapes at $[0], such as (10, 15, 3) and (15, 10, 3)" in mixed.stderr
        assert "--size 256x256" in mixed.stderr
        assert "different shapes" not in equal.stderr

    @pytest.mark.parametrize("name", ["factory", "Plain", "ready"])
    def test_a_function_a_class_or_a_dataset_can_be_named(self, name: str, tmp_path: Path) -> None:
        """MODULE:NAME gives a dataset by whatever NAME is."""
        cache = LMDBCache(built(tmp_path / "cache", source=f"tests.cli_zoo:{name}"))

        assert [cache.get(index)[1] for index in range(NUM_SAMPLES)] == list(range(NUM_SAMPLES))

    def test_shards_and_codec_are_passed_on(self, tmp_path: Path) -> None:
        """--shards makes a directory, --codec and --quality say how images are written."""
        dest = built(tmp_path / "cache", "--shards", "3", "--codec", "jpeg", "--quality", "80")

        cache = LMDBCache(dest)
        assert dest.is_dir()
        assert (cache.num_shards, cache.codec, cache.quality) == (3, "jpeg", 80)

    @pytest.mark.slow
    @pytest.mark.usefixtures("needs_lmdb")
    def test_a_finished_cache_is_left_alone(self, tmp_path: Path) -> None:
        """The same command again finds nothing to do; a cache that does not fit is refused."""
        dest = tmp_path / "cache"
        quiet = run("build", "tests.cli_zoo:factory", dest, "--codec", "png", "--quiet")
        assert (quiet.exit_code, quiet.output) == (0, "")
        before = dest.stat()

        result = run("build", "tests.cli_zoo:factory", dest, "--json")
        other = run("build", "tests.cli_zoo:factory", dest, "--codec", "raw", "--json")

        assert result.exit_code == 0
        assert json.loads(result.stdout)["was_built"] is False
        assert other.exit_code == 1
        assert json.loads(other.stdout)["type"] == "CacheMismatchError"
        assert dest.stat().st_mtime_ns == before.st_mtime_ns

    @pytest.mark.slow
    def test_more_workers_than_cores_are_no_warning(self, tmp_path: Path, interpreter: Interpreter) -> None:
        """The user asked for them; torch's warning speaks of a DataLoader that is not the user's."""
        result = start(interpreter, "build", "tests.cli_zoo:factory", tmp_path / "cache", "--workers", "9")

        assert result.returncode == 0
        assert "Warning" not in result.stderr

    def test_a_random_dataset_is_refused(self, tmp_path: Path) -> None:
        """A cache would freeze one draw for ever."""
        result = run("build", "tests.cli_zoo:Random", tmp_path / "cache", "--json")

        assert result.exit_code == 1
        assert json.loads(result.stdout)["type"] == "RandomDatasetError"
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.slow
    def test_force_builds_anew(self, tmp_path: Path) -> None:
        """A finished or unfinished build goes first; a foreign file and a URL stay."""
        source, dest = "tests.cli_zoo:factory", built(tmp_path / "cache")
        before = dest.stat().st_ino
        (tmp_path / "half.partial").mkdir()
        (tmp_path / "text").write_text("mine")

        assert run("build", source, dest, "--codec", "png").exit_code == 1
        anew = run("build", source, dest, "--codec", "png", "--force", "--json")
        assert json.loads(anew.stdout)["was_built"]
        assert dest.stat().st_ino != before
        assert run("build", source, tmp_path / "half", "--force").exit_code == 0
        assert run("build", source, tmp_path / "text", "--force").exit_code == 1
        assert (tmp_path / "text").read_text() == "mine"
        assert "--force" in run("build", source, "memory://bucket/cache", "--force").stderr


@pytest.mark.usefixtures("needs_lmdb")
class TestBadSamples:
    @pytest.mark.parametrize("workers", ["0", "2"])
    def test_raise_ends_the_build_with_one_line(self, workers: str, tmp_path: Path) -> None:
        """The line names the error, its type and the sample, wherever it was read."""
        result = run("build", "tests.cli_zoo:Broken", tmp_path / "cache", "--workers", workers, "--json")

        assert result.exit_code == 1
        error = json.loads(result.stdout)
        assert error["type"] == "ValueError"
        assert error["error"].startswith("ValueError: sample thirty is broken (in sample 30 of the dataset)")
        assert "--on-error skip" in error["error"]
        assert f"fastload: error: {error['error']}\n" in result.stderr
        assert "Traceback" not in result.stderr

    def test_skip_finishes_and_says_what_is_missing(self, tmp_path: Path) -> None:
        """With --strict the exit code is 3, in a later run too; the report beside the cache is named."""
        folder = images(tmp_path / "photos", "a/1.png", "a/2.png", "b/3.png")
        (folder / "a" / "2.png").write_bytes(b"no image")

        result = run("build", folder, tmp_path / "cache", "--on-error", "skip")

        again = run("build", folder, tmp_path / "cache", "--on-error", "skip", "--json", "--strict")

        report = tmp_path / "cache.errors.jsonl"
        assert (result.exit_code, again.exit_code) == (0, 3)
        assert json.loads(again.stdout)["num_skipped"] == 1
        assert result.output.count("could not be read") == 1 + result.output.count(" that could not be read")
        assert f"1 of 3 samples could not be read and are left out: see {report}" in result.stderr
        assert f"1 of 3 samples could not be read: see {report}" in run("info", tmp_path / "cache").stdout
        assert json.loads(report.read_text())["path"] == str(folder / "a" / "2.png")

    @pytest.mark.parametrize("words", [["build", "photos"], ["info"]])
    def test_after_a_skip_the_advice_is_from_cache(
        self, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The advice of `build` and `info` works in training; the line says why the other way does not."""
        monkeypatch.chdir(tmp_path)
        folder = images(tmp_path / "photos", "a/1.png", "a/2.png", "b/3.png")
        (folder / "a" / "2.png").write_bytes(b"no image")
        run("build", "photos", "cache", "--on-error", "skip")

        line = run(*words, "cache").stdout.splitlines()[-1]

        dataset = advised(line)
        assert [int(label) for _, label in fastload.DataLoader(dataset, batch_size=None)] == [0, 1]
        assert "would read them from the dataset again and fail" in line


class TestUsage:
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["no/such/folder", "DEST"], "neither"),
            (["tests.cli_zoo:", "DEST"], "neither"),
            (["tests.no_such_module:factory", "DEST"], "no module"),
            (["tests.cli_zoo:no_such_name", "DEST"], "has no 'no_such_name'"),
            (["tests.cli_zoo:number", "DEST"], "is of type int"),
            (["tests.cli_zoo:gives_a_number", "DEST"], "of type int"),
            (["tests.cli_zoo:factory", "DEST", "--size", "64"], "--size is for folders"),
            (["tests", "DEST", "--size", "64x"], "--size should be like"),
            (["tests.cli_zoo:factory", "DEST", "--quality", "90"], "--quality is for jpeg and webp"),
            (["tests.cli_zoo:factory", "DEST", "--codec", "gif"], "gif"),
            (["tests.cli_zoo:factory", "DEST", "--shards", "0"], "--shards"),
            (["tests.cli_zoo:factory"], "DEST"),
            (["tests.cli_zoo:factory", "DEST", "--no-such-option"], "--no-such-option"),
        ],
    )
    def test_wrong_usage_is_one_line_and_exit_code_2(
        self, words: list[str], said: str, tmp_path: Path
    ) -> None:
        """The line says what is wrong; --json has the same as an object."""
        words = [str(tmp_path / "cache") if word == "DEST" else word for word in words]

        result = run("build", *words, "--json")

        assert result.exit_code == 2
        error = json.loads(result.stdout)
        assert error["type"] == "UsageError"
        assert said in error["error"]
        assert result.stderr == f"fastload: error: {error['error']}\n"
        assert list(tmp_path.iterdir()) == []

    def test_errors_of_the_users_code_are_failures(self, tmp_path: Path) -> None:
        """A factory that raises is no wrong usage."""
        result = run("build", "tests.cli_zoo:fails", tmp_path / "cache")

        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == "fastload: error: RuntimeError: the factory failed\n"

    def test_debug_shows_the_traceback(self, tmp_path: Path) -> None:
        """--debug adds where it happened, and changes nothing else."""
        words = ["--debug", "cache", "build", "tests.cli_zoo:fails", str(tmp_path / "cache")]

        result = CliRunner().invoke(main.app, words)

        assert result.exit_code == 1
        assert "Traceback" in result.stderr
        assert result.stderr.endswith("fastload: error: RuntimeError: the factory failed\n")

    def test_the_environment_turns_debugging_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """FASTLOAD_DEBUG=1 does what --debug does."""
        monkeypatch.setenv("FASTLOAD_DEBUG", "1")

        assert "Traceback" in run("info", tmp_path / "nothing").stderr


class TestInterruption:
    @pytest.mark.slow
    @pytest.mark.parametrize("workers", ["0", "2"])
    def test_ctrl_c_says_what_is_kept_and_how_to_go_on(
        self, workers: str, tmp_path: Path, interpreter: Interpreter
    ) -> None:
        """Exit code 130, one line, no traceback; the next run finishes the same cache."""
        words = ("build", "tests.cli_zoo:Signalled", tmp_path / "cache", "--workers", workers, "--json")
        words += ("--shards", "5")

        stopped = start(interpreter, *words, CLI_ZOO_SIGNAL="SIGINT", CLI_ZOO_AFTER=first_shard(tmp_path))
        resumed = run(*words)

        assert stopped.returncode == 130, stopped.stderr
        assert json.loads(stopped.stdout)["type"] == "KeyboardInterrupt"
        assert f"kept at {tmp_path / 'cache'}.partial: build again to resume" in stopped.stderr
        assert "Traceback" not in stopped.stderr
        assert resumed.exit_code == 0
        cache = LMDBCache(tmp_path / "cache")
        assert all(np.array_equal(cache.get(index)[0], pixels(index)) for index in range(NUM_SAMPLES))

    @pytest.mark.slow
    def test_ctrl_c_while_text_is_executed_has_the_same_exit_code(self, tmp_path: Path) -> None:
        """CPython would end the process by the signal, though the command has handled it."""
        stopped = subprocess.run(
            [
                *(sys.executable, "-m", "fastload", "cache", "build"),
                *("tests.cli_zoo:InterruptedInText", str(tmp_path / "cache"), "--workers", "0"),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=90,
        )

        assert stopped.returncode == 130, stopped.stderr

    @pytest.mark.slow
    def test_a_killed_build_is_listed_and_gone_on_with(
        self, tmp_path: Path, interpreter: Interpreter
    ) -> None:
        """After SIGKILL `ls` shows an unfinished build, and the same command finishes it."""
        words = ("build", "tests.cli_zoo:Signalled", tmp_path / "cache", "--workers", "0", "--json")

        killed = start(
            interpreter,
            *words,
            "--shards",
            "5",
            CLI_ZOO_SIGNAL="SIGKILL",
            CLI_ZOO_AFTER=first_shard(tmp_path),
        )
        listed = json.loads(run("ls", tmp_path, "--json").stdout)["disk"]
        resumed = run(*words, "--shards", "5")

        assert killed.returncode == -9
        assert [(item["path"], item["state"]) for item in listed] == [(f"{tmp_path}/cache", "unfinished")]
        assert resumed.exit_code == 0
        assert (
            f"continues, {SIGNAL_AT // 20 * 20} of {NUM_SAMPLES} samples are in finished shards"
            in resumed.stderr
        )
        assert LMDBCache(tmp_path / "cache").verify() == []
        assert [path.name for path in tmp_path.iterdir()] == ["cache"]

    def test_ctrl_c_ends_every_command_with_130(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Typer would end it without a word; --json has its object here too."""

        def interrupted(directory: str) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(inventory, "list_caches", interrupted)

        result = run("ls", tmp_path, "--json")

        assert result.exit_code == 130
        assert json.loads(result.stdout) == {"error": "interrupted", "type": "KeyboardInterrupt"}
        assert result.stderr == "fastload: error: interrupted\n"

    def test_a_second_builder_is_told_to_try_later(self, tmp_path: Path) -> None:
        """Exit code 75 while another one holds the lock."""
        pytest.importorskip("lmdb")
        with building(tmp_path / "cache"):
            result = run("build", "tests.cli_zoo:factory", tmp_path / "cache", "--json")

        assert result.exit_code == 75
        assert json.loads(result.stdout)["type"] == "CacheBusyError"


class TestOutput:
    @pytest.mark.slow
    @pytest.mark.parametrize("workers", ["0", "2"])
    def test_json_is_alone_on_standard_output(
        self, workers: str, tmp_path: Path, interpreter: Interpreter
    ) -> None:
        """Whatever a dataset prints, in Python or below it, in workers too, goes to standard error."""
        words = ("build", "tests.cli_zoo:Chatty", tmp_path / "cache", "--json", "--workers", workers)

        result = start(interpreter, *words)

        assert result.returncode == 0, result.stderr
        assert result.stdout.count("\n") == 1
        assert json.loads(result.stdout)["num_cached"] == NUM_SAMPLES
        assert "reading 7" in result.stderr
        assert "from below" in result.stderr


class TestInfoAndVerify:
    def test_info_says_what_it_holds_and_is_made_of(self, tmp_path: Path) -> None:
        """For scripts and for people."""
        folder = images(tmp_path / "photos", "a/1.png", "b/2.png")
        dest = built(tmp_path / "cache", "--codec", "png", source=str(folder))

        facts = json.loads(run("info", dest, "--json").stdout)
        text = run("info", dest).stdout

        assert facts["classes"] == ["a", "b"]
        assert (facts["num_samples"], facts["codec"], facts["num_shards"]) == (2, "png", 1)
        assert facts["nbytes"] == dest.stat().st_size
        assert facts["parts"]["size"] == "None"
        assert "2 of 2 samples" in text
        assert "2 files, digest" in text
        assert "\nmade of\n  dataset " in text

    def test_verify_finds_a_flipped_bit(self, tmp_path: Path) -> None:
        """Damage is exit code 1, and the samples are named."""
        # Small records lie in LMDB's tree, which is compared as a whole when the file is opened.
        folder = tmp_path / "photos"
        (folder / "a").mkdir(parents=True)
        for index in range(3):
            Image.fromarray(np.full((60, 80, 3), 40 + index, np.uint8)).save(folder / "a" / f"{index}.png")
        dest = built(tmp_path / "cache", source=str(folder))
        content = bytearray(dest.read_bytes())
        content[content.index(bytes([41]) * 5000) + 1000] ^= 1
        dest.write_bytes(content)

        result = run("verify", dest, "--json")

        assert result.exit_code == 1
        assert json.loads(result.stdout)["damaged"] == [1]
        whole = json.loads(run("verify", built(tmp_path / "whole"), "--json").stdout)
        assert whole["num_damaged"] == 0

    def test_verify_finds_a_damaged_index(self, tmp_path: Path) -> None:
        """What makes the file impossible to open is a failure, too."""
        flip_a_bit(built(tmp_path / "cache"), 41)

        result = run("verify", tmp_path / "cache", "--json")

        assert result.exit_code == 1
        assert json.loads(result.stdout)["type"] == "CacheCorruptError"


class TestLs:
    def test_a_directory_lists_caches_and_nothing_else(self, tmp_path: Path) -> None:
        """Finished, damaged and unfinished ones, with their state; foreign files are passed over."""
        built(tmp_path / "one")
        built(tmp_path / "sharded", "--shards", "2")
        flip_a_bit(built(tmp_path / "wrong"), 41)
        (tmp_path / "half.partial").mkdir()
        (tmp_path / "half.partial" / "plan.json").write_text("{}")
        (tmp_path / "notes.txt").write_text("FLlmdb1")
        (tmp_path / "folder").mkdir()
        (tmp_path / "movie.partial").write_text("a download")

        result = run("ls", tmp_path, "--json")
        (itself,) = json.loads(run("ls", tmp_path / "sharded", "--json").stdout)["disk"]
        assert itself["path"] == str(tmp_path / "sharded")
        assert run("ls", tmp_path / "folder").stdout == f"no caches in {tmp_path}/folder\n"
        unfinished = run("info", tmp_path / "half")
        assert unfinished.exit_code == 1
        assert "unfinished build" in unfinished.stderr

        assert result.exit_code == 0
        listed = {Path(item["path"]).name: item["state"] for item in json.loads(result.stdout)["disk"]}
        assert listed == {
            "one": "finished",
            "sharded": "finished",
            "wrong": "damaged",
            "half": "unfinished",
        }

    def test_a_build_at_work_is_told_from_one_that_was_left(self, tmp_path: Path) -> None:
        """Its builder holds the lock."""
        pytest.importorskip("lmdb")
        (tmp_path / "half.partial").mkdir()

        with building(tmp_path / "half"):
            result = run("ls", tmp_path)

        assert "building" in result.stdout
        assert "unfinished" in run("ls", tmp_path).stdout

    def test_without_a_directory_it_lists_memory_and_the_working_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Caches in memory, with their keys and holders, and those on disk in the working directory."""
        monkeypatch.chdir(built(tmp_path / "on disk").parent)
        key = f"cli-{os.getpid()}"
        dataset = fastload.CachedDataset(fastload.ImageFolder(images(tmp_path, "a/1.png")), cache_key=key)

        listed = json.loads(run("ls", "--json").stdout)["memory"]
        text = run("ls").stdout

        found = [item for item in listed if item["key"] == key]
        assert len(found) == 1
        assert found[0]["owners"] == [os.getpid()]
        assert found[0]["num_samples"] == len(dataset)
        assert key in text
        assert found[0]["label"] == f"ImageFolder({str(tmp_path)!r})"
        assert found[0]["label"] in text
        assert f"{tmp_path}/on disk" in text
        removal = run("rm", key, "--yes")
        assert removal.exit_code == 2
        assert f"it is freed when process {os.getpid()} ends" in removal.stderr


class TestRm:
    @pytest.mark.slow
    @pytest.mark.usefixtures("needs_lmdb")
    def test_everything_of_a_cache_goes_at_once(self, tmp_path: Path) -> None:
        """The cache, what an earlier build left, its lock and its report; nothing beside them."""
        (tmp_path / "other").write_text("mine")
        words = ("build", "tests.cli_zoo:Broken", tmp_path / "cache", "--on-error", "skip", "--shards", "2")
        assert run(*words).exit_code == 0
        (tmp_path / "cache.partial").mkdir()
        (tmp_path / "cache.partial" / "00000-of-00001.lmdb").write_bytes(b"half")
        (tmp_path / ".cache.fastload-lock").touch()

        result = run("rm", tmp_path / "cache", "--yes", "--json")

        assert result.exit_code == 0
        assert json.loads(result.stdout)["caches"][0]["nbytes"] > 0
        assert [path.name for path in tmp_path.iterdir()] == ["other"]

    @pytest.mark.parametrize("kind", ["file", "folder", "mixed", "partial", "link", "nothing"])
    def test_what_is_not_a_cache_stays(self, kind: str, tmp_path: Path) -> None:
        """Foreign files, folders, links, and caches with a foreign file among their shards: nothing goes."""
        path = tmp_path / "cache"
        if kind == "file":
            path.write_bytes(b"x" * 100)
        elif kind == "folder":
            path.mkdir()
        elif kind == "mixed":
            (built(path, "--shards", "2") / "thesis.txt").write_text("mine")
        elif kind == "partial":
            (tmp_path / "cache.partial").write_text("a download")
        elif kind == "link":
            path.symlink_to(built(tmp_path / "real"))
        before = sorted(tmp_path.rglob("*"))

        result = run("rm", path, "--yes")

        assert result.exit_code == (2 if kind == "nothing" else 1)
        assert str(path) in result.stderr
        assert sorted(tmp_path.rglob("*")) == before

    def test_what_is_being_built_stays(self, tmp_path: Path) -> None:
        """Exit code 75, and the builder finds its files where they were."""
        pytest.importorskip("lmdb")
        (tmp_path / "cache.partial").mkdir()

        with building(tmp_path / "cache"):
            result = run("rm", tmp_path / "cache", "--yes")

        assert result.exit_code == 75
        assert (tmp_path / "cache.partial").is_dir()

    def test_several_go_together_or_none(self, tmp_path: Path) -> None:
        """If one path names nothing, the others stay."""
        one, two = built(tmp_path / "one"), built(tmp_path / "two")

        assert run("rm", one, tmp_path / "three", two, "--yes").exit_code == 2
        assert one.exists()
        assert run("rm", one, two, "--yes").exit_code == 0
        assert list(tmp_path.iterdir()) == []

    def test_nobody_to_ask_is_a_refusal(self, tmp_path: Path) -> None:
        """A script has to say --yes."""
        result = run("rm", built(tmp_path / "cache"))

        assert result.exit_code == 2
        assert "--yes" in result.stderr
        assert (tmp_path / "cache").exists()

    @pytest.mark.slow
    @pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"n\n", 1)])
    def test_on_a_terminal_it_asks(self, answer: bytes, code: int, tmp_path: Path) -> None:
        """Only yes is yes; the question goes to standard error."""
        dest = built(tmp_path / "cache")
        ours, theirs = pty.openpty()
        try:
            os.write(ours, answer)
            result = subprocess.run(
                [sys.executable, "-m", "fastload", "cache", "rm", str(dest), "--json"],
                cwd=ROOT,
                stdin=theirs,
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            os.close(ours)
            os.close(theirs)

        assert result.returncode == code, result.stderr
        assert f"remove {dest} and all" in result.stderr
        assert dest.exists() == (code == 1)
        said = json.loads(result.stdout)
        assert said.get("caches", [{}])[0].get("removed") == (None if code else [str(dest)])
        assert said.get("type") == ("Abort" if code else None)
