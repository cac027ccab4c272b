"""Caches in RAM: shared memory that other processes can find, and what lies in it.

Read in this order: `arena` (a segment, and the space in it), `registry` (how processes find it). Two stores
build on them. Samples by index: `shared`. Decoded files by key: `table` (records in a segment), `store` (all
tables of a user).
"""
