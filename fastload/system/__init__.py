"""The machine: its memory, CPUs, files and locks; the ranks of a job, the log, and errors from workers.

Read `budget` (how much memory to take), `cpus` and `limits` first.
"""
