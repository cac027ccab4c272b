"""Run the tests on other releases of Python, PyTorch and NumPy. Run by `make test-matrix`.

    python tests/compatibility/run.py                          # all rows
    python tests/compatibility/run.py --only "3.12, torch newest" --keep
    python tests/compatibility/run.py --pythons "python3.11 ~/builds/python3.13t"

Each row of ROWS gets an environment of its own in build/matrix, which runs the tests without the markers
`slow` and `matrix`. After each row, its result, or the reason why it cannot run here, goes to
benchmarks/results/compatibility.json, of which benchmarks/figures.py makes the table in docs/index.md.

This program needs only the standard library of Python 3.11 or later. If pip finds only a CUDA build of torch,
it compiles small libraries in the place of 3 GB of CUDA libraries (cuda_stand_ins.py), with gcc and binutils.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from cuda_stand_ins import write_stand_ins

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build" / "matrix"
RESULTS = ROOT / "benchmarks" / "results" / "compatibility.json"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

TIER = "not slow and not matrix"
LIMIT_S = 1800  # of the tests of a row
# Of pyproject.toml; without `frameworks`, whose tests are then skipped.
GROUPS = ["libraries", "photos", "remote", "pytest"]
SHOWN = {name: name for name in ("torch", "numpy", "albumentations", "opencv", "pillow", "lmdb", "fsspec")}
SHOWN["opencv"] = "opencv-python-headless"
SMALL_CUDA = ("cudart", "cupti")  # the parts of CUDA that `import torch` calls
# In the text of a test that needs what could not be installed: Python's words, and fastload's.
_MISSING = "No module named|which is not installed"
INTERPRETER = """
import sys, sysconfig
free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
print("%d.%d" % sys.version_info[:2] + "t" * free_threaded)
"""


@dataclass(frozen=True)
class Row:
    """One combination of releases.

    Attributes:
        python: Such as "3.13", or "3.13t" for the free-threaded build, whose tests run without the GIL.
        torch: A release; "pinned" for the one that pyproject.toml pins for the whole suite; or "newest".
        libraries: "pinned" as in pyproject.toml; "oldest": the lower bounds of the project's dependencies; or
            "newest" within the project's ranges.
    """

    python: str
    torch: str
    libraries: str = "pinned"

    def __str__(self) -> str:
        """The row's name on the command line and in the output."""
        others = "" if self.libraries == "pinned" else f", {self.libraries} libraries"
        return f"{self.python}, torch {self.torch}{others}"

    @property
    def folder(self) -> Path:
        """The row's environment."""
        return ENVIRONMENTS / re.sub(r"\W+", "-", str(self))


ROWS = [
    Row("3.11", "2.6.0", "oldest"),
    Row("3.11", "pinned"),
    Row("3.11", "2.14.1"),
    Row("3.12", "2.6.0"),
    Row("3.12", "2.9.1"),
    Row("3.12", "newest"),
    Row("3.13", "2.6.0"),
    Row("3.13", "newest"),
    Row("3.13", "newest", "newest"),
    Row("3.14", "newest"),
    Row("3.13t", "2.9.1"),
    Row("3.14t", "newest"),
]


class NotAvailableError(Exception):
    """A row cannot run on this machine; the text is the reason."""


def interpreters(named: list[str]) -> dict[str, str]:
    """The Python of each version that the rows name, of the given commands or else of those on PATH."""
    found: dict[str, str] = {}
    for command in named or dict.fromkeys(f"python{row.python}" for row in ROWS):
        path = shutil.which(Path(command).expanduser())
        if path is None:
            continue
        answer = subprocess.run([path, "-c", INTERPRETER], capture_output=True, text=True, check=False)
        if answer.returncode == 0:  # a shim of pyenv exists for versions that are not chosen, too, and fails
            found.setdefault(answer.stdout.strip(), path)
    return found


def make_environment(row: Row, interpreter: str, torch_index: str | None) -> list[str]:
    """Install a row's releases into its folder; the requirements that could not be installed."""
    shutil.rmtree(row.folder, ignore_errors=True)
    command = [interpreter, "-m", "venv", row.folder]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise NotAvailableError(f"python -m venv failed: {_last_line(made.stdout + made.stderr)}")
    _install_torch(row, torch_index)
    requirements = _libraries(row)
    if _pip(row, *requirements):
        left_out = []
    else:  # one of them has no wheel: take another release of it, or do without
        left_out = [r for r in requirements if not _pip(row, r) and not _pip(row, _of_any_release(r))]
    if not _pip(row, "--no-deps", "--editable", str(ROOT), binary=False):
        raise NotAvailableError("pip cannot install fastload")
    return left_out


def _install_torch(row: Row, index: str | None) -> None:
    """Install torch, and what it imports; of CUDA the two small packages that it calls without a GPU."""
    pinned = next(r for r in PROJECT["dependency-groups"]["runtime"] if str(r).startswith("torch=="))
    requirement = {"newest": "torch", "pinned": pinned}.get(row.torch, f"torch=={row.torch}")
    options = ["--index-url", index] if index else []
    if not _pip(row, "--no-deps", "--no-cache-dir", *options, requirement):
        raise NotAvailableError(f"pip finds no wheel of {requirement} for Python {row.python}")
    packages = next((row.folder / "lib").glob("python*")) / "site-packages"
    metadata = HeaderParser().parsestr(next(packages.glob("torch-*.dist-info/METADATA")).read_text())
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    of_cuda = [line for line in needed if line.startswith(("nvidia-", "cuda-", "triton"))]
    small = [line for line in of_cuda if re.match(r"nvidia-cuda-(runtime|cupti)", line)]
    toolkits = [line for line in of_cuda if line.startswith("cuda-toolkit")]
    small += [re.sub(r"\[.*?\]", f"[{','.join(SMALL_CUDA)}]", line) for line in toolkits]
    if not _pip(row, *(line for line in needed if line not in of_cuda), *small):
        raise NotAvailableError(f"pip cannot install what {requirement} needs")
    if of_cuda:
        try:
            write_stand_ins(packages / "torch")
        except FileNotFoundError as error:
            raise NotAvailableError(f"{error.filename} is not installed; see --torch-index") from error


def _libraries(row: Row) -> list[str]:
    """The requirements of the tests, torch apart."""
    pinned = [r for group in GROUPS for r in PROJECT["dependency-groups"][group]]
    if row.libraries == "pinned":
        return pinned
    tools = PROJECT["dependency-groups"]["pytest"]
    others = [requirement for requirement in pinned if requirement not in tools]
    if row.libraries == "newest":
        return [*tools, *map(_of_any_release, others)]
    bounds = dict(re.match(r"([\w-]+)>=([\d.]+)", text).groups() for text in _ranges())  # type: ignore[union-attr]
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in others]  # type: ignore[index]
    return [*tools, *(f"{name}=={bounds[name]}.*" if name in bounds else name for name in names)]


def _ranges() -> list[str]:
    """The requirements of the project itself, with those of its extras."""
    project = PROJECT["project"]
    return [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]


def _of_any_release(requirement: str) -> str:
    """A pinned requirement, without its pin but within the project's own range."""
    name = requirement.partition("==")[0]
    return next((text for text in _ranges() if re.match(r"[\w-]+", text)[0] == name), name)  # type: ignore[index]


def _pip(row: Row, *arguments: str, binary: bool = True) -> bool:
    """Whether pip could install this into the row's environment. Wheels alone: nothing is compiled."""
    options = ["--quiet", "--disable-pip-version-check", *(["--only-binary", ":all:"] if binary else [])]
    command = [row.folder / "bin" / "pip", "install", *options, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"  pip install {' '.join(arguments)}: {_last_line(done.stderr)}")
    return done.returncode == 0


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def releases(row: Row) -> dict[str, str | None]:
    """The releases in a row's environment; None for what is not installed."""
    script = (
        "import importlib.metadata as m, json, platform\n"
        "known = {(one.metadata['Name'] or '').lower(): one.version for one in m.distributions()}\n"
        "print(json.dumps({**known, 'python': platform.python_version()}))\n"
    )
    command = [row.folder / "bin" / "python", "-c", script]
    known = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {"python": known["python"], **{name: known.get(package) for name, package in SHOWN.items()}}


def run_tests(row: Row, left_out: list[str]) -> dict[str, Any]:
    """Run the tier in a row's environment: how many tests passed, and the names of those that failed."""
    report = row.folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [row.folder / "bin" / "python", "-m", "pytest", "-q", "-m", TIER, "--junitxml", report]
    command += ["--numprocesses", "2", "--dist", "worksteal"]
    environment = dict(os.environ)
    if row.python.endswith("t"):  # else the import of an extension that is not ready brings the GIL back
        environment["PYTHON_GIL"] = "0"
    log = row.folder / "tests.log"
    try:
        with log.open("w") as file:
            options: dict[str, Any] = {"cwd": ROOT, "env": environment, "timeout": LIMIT_S, "check": False}
            code = subprocess.run(command, stdout=file, stderr=file, **options).returncode
    except subprocess.TimeoutExpired as error:
        raise NotAvailableError(f"the tests took longer than {LIMIT_S} s") from error
    if not report.exists():
        raise NotAvailableError(f"pytest ended with status {code}: {_last_line(log.read_text())}")
    suite = next(ET.parse(report).iter("testsuite"))
    names: dict[str, set[str]] = {"passed": set(), "skipped": set(), "failed": set(), "not_run": set()}
    for case in suite.iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        outcome = _outcome(case, left_out)
        names[outcome].add(name)
        if outcome == "failed":
            print(f"  failed: {name}: {_problems(case)[0].get('message', ''):.300}".replace("\n", " "))
    for kind, others in itertools.combinations(names, 2):  # a test and its fixture are reported one by one
        names[kind] -= names[others]
    return {
        **{outcome: len(names[outcome]) for outcome in ("passed", "failed", "skipped")},
        "failures": sorted(names["failed"]),
        "not_run": sorted(names["not_run"]),
        "seconds": round(float(suite.get("time", 0))),
    }


def _problems(case: ET.Element) -> list[ET.Element]:
    return [child for child in case if child.tag in ("failure", "error")]


def _outcome(case: ET.Element, left_out: list[str]) -> str:
    """How a test or the import of its file ended; not_run: it imports what could not be installed."""
    problems = _problems(case)
    if not problems:
        return "passed" if case.find("skipped") is None else "skipped"
    # What a test that could not run has left behind is reported beside its error.
    is_import = any(re.search(_MISSING, f"{problem.get('message')}{problem.text}") for problem in problems)
    return "not_run" if left_out and is_import else "failed"


def machine() -> str:
    """What the tests ran on, in words."""
    found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    model, kernel = found[1] if found else "unknown CPU", platform.release().split("-")[0]
    return f"{len(os.sched_getaffinity(0))} cores, {model}, no GPU, Linux {kernel}"


def save(row: Row, result: dict[str, Any]) -> None:
    """Put a row's result into the file, in the order of ROWS, and into the pages that show it.

    Rows that are no longer in ROWS leave the file.
    """
    kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    results = {tuple(entry["asked"]): entry for entry in kept}
    results[row.python, row.torch, row.libraries] = {
        "asked": [row.python, row.torch, row.libraries],
        **result,
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "machine": machine(),
    }
    keys = [(other.python, other.torch, other.libraries) for other in ROWS]
    rows = [results[key] for key in keys if key in results]
    content = {"command": "make test-matrix", "tier": TIER, "rows": rows}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    # Now, because a test of the next row compares the pages with the results.
    subprocess.run([sys.executable, ROOT / "benchmarks" / "figures.py"], check=True)


def run(row: Row, found: dict[str, str], arguments: argparse.Namespace) -> None:
    """One row: its environment, its tests, its result."""
    print(row, flush=True)
    left_out_file = row.folder / "left_out.json"
    try:
        if row.python not in found:
            raise NotAvailableError(f"no python{row.python} on this machine")
        if not left_out_file.exists():
            left_out = make_environment(row, found[row.python], arguments.torch_index)
            left_out_file.write_text(json.dumps(left_out))
        left_out = json.loads(left_out_file.read_text())
        result: dict[str, Any] = {
            **releases(row),
            **run_tests(row, left_out),
            "not_installed": left_out,
        }
        print(f"  {result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped")
    except NotAvailableError as error:
        result = {"not_available": str(error)}
        print(f"  not available: {error}")
    save(row, result)
    if not arguments.keep:
        shutil.rmtree(row.folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythons", default="", help="commands or paths of interpreters; else those on PATH")
    names = "; ".join(map(str, ROWS))
    parser.add_argument("--only", action="append", help=f"a row by its name; one of: {names}")
    parser.add_argument("--keep", action="store_true", help="keep the environments (1 to 3 GB each)")
    parser.add_argument("--torch-index", help="a package index for torch alone, such as PyTorch's own")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if not arguments.only or str(row) in arguments.only]
    if not rows:
        sys.exit(f"no such row; the rows are: {names}")
    found = interpreters(arguments.pythons.split())
    for row in rows:
        run(row, found, arguments)


if __name__ == "__main__":
    main()
