"""Compares environments with constraints.txt, which pins all packages of the tests, the demo and the docs.

    python tests/compatibility/constraints.py build/constraints         # write the file (`make constraints`)
    python tests/compatibility/constraints.py --check .venv build/docs  # fail if a package is not pinned

The file has names and versions alone. CUDA's packages are missing: a build of torch pins its own.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parents[2] / "constraints.txt"
_OWN = re.compile(r"fastload-torch|pip|setuptools|wheel|triton|cuda-.*|nvidia-(?!nvimgcodec).*")


def installed(environment: Path) -> dict[str, str]:
    """The version of each package of an environment, by its normalized name, without a build's local part."""
    command = [environment / "bin" / "python", "-m", "pip", "list", "--format=json"]
    packages = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    named = {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"] for each in packages}
    return {name: text.partition("+")[0] for name, text in named.items() if not _OWN.fullmatch(name)}


def main() -> None:
    """Write or check the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("environments", nargs="+", type=Path, help="folders of virtual environments")
    parser.add_argument("--check", action="store_true", help="compare the file with them, and change nothing")
    args = parser.parse_args()
    found = {f"{name}=={text}" for folder in args.environments for name, text in installed(folder).items()}
    if not args.check:
        head = "# All packages of the tests, the demo and the docs; `make constraints` renews them."
        FILE.write_text("\n".join([head, *sorted(found), ""]))
    elif missing := sorted(found.difference(FILE.read_text().splitlines())):
        sys.exit(f"{FILE.name} is stale: `make constraints` renews it. It lacks {', '.join(missing)}")


if __name__ == "__main__":
    main()
