"""Tools for the training loop: out-of-memory retries, torch's speed switches, memory and machine reports.

Read `oom` (retries), `backends` (the switches), `report` and `machine_report`.
"""
