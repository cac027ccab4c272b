"""The machine's resources and refusals, readable sizes, the log, and errors in transit from workers.

Each file stands alone. Read `budget` (how much memory may be taken), `cpus` and `cgroups` first.
"""
