"""The machine's resources and errors, readable sizes, the log, and errors in transit from workers.

Each file stands alone. Read `budget` (how much memory to take), `cpus` and `cgroups` first.
"""
