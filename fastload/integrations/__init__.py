"""fastload in programs written for torch's loader.

Read `patch` first (what happens to torch's class), then `replaced` (the loader that it builds), `bootstrap`
(how a function of ours gets into an interpreter), and `run` (what `fastload run` does there).
"""
