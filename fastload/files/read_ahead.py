"""ReadAhead: reads announced files in threads, so that their latencies overlap.

A process announces the files of its next batches and then takes them one by one. Rules:

1. `take` never waits for anything but the file that it returns. A file that no thread has begun to read is
   read by the caller.
2. Files that were read and not taken hold at most `window_bytes`, and one file more. Threads wait while the
   window is full. If the caller has to read a file itself meanwhile, all files of earlier announcements are
   dropped, because the caller has gone past them; if there are none, the oldest files are dropped.
3. The error of a file is raised by `take`, in the caller's thread.
4. The threads are daemons: a file that never arrives does not keep the process alive.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_WINDOW_BYTES = 256 << 20
_GUESSED_BYTES = 1 << 20  # of a file whose length is unknown until it arrives
_MOST_ANNOUNCED = 1 << 14


class _State(Enum):
    WAITING = auto()
    READING = auto()
    DONE = auto()


class _File:
    """A file that was announced."""

    __slots__ = ("announcement", "data", "error", "nbytes", "state")

    def __init__(self, nbytes: int, announcement: int) -> None:
        self.state = _State.WAITING
        self.nbytes = nbytes
        self.announcement = announcement
        self.data = b""
        self.error: BaseException | None = None


class ReadAhead:
    """Reads files before they are needed.

    Args:
        read: Returns the content of the file of a number; called in several threads at the same time.
        nbytes_of: The length of that file; negative if it is unknown.
        num_threads: How many files are read at the same time.
        window_bytes: The most bytes of files that were read, or are being read, and were not taken.
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
        lock = threading.Lock()
        self._has_work = threading.Condition(lock)  # for the threads
        self._is_done = threading.Condition(lock)  # for callers of `take`
        self._files: OrderedDict[int, _File] = OrderedDict()  # announced and not taken, oldest first
        self._waiting: deque[int] = deque()  # numbers of files to read; some were taken meanwhile
        self._used_bytes = 0  # of files that are being read, or were read and not taken
        self._num_announcements = 0
        self._num_idle = 0
        self._num_threads_begun = 0
        self._is_closed = False
        self._pid = os.getpid()

    def announce(self, numbers: Iterable[int]) -> None:
        """Begin to read these files, in this order, after those that were announced before; never blocks."""
        with self._has_work:
            if self._is_closed:
                return
            self._num_announcements += 1
            for number in numbers:
                if number in self._files:
                    continue
                nbytes = self._nbytes_of(number)
                nbytes = _GUESSED_BYTES if nbytes < 0 else nbytes
                self._files[number] = _File(nbytes, self._num_announcements)
                self._waiting.append(number)
            while len(self._files) > _MOST_ANNOUNCED:
                self._drop(next(iter(self._files)))
            wanted = self._num_threads_begun + len(self._waiting) - self._num_idle
            while self._num_threads_begun < min(wanted, self._num_threads):
                try:
                    threading.Thread(target=self._serve, name="fastload-read-ahead", daemon=True).start()
                except RuntimeError:  # the system has no more threads; `take` needs none
                    break
                self._num_threads_begun += 1
            self._has_work.notify(len(self._waiting))

    def take(self, number: int) -> bytes:
        """The content of a file, which is read now unless it was announced.

        Raises:
            Exception: The error of reading it.
        """
        with self._is_done:
            file = self._files.get(number)
            if file is not None and file.state is not _State.WAITING:
                while file.state is _State.READING:
                    self._is_done.wait()
                if self._files.get(number) is file:
                    self._drop(number)
                if file.error is not None:
                    raise file.error
                return file.data
            if file is not None:
                self._drop(number)
                if self._is_full:
                    self._make_room(file.announcement)
        return self._read(number)

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop announced files that will not be taken."""
        with self._has_work:
            for number in numbers:
                if number in self._files:
                    self._drop(number)

    def close(self) -> None:
        """Drop all files, and end the threads once they have finished their files."""
        if os.getpid() != self._pid:
            return  # a forked child has none of the threads, and one of them may hold the lock for ever
        with self._has_work:
            self._is_closed = True
            self._files.clear()
            self._waiting.clear()
            self._has_work.notify_all()

    @property
    def _is_full(self) -> bool:
        return self._used_bytes >= self._window_bytes

    def _make_room(self, announcement: int) -> None:
        """Drop the files of earlier announcements, and then the oldest files until the window has room."""
        for number, file in list(self._files.items()):
            if file.announcement < announcement or (self._is_full and file.state is _State.DONE):
                self._drop(number)

    def _drop(self, number: int) -> None:
        file = self._files.pop(number)
        if file.state is _State.DONE:
            self._used_bytes -= file.nbytes
            if self._waiting:
                self._has_work.notify()

    def _serve(self) -> None:
        while self._read_next():
            pass

    def _read_next(self) -> bool:
        """Read one file; returns False once this is closed."""
        found = self._next()
        if found is None:
            return False
        number, file = found
        try:
            file.data = self._read(number)
        except BaseException as error:  # noqa: BLE001  # raised by `take`
            file.error = error
        with self._is_done:
            self._used_bytes -= file.nbytes
            file.nbytes = len(file.data)
            file.state = _State.DONE
            if self._files.get(number) is file:
                self._used_bytes += file.nbytes
            if not self._is_full and self._waiting:
                self._has_work.notify()
            self._is_done.notify_all()
        return True

    def _next(self) -> tuple[int, _File] | None:
        """The next file to read; None once this is closed."""
        with self._has_work:
            while not self._is_closed:
                while self._waiting and not self._is_full:
                    number = self._waiting.popleft()
                    file = self._files.get(number)
                    if file is None or file.state is not _State.WAITING:
                        continue  # taken or forgotten meanwhile
                    file.state = _State.READING
                    self._used_bytes += file.nbytes
                    return number, file
                self._num_idle += 1
                self._has_work.wait()
                self._num_idle -= 1
            return None
