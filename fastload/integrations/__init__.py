"""fastload in programs written for torch's loader.

Read `patch` first (what happens to torch's class), then `replaced` (the loader that it builds), and
`bootstrap` (how child processes do the same). `accelerate` and `ray` prepare a loader for a rank, with
`prepared` in common; `ray` also builds caches on a cluster. Each of these is imported only by name.
"""


def __dir__() -> list[str]:
    return ["accelerate", "ray"]
