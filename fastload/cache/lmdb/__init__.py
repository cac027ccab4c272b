"""Finished cache files: their format, and how they are read."""
