"""Change one place of a file at a time, and see whether the file's tests notice. Run by `make mutants`.

cosmic-ray makes the mutants. This program gives it a copy of the project to change, the tests of each file, a
sample of fixed seed, and the one operator that it lacks: leaving a statement out. Each mutant is tested in a
fork of this process, which has imported torch already: that takes most of the time of a test that fails.

    python tests/mutants/run.py ring.py channel.py --sample 40
    python tests/mutants/run.py rng/entry_points.py --tests "tests/rng/test_entry_points.py"

The mutants that survive are printed as differences, and kept in build/mutants/FILE.txt.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import os
import random
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import hypothesis.stateful  # noqa: F401  # for the forks
import psutil  # noqa: F401
import pytest
import torch.utils.data  # noqa: F401
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import apply_mutation, mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.work_item import MutationSpec

PROJECT = Path(__file__).parents[2]
COPIED = ["fastload", "tests", "benchmarks", "examples", "README.md", "pyproject.toml", "Makefile"]

# Large matrices over what single tests show, too.
FEW = "-m 'not slow' -k 'not interruptions_with_workers'"
# What pytest is told for each file: few tests, the quickest first.
TESTS = {
    "memory/ring.py": "tests/transport/test_schedule_and_ring.py tests/transport/test_memory.py",
    "memory/lease.py": "tests/transport/test_memory.py tests/transport/test_schedule_and_ring.py",
    "workers/channel.py": "tests/transport/test_channel_and_spec.py tests/survival/test_going_on.py"
    " -k 'not timeout and not spawn'",
    "workers/worker.py": "tests/transport/test_fetch.py tests/transport/test_process.py"
    " tests/survival/test_start.py tests/survival/test_going_on.py"
    " tests/faults/test_descriptors.py -m 'not slow' -k 'not sampler_that and not timeout'",
    "workers/process_pool.py": "tests/transport/test_fetch.py tests/survival/test_going_on.py"
    " tests/faults/test_descriptors.py tests/faults/test_restart.py -m 'not slow'"
    " -k 'not sampler_that and not timeout'",
    "workers/process.py": "tests/transport/test_process.py tests/survival/test_start.py"
    " tests/survival/test_going_on.py tests/faults/test_restart.py -m 'not slow' -k 'not sampler_that'",
    "workers/messages.py": "tests/survival/test_going_on.py tests/faults/test_restart.py"
    " tests/faults/test_descriptors.py -m 'not slow' -k 'not sampler_that'",
    "cache/ram/shared.py": "tests/cache/test_shared.py tests/cache/test_ram_model.py"
    " tests/cache/test_limits.py -m 'not slow'",
    "epochs/position.py": "tests/resume/test_saved_state.py tests/resume/test_resume.py"
    f" tests/resume/test_failures.py {FEW}",
    "epochs/order.py": "tests/resume/test_resume.py tests/resume/test_failures.py"
    f" tests/rng/test_seeding.py {FEW}",
    "device/stream_prefetcher.py": "tests/device/test_prefetch.py tests/device/test_delivery.py",
}
# `mutants.quick` takes from hypothesis what a mutant does not need: shrinking, and other examples each time.
PYTEST = (
    "-q -x -W ignore::pytest.PytestAssertRewriteWarning -p no:cacheprovider"
    " -p tests.mutants.quick --timeout=30"
)

STATEMENTS = {"expr_stmt", "atom_expr", "return_stmt", "raise_stmt", "del_stmt", "keyword"}


class LeaveStatementOut(Operator):
    """Replaces a statement by `pass`."""

    def mutation_positions(self, node: Any) -> Any:
        if node.type == "simple_stmt" and node.children[0].type in STATEMENTS:
            statement = node.children[0]
            if statement.get_code(include_prefix=False) not in ("pass", "continue", "break"):
                yield statement.start_pos, statement.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        import parso  # comes with cosmic-ray

        nothing = parso.parse("pass").get_first_leaf()
        nothing.prefix = node.get_first_leaf().prefix
        node.children[0] = nothing
        return node

    @classmethod
    def examples(cls) -> Any:
        return (Example("go()\n", "pass\n"),)


class _OwnOperators:
    def __iter__(self) -> Any:
        return iter(["LeaveStatementOut"])

    def __getitem__(self, name: str) -> Any:
        return {"LeaveStatementOut": LeaveStatementOut}[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("files", nargs="*", help="names of files, such as ring.py; all of TESTS without one")
    add("--tests", metavar="PYTEST ARGS", help="the tests of these files, which may be any of fastload/")
    add("--sample", type=int, default=40, help="mutants of each file; 0 for all")
    add("--seed", type=int, default=0)
    add("--again", action="store_true", help="only those of the sample that survived last time")
    add("--since", metavar="REVISION", help="only files that changed since then")
    arguments = parser.parse_args()
    plugins.OPERATOR_PROVIDERS["own"] = _OwnOperators()
    known = dict(TESTS)
    if arguments.tests:
        if not arguments.files:
            parser.error("--tests is for the files that you name")
        package = PROJECT / "fastload"
        known = {str(path.relative_to(package)): arguments.tests for path in sorted(package.rglob("*.py"))}
    wanted = ["/" + name.removeprefix("fastload/") for name in arguments.files]
    chosen = [name for name in known if not wanted or any(f"/{name}".endswith(one) for one in wanted)]
    if not chosen:
        sys.exit(f"no file of {', '.join(known)} ends in {' or '.join(arguments.files)}")
    if arguments.since:
        command = ["git", "diff", "--name-only", "--relative=fastload", arguments.since]
        changed = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout
        chosen = [name for name in chosen if name in changed.splitlines()]
        print(f"changed since {arguments.since}: {', '.join(chosen) or 'none of these files'}")
    for name in chosen:
        test_file(name, known[name], arguments.sample, arguments.seed, again=arguments.again)


def test_file(name: str, tests: str, sample: int, seed: int, *, again: bool) -> None:
    """Run the tests of one file against its mutants, in a copy of the project."""
    copy = PROJECT / "build" / "mutants" / name.replace("/", "-").removesuffix(".py")
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for item in COPIED:
        source = PROJECT / item
        if source.is_dir():
            shutil.copytree(source, copy / item, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / item)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    sys.path[0] = str(copy)
    begun_s = time.monotonic()
    if not _passes(tests, limit_s=600):  # fills the caches of compiled files, too
        sys.exit(f"the tests of {name} fail without a change; see {copy}/output.txt")
    limit_s = 20 + 3 * (time.monotonic() - begun_s)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutant may have the size and time of its original
    sys.dont_write_bytecode = True
    path = Path("fastload", name)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()

    mutants = _mutants(path, seed)
    tried = [(mutant, _difference(path, mutant)) for mutant in (mutants[:sample] if sample else mutants)]
    report = copy.parent / f"{copy.name}.txt"
    if again:
        before = report.read_text()
        tried = [(mutant, difference) for mutant, difference in tried if difference in before]
    num_survivors = 0
    original = path.read_text()
    with report.open("w") as log:
        for number, (mutant, difference) in enumerate(tried, start=1):
            apply_mutation(path, plugins.get_operator(mutant.operator_name)(), mutant.occurrence)
            if _passes(tests, limit_s):
                num_survivors += 1
                log.write(f"{mutant.operator_name}\n{difference}\n\n")
                log.flush()
            path.write_text(original)
            state = f"{number} of {len(tried)} tried ({len(mutants)} there are), {num_survivors} survived"
            print(f"{name}: {state}", flush=True)
    print(report.read_text())


def _difference(path: Path, mutant: MutationSpec) -> str:
    original = path.read_text()
    changed = mutate_code(original, plugins.get_operator(mutant.operator_name)(), mutant.occurrence)
    lines = difflib.unified_diff(original.splitlines(), changed.splitlines(), lineterm="", n=2)
    return "\n".join(list(lines)[2:])


def _passes(tests: str, limit_s: float) -> bool:
    """Whether pytest, in a fork of this process, passes within the time; processes it left are ended."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.modules["__main__"] = types.ModuleType("__main__")  # started workers need not import this file
        os._exit(int(pytest.main(shlex.split(f"{PYTEST} {tests}"))))
    pidfd = os.pidfd_open(pid)
    has_ended = bool(select.select([pidfd], [], [], limit_s)[0])
    os.close(pidfd)
    if not has_ended:
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1] == 0 and has_ended


def _mutants(path: Path, seed: int) -> list[MutationSpec]:
    """The mutants of a file in random order, one for each place and kind of operator."""
    tree = get_ast_from_path(path)
    ignored = _places_without_effect(path.read_text())
    mutants = []
    for operator in plugins.operator_names():
        if plugins.get_operator(operator).arguments():
            continue
        instance = plugins.get_operator(operator)()
        places = ((node, *place) for node in ast_nodes(tree) for place in instance.mutation_positions(node))
        for occurrence, (_, start, end) in enumerate(places):
            is_annotation = any(one <= start < other for one, other in ignored)
            if not is_annotation and operator != "core/NoOp":
                mutants.append(MutationSpec(path, operator, occurrence, start, end))
    random.Random(seed).shuffle(mutants)
    firsts: dict[Any, MutationSpec] = {}
    for mutant in mutants:
        firsts.setdefault((mutant.start_pos, mutant.operator_name.split("_")[0]), mutant)
    return list(firsts.values())


def _places_without_effect(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations, docstrings and imports for types alone stand: (line, column) of start and end."""
    found: list[Any] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            found.append(node.returns)
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            found.append(node.annotation)
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            found.append(node)
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in found if n is not None]


if __name__ == "__main__":
    main()
