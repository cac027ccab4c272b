"""Servers on loopback, in processes of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_S3 = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.disable(logging.CRITICAL)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""

CREDENTIALS = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")
CREDENTIALS["AWS_DEFAULT_REGION"] = "us-east-1"


@contextlib.contextmanager
def _serving(
    program: str, folder: Path | None = None, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The URL of a program that prints its port and serves until its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(variables or {})},
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


def s3() -> contextlib.AbstractContextManager[str]:
    """The URL of an S3 server with no buckets."""
    return _serving(_S3, variables=CREDENTIALS)
