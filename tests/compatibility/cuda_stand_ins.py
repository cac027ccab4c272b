"""Import a CUDA build of torch without CUDA's libraries: several GB that are not used without a GPU.

Such a build loads a dozen libraries when it is imported. It calls two of them then, the runtime (libcudart)
and CUPTI; these are small, and run.py installs them. This module compiles a library in the place of each of
the others, whose functions return an error. The tests never call them, because torch finds no GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

LOADED_ON_DEMAND = {"libcuda.so.1"}  # the driver; torch asks whether it is there
PREFIXES = ("libcu", "libnv", "libnccl")
ERROR = 1  # cudaErrorInvalidValue, and an error in the other libraries too


def write_stand_ins(torch: Path) -> list[str]:
    """Compile what `import torch` lacks into the package's folder of libraries; gives their names."""
    folder = torch / "lib"
    needed: set[str] = set()
    undefined: set[str] = set()  # names of functions, most with a version: cudnnCreate@libcudnn.so.9
    versions: dict[str, set[str]] = {}  # library -> the versions of functions that torch takes from it
    for library in folder.glob("*.so*"):
        undefined |= {line.split()[-1] for line in _lines("nm", "-D", "--undefined-only", library)}
        name = ""
        for line in _lines("readelf", "--wide", "--dynamic", "--version-info", library):
            if "(NEEDED)" in line:
                needed.add(line.split("[")[1].rstrip("]"))
            elif found := re.search(r"File: (\S+)  Cnt:", line):
                name = found[1]
            elif found := re.search(r"Name: (\S+)  Flags: .*  Version: ", line):
                versions.setdefault(name, set()).add(found[1])
    installed = {path.name for place in (folder, torch.parent / "nvidia") for path in place.rglob("*.so*")}
    missing = sorted(name for name in needed - installed - LOADED_ON_DEMAND if name.startswith(PREFIXES))
    for name in missing:
        _compile(folder / name, undefined, sorted(versions.get(name, ())))
    return missing


def _compile(path: Path, undefined: set[str], versions: list[str]) -> None:
    """Compile one library; a function without a version is its own if they begin alike, as cuFileRead."""
    prefix = path.name.removeprefix("lib").partition(".")[0].lower()
    groups = {v: {n.partition("@")[0] for n in undefined if n.endswith(f"@{v}")} for v in versions}
    unversioned = {name for name in undefined if "@" not in name and name.lower().startswith(prefix)}
    functions = unversioned.union(*groups.values())
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stand_in.c"), Path(folder, "versions")
        source.write_text("".join(f"int {name}(void) {{ return {ERROR}; }}\n" for name in sorted(functions)))
        lines = [f"{v} {{ {' '.join(f'{n};' for n in sorted(group))} }};\n" for v, group in groups.items()]
        script.write_text("".join(lines))
        options = [f"-Wl,--version-script={script}"] if groups else []
        options += ["-w", f"-Wl,-soname,{path.name}"]  # -w: gcc knows some names with other arguments
        subprocess.run(["gcc", "-shared", "-fPIC", *options, source, "-o", path], check=True)


def _lines(*command: str | Path) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
