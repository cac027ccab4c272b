"""Other jobs of the user: processes that open a cache, and hold it until the test ends them."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

FORK = multiprocessing.get_context("fork")


class Job:
    """A process that runs a function, which gives what it holds and an answer; then it does what is asked."""

    def __init__(self, work: Callable[..., Any], *args: Any) -> None:
        self._pipe, other = FORK.Pipe()
        self._process = FORK.Process(target=self._run, args=(work, args, other))
        self._process.start()
        other.close()

    @staticmethod
    def _run(work: Callable[..., Any], args: tuple[Any, ...], pipe: Connection) -> None:
        kept, answer = work(*args)
        pipe.send(answer)
        while True:
            work, args = pipe.recv()  # EOF when the parent is gone
            pipe.send(work(kept, *args))

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def answer(self) -> Any:
        return self._pipe.recv()

    def begin(self, work: Callable[..., Any], *args: Any) -> None:
        """Run a function of a module on what the job holds; `answer` gives its result."""
        self._pipe.send((work, args))

    def ask(self, work: Callable[..., Any], *args: Any) -> Any:
        self.begin(work, *args)
        return self.answer()

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def end(self) -> None:
        self.kill()
        self._pipe.close()
        self._process.close()
