"""Programs that each run in a process of its own, all for the price of one import of torch.

One process runs what the programs share, and forks a child for each; the child leaves through the end of the
script, as any interpreter does: threads are joined, atexit functions and finalizers run. What a program does
to its process cannot be taken back, and need not be.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_SCRIPT = """
import gc, json, os, signal, sys
sys.path[:0] = {path!r}
{shared}


def read_all(fd):
    with open(fd) as file:
        return file.read()


gc.freeze()  # what was imported needs not be looked through at each exit
results = {{}}
program = ""
for name, text in json.loads(sys.stdin.read()).items():
    out, err = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(out[1], 1)
        os.dup2(err[1], 2)
        for fd in (*out, *err):
            os.close(fd)
        signal.alarm({limit_s})
        program = text
        break
    os.close(out[1])
    os.close(err[1])
    texts = read_all(out[0]), read_all(err[0])  # ends when nobody is left who could write
    _, status = os.waitpid(child, 0)
    results[name] = os.waitstatus_to_exitcode(status), *texts
if program:
    exec(program)
else:
    print(json.dumps(results))
"""


def run_each(programs: dict[str, str], *, shared: str, limit_s: int = 30) -> dict[str, tuple[int, str, str]]:
    """The exit code, standard output and standard error of each program, by its name.

    Args:
        programs: Their texts.
        shared: What runs once, before all of them: imports and definitions.
        limit_s: How long one program may take before SIGALRM ends it.
    """
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(path=sys.path, shared=shared, limit_s=limit_s)],
        input=json.dumps(programs),
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found
