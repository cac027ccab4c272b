"""Caches in RAM: shared memory that other processes find, and what it is laid out as."""
