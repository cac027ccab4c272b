"""Benchmarks of the user's own data: torch's loader and fastload's, in interleaved runs.

Read `run` (the whole of it), `contenders` (the settings that are compared), `apart` (each run has a process
of its own), `measure` (one run), `plan` (how many samples), `rounds` (all runs, in turn), `result` (medians,
spread, the fastest), `machine` (its name, and how busy it is), `baseline` (an earlier benchmark), `report`
and `chart`.
"""
