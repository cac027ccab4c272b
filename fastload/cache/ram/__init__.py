"""Caches in RAM: shared memory that other processes can find, its layout, and a private fallback."""
