"""Run a script or a module with emulated operators; __main__.py starts it under the libraries it built."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

from tests.emulated_cuda.kernels import EmulatedKernels


def main() -> None:
    sys.argv.pop(0)
    torch.backends.cudnn.enabled = False
    with EmulatedKernels():
        if sys.argv[0] == "-m":
            sys.argv.pop(0)
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
