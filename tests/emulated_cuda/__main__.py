"""Build the emulated libraries, and run a script or a module over them: see the package."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

# torch looks the driver's functions up in its library, and uses one where it works through the runtime.
DRIVER = """
int emulated_context_state(int, unsigned *, int *);
#define NOT_SUPPORTED(name) int name(void) { return 801; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    return emulated_context_state(device, flags, is_active);
}
"""


def build(folder: Path, torch: Path) -> Path:
    """Compile the runtime library, and a driver of which torch only looks up the names; the former's path."""
    include = next((torch.parent / "nvidia").glob("cu*/include/cuda_runtime_api.h")).parent
    runtime = folder / "libemulated.so"
    options = ["-O1", "-g", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    source = HERE / "cudart.c"
    subprocess.run(["gcc", *options, f"-I{include}", source, "-o", runtime, "-lpthread"], check=True)

    asker = torch / "lib" / "libcaffe2_nvrtc.so"
    listing = ["nm", "-D", "--undefined-only", asker]
    found = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    words = {line.split()[-1] for line in found.splitlines()}
    names = {word for word in words if word.startswith("cu") and word[2].isupper() and "@" not in word}
    lines = [f"NOT_SUPPORTED({name})" for name in sorted(names - {"cuDevicePrimaryCtxGetState"})]
    driver = folder / "driver.c"
    driver.write_text("\n".join([DRIVER, *lines, ""]))
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", soname, driver, "-o", folder / "libcuda.so.1"], check=True)
    return runtime


def main() -> int:
    spec = importlib.util.find_spec("torch")
    if len(sys.argv) < 2 or spec is None or spec.origin is None or shutil.which("gcc") is None:
        sys.exit("usage: python -m tests.emulated_cuda SCRIPT|-m MODULE [ARGUMENT ...]; needs torch and gcc")
    torch = Path(spec.origin).parent
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        sys.exit(f"{torch} is no CUDA build; `make test-emulated` installs one in build/cuda")
    with tempfile.TemporaryDirectory(prefix="emulated-cuda-") as folder:
        runtime = build(Path(folder), torch)
        environment = dict(
            os.environ,
            LD_PRELOAD=str(runtime),
            LD_LIBRARY_PATH=os.pathsep.join(filter(None, [folder, os.environ.get("LD_LIBRARY_PATH")])),
            PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        )
        command = [sys.executable, "-m", "tests.emulated_cuda.run", *sys.argv[1:]]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
