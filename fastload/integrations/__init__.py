"""fastload in programs written for torch's loader.

Read `patch` first (what happens to torch's class), then `replaced` (the loader that it builds), and
`bootstrap` (how child processes do the same).
"""
