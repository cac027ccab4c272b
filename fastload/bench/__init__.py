"""Benchmarks of the user's own data: torch's loader and fastload's, in interleaved runs.

Read `run` (the whole of it), `configurations` (what is compared), `subprocess_runner` (each run has its own
process), `measure` (one run), `result` (medians, spread, the fastest) and `report`.
"""
