"""The names of the files in DEST.partial; only files with these names are changed or removed."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat

from fastload.cache.lmdb.files import MANIFEST_NAME

PLAN_NAME = "plan.json"
_SHARD = r"\d{5,}-of-\d{5,}"
_LASTING = rf"plan\.json|{_SHARD}\.lmdb|{_SHARD}\.errors\.jsonl"
# The third is a file being written, the last two are those of a local copy (see `lmdb.copies`).
NAMES = re.compile(
    rf"{_LASTING}|\.{_SHARD}\.lmdb\.fastload-lock|\.({_LASTING})\.\w{{1,64}}\.[0-9a-f]{{16}}"
    rf"|{re.escape(MANIFEST_NAME)}|{_SHARD}\.lmdb\.part"
)
_SHARD_NAME = re.compile(rf"{_SHARD}\.lmdb")


def report_name(shard_file: str) -> str:
    """The name of the report about the samples that a shard leaves out."""
    return f"{shard_file.removesuffix('.lmdb')}.errors.jsonl"


def own_prefix(name: str) -> str:
    """The prefix of the temporary names under which processes of this machine write this file."""
    host = re.sub(r"[^\w]", "_", socket.gethostname(), flags=re.ASCII)[:64] or "_"
    return f".{name}.{host}."


def own_name(name: str) -> str:
    """A new temporary name for a file until it is complete."""
    return own_prefix(name) + os.urandom(8).hex()


def foreign_part(path: str) -> str | None:
    """The path of a file or directory at PATH that no build made; None if a build made all of them.

    A build leaves a directory of regular files with known names.
    """
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return path
        with os.scandir(path) as entries:
            for entry in entries:
                is_ours = NAMES.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
                if not is_ours and os.path.lexists(entry.path):  # else it was removed just now
                    return entry.path
    except (FileNotFoundError, NotADirectoryError):
        pass  # another process might have just removed the directory
    return None


def remove_all_but_shards(directory: str) -> None:
    """Remove the build's other files from the directory of a finished cache."""
    for name in os.listdir(directory):
        if NAMES.fullmatch(name) and not _SHARD_NAME.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))
