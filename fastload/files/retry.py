"""Requests to a store: watched while they run, aborted when they stall, and retried.

Rules:

1. A transient error (a connection, a time-out, a busy server, a truncated body) is retried with growing
   pauses. A permanent error (no such file, no credentials, no permission) is raised at once.
2. A request without progress is aborted after `Limits.read_s`, and the next attempt uses a new connection.
   The HTTP client and s3fs see every byte that arrives and apply this limit themselves. For other file
   systems only the result is visible: a request is aborted after that time plus an allowance for its length,
   and each further attempt has twice the time, so a slow network gets there.
3. A slow request is a warning, however it ends.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from fastload.files.file_systems import READ_VARIABLE, is_denied
from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.files.file_systems import Limits

T = TypeVar("T")

# Errors that a retry would hit again.
PERMANENT = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(NotImplementedError, TypeError, ValueError, ImportError, AttributeError, MemoryError),
)
_ATTEMPTS = 6
_FIRST_PAUSE_S = 0.1  # doubled after each attempt; six attempts take three seconds of pauses
_SLOW_S, _WARN_EVERY_S = 5.0, 30.0
_SLOWEST_BYTES_PER_S = 1 << 20  # the allowance for a large file: its length at this rate


class OtherLengthError(OSError):
    """A body was cut short, or the file was replaced after the folder was listed."""


class StalledError(OSError):
    """A request had no result in time."""


def retry(attempt: Callable[[int], T], failed: Callable[[Exception, str], Exception], limits: Limits) -> T:
    """The result of the first attempt that succeeds.

    Failed attempts are logged; as a warning if they have taken several seconds, because a client with its own
    retries can take a minute to find that the endpoint is wrong.

    Args:
        attempt: What to try; called with the number of the attempt, from 1.
        failed: Makes the error to raise from the last error and a clause about the attempts.
        limits: No attempt begins after the time in which all of them stall.
    """
    started_s = _now_s()
    number = 0
    while True:
        number += 1
        try:
            return attempt(number)
        except Exception as error:
            if _is_permanent(error):
                raise failed(error, "") from error
            took_s = _now_s() - started_s
            if number == _ATTEMPTS or took_s >= _ATTEMPTS * limits.read_s:
                raise failed(error, f" (tried {number} times in {took_s:.1f} s)") from error
            failure = failed(error, f" (attempt {number} of {_ATTEMPTS}, after {took_s:.1f} s)")
            log.log(logging.WARNING if took_s >= _SLOW_S and _may_warn() else logging.INFO, "%s", failure)
            _sleep(_pause_s(number))


def is_transient(error: Exception) -> bool:
    """Whether an error of `retry` is transient, such as a network outage."""
    return error.__cause__ is None or not _is_permanent(error.__cause__)


def _is_permanent(error: BaseException) -> bool:
    return isinstance(error, PERMANENT) or is_denied(error)


def request(
    fs: Any, method: str, *args: Any, what: str, limit_s: float = math.inf, nbytes: int = 0, **options: Any
) -> Any:
    """The result of a file system's method; a warning if it is slow.

    Args:
        fs: The file system.
        method: The name of its method.
        args: The method's arguments.
        what: The URL, for people.
        limit_s: Seconds until the request is aborted, besides the time for its length.
        nbytes: Its length, as far as it is known.
        options: The method's keyword arguments.

    Raises:
        StalledError: There was no result in time.
    """
    longer_s = max(0, nbytes) / _SLOWEST_BYTES_PER_S
    slow_s, limit_s = _SLOW_S + longer_s, limit_s + longer_s
    result = _send(fs, method, args, options)
    try:
        if not wait([result], min(slow_s, limit_s)).done and slow_s < limit_s:
            if _may_warn():
                log.warning(
                    "%s: no complete answer in %.0f s; a request without progress is retried after the "
                    "seconds in %s",
                    *(what, slow_s, READ_VARIABLE),
                )
            wait([result], None if limit_s == math.inf else limit_s - slow_s)
        if not result.done():
            raise StalledError(f"no complete answer in {limit_s:.1f} s")
        return result.result()
    finally:
        result.cancel()  # closes the connection; does nothing once there is a result
        del result  # else an error would keep itself alive


def _send(fs: Any, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Future[Any]:
    """Call a method; its result can be waited for with a limit."""
    inner = getattr(fs, f"_{method}", None)
    if getattr(fs, "async_impl", False) and not fs.asynchronous and inspect.iscoroutinefunction(inner):
        import asyncio

        return asyncio.run_coroutine_threadsafe(inner(*args, **options), fs.loop)
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()
    call = functools.partial(getattr(fs, method), *args, **options)
    try:
        # A thread for each request: one that never gets its answer keeps its thread.
        threading.Thread(target=_run, args=(result, call), name="fastload-request", daemon=True).start()
    except RuntimeError:  # the system has no more threads; then nothing watches
        _run(result, call)
    return result


def _run(result: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result.set_result(call())
    except BaseException as error:  # noqa: BLE001  # raised by `request`
        result.set_exception(error)
        del result  # else the error would keep itself alive


def _may_warn() -> bool:
    """Whether the last warning of this process was some time ago: 64 requests can fail at the same time."""
    now_s = _now_s()
    if now_s < _warned["at_s"] + _WARN_EVERY_S:
        return False
    _warned["at_s"] = now_s
    return True


def _pause_s(number: int) -> float:
    """The pause after a failed attempt, half of it random, so processes do not all come back at once.

    The random part does not come from `random`, whose state belongs to the user's code.
    """
    return _FIRST_PAUSE_S * float(2 ** (number - 1)) * (0.5 + os.urandom(1)[0] / 510)


_warned = {"at_s": float("-inf")}  # of this process

_sleep, _now_s = time.sleep, time.monotonic  # tests replace them


def reason_of(error: Exception) -> str:
    """The error of an attempt in words."""
    text = str(error) or repr(error)
    has_clear_text = isinstance(error, (OtherLengthError, StalledError))
    return text if has_clear_text else f"{type(error).__name__}: {text}"
