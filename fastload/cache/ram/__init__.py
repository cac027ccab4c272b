"""Caches in RAM: shared memory that other processes can find, and what lies in it.

Read in this order: `arena` (a segment, and the records in it), `registry` (how processes find it). Two caches
build on them: `shared` (samples by index, in one arena) and `store` (decoded files by key, in several).
"""
