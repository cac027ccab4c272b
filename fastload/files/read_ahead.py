"""ReadAhead: reads announced files in threads, so their latencies overlap.

A process announces the files of its next batches and then takes them one by one. Rules:

1. `take` waits only for the file that it returns. The caller reads a file that no thread has begun to read.
2. Files read but not taken hold at most `window_bytes`, and one file more. If the window is full and the
   caller has to read a file itself, all files announced before it are dropped: the caller has passed them.
3. The error of a file is raised by `take`, in the caller's thread.
4. The threads are daemons: a file that never arrives does not keep the process alive.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_WINDOW_BYTES = 256 << 20
_GUESSED_BYTES = 1 << 20  # of a file whose length the store does not report
_MAX_ANNOUNCED = 1 << 14


class ReadAhead:
    """Reads files before they are needed.

    Args:
        read: Returns the content of the file of a number; called in several threads concurrently.
        nbytes_of: The length of that file; negative if it is unknown.
        num_threads: How many files are read concurrently.
        window_bytes: Maximum bytes of files that were read, or are being read, and were not taken.
    """

    def __init__(
        self,
        read: Callable[[int], bytes],
        nbytes_of: Callable[[int], int],
        *,
        num_threads: int,
        window_bytes: int = _WINDOW_BYTES,
    ) -> None:
        self._read = read
        self._nbytes_of = nbytes_of
        self._num_threads = num_threads
        self._window_bytes = window_bytes
        self._lock = threading.Lock()
        self._files: dict[int, Future[bytes]] = {}  # announced and not taken, oldest first
        self._waiting: deque[int] = deque()  # numbers of files beyond the window; some were taken meanwhile
        self._begun: dict[int, int] = {}  # the bytes of files that were handed to the threads
        self._used_bytes = 0  # the sum of these
        self._for_threads: queue.SimpleQueue[tuple[int, Future[bytes]] | None] = queue.SimpleQueue()
        self._threads = 0
        self._is_closed = False
        self._pid = os.getpid()

    def announce(self, numbers: Iterable[int]) -> None:
        """Begin to read these files, in this order, after those that were announced before; never blocks."""
        with self._lock:
            if self._is_closed:
                return
            for number in numbers:
                if number not in self._files:
                    self._files[number] = Future()
                    self._waiting.append(number)
            while len(self._files) > _MAX_ANNOUNCED:
                self._drop(next(iter(self._files)))
            self._begin()

    def take(self, number: int) -> bytes:
        """The content of a file, read now unless it was announced.

        Raises:
            Exception: The error of reading it.
        """
        with self._lock:
            future = self._files.get(number)
            if future is not None and future.cancel():  # no thread has begun it
                if self._used_bytes >= self._window_bytes:
                    for older in itertools.takewhile(lambda other: other != number, list(self._files)):
                        self._drop(older)
                self._drop(number)
                self._begin()
                future = None
        if future is None:
            return self._read(number)
        try:
            return future.result()
        finally:
            with self._lock:
                if self._files.get(number) is future:
                    self._drop(number)
                    self._begin()
            del future  # else its error would keep itself alive

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop announced files that will not be taken."""
        with self._lock:
            for number in numbers:
                if number in self._files:
                    self._drop(number)
            self._begin()

    def close(self) -> None:
        """Drop all files, and end the threads once they have finished their files."""
        if os.getpid() != self._pid:
            return  # a forked child has none of the threads, and one of them can hold the lock forever
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            for number in list(self._files):
                self._drop(number)
            for _ in range(self._threads):
                self._for_threads.put(None)

    def _drop(self, number: int) -> None:
        self._files.pop(number).cancel()
        self._used_bytes -= self._begun.pop(number, 0)

    def _begin(self) -> None:
        """Hand files to the threads, as far as the window has room."""
        while self._waiting and self._used_bytes < self._window_bytes:
            number = self._waiting.popleft()
            future = self._files.get(number)
            if future is None or number in self._begun:
                continue  # taken or forgotten meanwhile
            nbytes = self._nbytes_of(number)
            self._begun[number] = _GUESSED_BYTES if nbytes < 0 else nbytes
            self._used_bytes += self._begun[number]
            self._for_threads.put((number, future))
            if self._threads < min(len(self._begun), self._num_threads):
                try:
                    threading.Thread(target=self._serve, name="fastload-read-ahead", daemon=True).start()
                except RuntimeError:  # the system has no more threads; `take` needs none
                    continue
                self._threads += 1

    def _serve(self) -> None:
        while (file := self._for_threads.get()) is not None:
            number, future = file
            if not future.set_running_or_notify_cancel():
                continue
            try:
                data = self._read(number)
            except BaseException as error:  # noqa: BLE001  # raised by `take`
                future.set_exception(error)
            else:
                with self._lock:
                    if self._files.get(number) is future:  # its length might have been a guess
                        self._used_bytes += len(data) - self._begun[number]
                        self._begun[number] = len(data)
                future.set_result(data)
                del data
            del file, future  # while this waits, nothing else might need the content
