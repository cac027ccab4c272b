"""Programs in processes of their own, all for the price of one import of torch; gates and ends of processes.

One process runs what the programs share, and forks a child for each; the child leaves through the end of the
script, as any interpreter does: threads are joined, atexit functions and finalizers run.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT = Path(__file__).parents[2]  # of the checkout: the package itself may be an installed wheel

_SCRIPT = """
import atexit, gc, json, os, signal, sys, threading
sys.path[:0] = {path!r}
{shared}


def read_all(fd, texts, place):
    with open(fd) as file:
        texts[place] = file.read()


def run(request):
    '''Fork a child; gives None in the child, and the child's exit code and output in the parent.'''
    out, err = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out[1], 1)
        os.dup2(err[1], 2)
        for fd in (*out, *err):
            os.close(fd)
        os.chdir(request["cwd"])
        os.environ.update(request["environment"])
        sys.argv[1:] = request["arguments"]
        signal.alarm(request["limit_s"])
        return None
    os.close(out[1])
    os.close(err[1])
    texts = [None, None]  # each ends when nobody is left who could write
    reader = threading.Thread(target=read_all, args=(err[0], texts, 1))
    reader.start()
    read_all(out[0], texts, 0)
    reader.join()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *texts


gc.freeze()  # what was imported needs not be looked through at each exit
program = ""
for line in sys.stdin:
    request = json.loads(line)
    result = run(request)
    if result is None:
        program = request["program"]
        break
    print(json.dumps(result), flush=True)
if program:
    code = None
    try:
        exec(program)
    except SystemExit as error:
        code = error.code
        if request["exits"] or isinstance(code, str):
            raise
    if not request["exits"]:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
"""


# Runs the file in sys.argv[1] as `python -W error::UserWarning FILE` does.
AS_A_SCRIPT = """
import os, runpy, sys, warnings
sys.argv[:] = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
sys.warnoptions.append("error::UserWarning")
warnings.filterwarnings("error", category=UserWarning)
names = runpy.run_path(sys.argv[0], run_name="__main__")  # its globals live until the interpreter exits
"""


class Interpreter:
    """Runs programs, each in a child of its own; what they share runs once, before all of them."""

    def __init__(self, shared: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT.format(path=[str(ROOT), *sys.path], shared=shared)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        program: str,
        *arguments: str,
        cwd: Path = ROOT,
        environment: Mapping[str, str] | None = None,
        limit_s: int = 60,
        exits: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, or until SIGALRM ends it; gives its exit code and output.

        Without `exits`, its objects are not freed at its end: that copies the memory that it shares with the
        interpreter, and takes longer than most programs. Threads are joined, and atexit functions run.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request: dict[str, Any] = {"program": program, "arguments": arguments, "cwd": str(cwd)}
        request |= {"environment": dict(environment or {}), "limit_s": limit_s, "exits": exits}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the interpreter that runs programs has ended; its error is on stderr"
        return subprocess.CompletedProcess([program], *json.loads(line))

    def close(self) -> None:
        self._process.communicate()

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Gate:
    """Lets one sample of a dataset through each time that it is opened; forked workers inherit it."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def wait(self) -> None:
        os.read(self._read, 1)

    def open(self, times: int = 1) -> None:
        os.write(self._write, b"." * times)

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def still_running(pids: Iterable[int], limit_s: float) -> list[int]:
    """Which of these processes have not ended after a time; a zombie has ended."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    return [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def on_a_terminal(*words: str) -> tuple[int, list[str]]:
    """Run `fastload ...` with a terminal for standard error; the exit code, and what it showed."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fastload", *words], env=environment, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    try:
        with open(ours, "rb", 0) as terminal:
            while data := terminal.read(1 << 16):
                shown += data
    except OSError:  # it was closed at the other end
        pass
    text = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown).decode()
    return process.wait(90), re.split(r"[\r\n]+", text)
