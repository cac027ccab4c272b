"""Caches on disk: finished LMDB files, and how they are built, one piece at a time."""
