"""Formats byte counts for people: in logs, in reports about caches and on the command line."""


def readable_size(nbytes: float) -> str:
    """``nbytes`` in powers of 1000: ``1.5 GB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"


def readable_memory(nbytes: int) -> str:
    """``nbytes`` of memory in powers of 1024, as torch's messages and nvidia-smi show it: ``1.50 GiB``."""
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.2f} MiB"
