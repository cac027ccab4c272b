"""The machine's resources and errors, what launchers say, the log, and errors in transit from workers.

Read `budget` (how much memory to take), `cpus` and `cgroups` first.
"""
