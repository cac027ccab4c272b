"""Batches made in other processes, or in threads.

Read in this order: `worker` (in the process), `pool` (its owner), `schedule` and `task` (which batch is
whose), `channel` and `job` (what travels), `process`, `starting` and `death_message` (how a worker begins and
ends), `threads`; `auto_workers` chooses how many there are.
"""
