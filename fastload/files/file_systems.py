"""What differs between the kinds of file systems that fsspec opens: options, limits, credentials, versions.

fsspec and the package of a protocol are imported when a file system is made.
"""

from __future__ import annotations

import math
import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

CONNECT_VARIABLE = "FASTLOAD_CONNECT_TIMEOUT"
READ_VARIABLE = "FASTLOAD_READ_TIMEOUT"
# How many files one process reads concurrently.
READS_AT_ONCE = 64

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_COPYING = ("simplecache", "filecache", "blockcache")  # protocols of fsspec that keep copies
# Fields in which fsspec's file systems report the version of a file, best first.
_VERSION_FIELDS = (
    *("ETag", "etag", "e_tag", "blob_id", "md5Hash", "content_md5", "generation"),
    *("mtime", "LastModified", "last_modified", "updated", "created"),
)
# What clients raise without credentials, or with rejected ones, by name: most are not installed.
_DENIALS = frozenset(
    {
        *("NoCredentialsError", "CredentialRetrievalError", "PartialCredentialsError"),  # botocore
        *("ProfileNotFound", "TokenRetrievalError", "SSOError"),
        *("GoogleAuthError", "ClientAuthenticationError"),  # google-auth, azure
        *("PermissionDeniedError", "UnauthenticatedError"),  # obstore
    }
)

# By protocol: where credentials come from, and the storage_options for files that need none.
_S3 = (
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, or storage_options={'key': ..., 'secret': ...}",
    "{'anon': True}",
)
_GCS = ("gcloud auth application-default login, or storage_options={'token': FILE}", "{'token': 'anon'}")
_CREDENTIALS = {"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS}


def _protocol(url: str) -> str:
    match = _URL.match(url)
    return "" if match is None else match.group().rstrip(":/")


def join_url(url: str, name: str) -> str:
    """The URL of a file below a folder's, which fsspec opens: `zip://train::a.zip` holds `zip://train/x::a.zip`.

    Of protocols that keep copies, such as `simplecache::s3://bucket`, the next one has the path.
    """
    first, separator, rest = url.partition("::")
    if first in _COPYING and separator:
        return f"{first}::{join_url(rest, name)}"
    protocol, _, folder = first.partition("://")
    folder = folder.rstrip("/")
    return f"{protocol}://{folder}{folder and '/'}{name}{separator}{rest}"


class Limits(NamedTuple):
    """How long a store can keep a request waiting.

    Attributes:
        connect_s: Maximum seconds until a connection.
        read_s: Maximum seconds without data.
    """

    connect_s: float
    read_s: float

    @classmethod
    def of_environment(cls) -> Limits:
        """The limits that the user has set.

        Raises:
            ValueError: A variable is not a number of seconds.
        """
        return cls(_seconds(CONNECT_VARIABLE, 10.0), _seconds(READ_VARIABLE, 20.0))

    def apply(self, kind: type, options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """The options of a file system with these limits, and whether it aborts stalled requests itself.

        The user's own limits stay.

        Args:
            kind: The class of the file system.
            options: Its keyword arguments.
        """
        package = kind.__module__
        if package == "fsspec.implementations.http":
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.connect_s, sock_read=self.read_s)
            return _with_defaults(options, "client_kwargs", timeout=timeout), True
        if package.startswith("s3fs"):
            # botocore would repeat each request that s3fs repeats, and s3fs each that `retry` repeats.
            limits = {"connect_timeout": self.connect_s, "read_timeout": self.read_s}
            return _with_defaults(options, "config_kwargs", **limits, retries={"max_attempts": 0}), True
        if package.startswith("obstore"):
            options = _with_defaults(
                options, "client_options", connect_timeout=timedelta(seconds=self.connect_s)
            )
            # It retries for three minutes, and would be aborted before it gives a reason.
            pause = timedelta(seconds=self.read_s / 2)
            return _with_defaults(options, "retry_config", retry_timeout=pause), False
        return options, False


def _with_defaults(options: dict[str, Any], name: str, **defaults: Any) -> dict[str, Any]:
    return {**options, name: {**defaults, **(options.get(name) or {})}}


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, "").strip()
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{variable}={text!r} should be a number of seconds above zero, such as {default:g}")
    return seconds


def open_url(url: str, options: dict[str, Any], limits: Limits) -> tuple[Any, str, bool]:
    """A new file system for a URL, the URL's path in it, and whether it ends stalled requests itself.

    Raises:
        ImportError: A package is missing.
        ValueError: There is no such protocol, or an option is wrong.
    """
    try:
        import fsspec.core
    except ImportError as error:
        raise ImportError(
            f"{url} is not on this machine, and remote files need the package fsspec: pip install "
            '"fastload-torch[remote]"'
        ) from error
    _forget_thread_of_parent()
    name = _protocol(url)
    if name in ("s3", "s3a"):
        options = _for_s3fs(options)
    try:
        options, ends_stalled = limits.apply(fsspec.get_filesystem_class(name), options)
        # Without fsspec's table of instances, connections are closed once the folder is no longer used.
        fs, root = fsspec.core.url_to_fs(url, **{**options, "skip_instance_cache": True})
    except ImportError as error:
        raise ImportError(f"{url} needs a package that is not installed: {error}") from error
    except ValueError as error:
        raise ValueError(f"cannot open {url}: {error}") from error
    return _limit_retries(fs), root, ends_stalled


def _forget_thread_of_parent() -> None:
    """Let fsspec start its thread anew in a forked process.

    Older releases do not notice the fork: each read would wait forever for the parent's thread.
    """
    from fsspec import asyn

    thread = asyn.iothread[0]
    if thread is not None and not thread.is_alive():
        asyn.reset_lock()


def make_again(
    kind: Any, args: Any, options: dict[str, Any], url: str, limits: Limits, *, is_forked: bool
) -> tuple[Any, str, bool]:
    """A new file system like one of the user's; as `open_url`.

    Raises:
        RuntimeError: Such file systems do not work in a forked process.
    """
    if is_forked and kind.__module__.partition(".")[0] == "obstore":
        raise RuntimeError(
            f"{url} is read through obstore, whose threads do not survive a fork: reading would "
            'wait forever. Start workers with multiprocessing_context="forkserver" or "spawn"'
        )
    options, ends_stalled = limits.apply(kind, options)
    _forget_thread_of_parent()
    fs = kind(*args, **options, skip_instance_cache=True)
    root = str(fs._strip_protocol(url))
    if root == url and not url.startswith("http"):
        root = url.partition("://")[2]  # obstore's keeps the protocol, and returns names without it
    return _limit_retries(fs), root, ends_stalled


def _limit_retries(fs: Any) -> Any:
    if type(fs).__module__.startswith("s3fs"):
        fs.retries = 2  # by default up to 25 requests for one read, each of which can stall
    return fs


def _for_s3fs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of s3fs for many concurrent requests; the user's own stay.

    By default it has ten connections. It transfers parts of a file concurrently, and so requests the size of
    each file before reading it, which is one request too many for each small file.
    """
    config = {"max_pool_connections": READS_AT_ONCE, **(options.get("config_kwargs") or {})}
    return {"max_concurrency": 1, **options, "config_kwargs": config}


def is_web(fs: Any) -> bool:
    """Whether folders are web pages, and their entries links."""
    return type(fs).__module__ == "fsspec.implementations.http"


def version_of(entry: Mapping[str, Any]) -> str:
    """A text that changes with the content of a file, from its entry in a listing; empty if there is none."""
    return next((str(entry[field]) for field in _VERSION_FIELDS if entry.get(field)), "")


def is_denied(error: BaseException) -> bool:
    """Whether a client has no credentials, or the store does not accept them."""
    if isinstance(error, PermissionError):
        return True
    names = (cls.__name__ for cls in type(error).__mro__)
    # `status` of aiohttp, whose `code` is deprecated, and `code` of gcsfs
    status = getattr(error, "status" if hasattr(error, "status") else "code", None)
    return not _DENIALS.isdisjoint(names) or status in (401, 403)


def credentials_hint(error: Exception, url: str) -> str:
    """What to change if the store denies access, as a clause."""
    if not is_denied(error):
        return ""
    protocol = _protocol(url)
    keys, anonymous = _CREDENTIALS.get(protocol, ("see the documentation of its fsspec package", ""))
    public = f"; for public files, pass storage_options={anonymous}" if anonymous else ""
    return f". Check the credentials for {protocol}:// ({keys}){public}"
