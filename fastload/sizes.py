"""Numbers of bytes as people read them, in logs, reports of caches and the command line."""


def readable_size(nbytes: float) -> str:
    """``nbytes`` in powers of 1000: ``1.5 GB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"
