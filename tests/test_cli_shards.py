"""Claims of `fastload cache build-shard`, `fastload cache join` and `--ray`: many processes, one cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastload.cache.lmdb.lmdb_cache import LMDBCache
from tests.cli_zoo import NUM_SAMPLES
from tests.test_cli import run
from tests.test_cli_mistakes import complaint

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
    """The lines of the page, with four tasks that run at the same time as processes of their own."""
    script, submission = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[:2]
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            pixels = np.full((40, 50, 3), 10 * number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "build.sh").write_text(script.replace("64", "4"))
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
    assert (cache.num_shards, cache.classes, cache.verify()) == (4, ["cat", "dog"], [])


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


def test_skipped_samples_and_the_budget(tmp_path: Path) -> None:
    """Exit code 3 of a shard and of join; above the budget, 1, until it is raised."""
    broken = "tests.cli_zoo:Broken"
    for text, code in (("1/2", 3), ("2/2", 0)):
        result = shard(text, tmp_path / "cache", "--on-error", "skip", "--error-budget", "1", source=broken)
        assert result.exit_code == code, result.stderr
    joined = run("join", tmp_path / "cache", "--error-budget", "0")
    assert joined.exit_code == 1
    assert "error budget allows 0" in complaint(joined)
    assert run("join", tmp_path / "cache").exit_code == 3
