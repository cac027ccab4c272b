"""Formats byte counts and times for people: in logs, in reports about caches and on the command line."""


def readable_size(nbytes: float) -> str:
    """``nbytes`` in powers of 1000: ``1.5 GB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"


def readable_memory(nbytes: int) -> str:
    """``nbytes`` of memory in powers of 1024, as torch's messages and nvidia-smi show it: ``1.50 GiB``."""
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.2f} MiB"


def readable_time(seconds: float) -> str:
    """``seconds`` with three digits: ``1.5 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
