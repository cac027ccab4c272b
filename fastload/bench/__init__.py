"""Benchmarks of the user's own data: torch's loader and fastload's, in interleaved runs.

Read `configurations` (what is compared), `run` (each run in turn), `isolated` (each has its own process) and
`report` (medians, ranges, the fastest).
"""
