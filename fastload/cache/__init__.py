"""Decode once: datasets behind caches.

Read in this order: `dataset` (what users hold), `open_cache` (which cache, and why), `protocol` (what a cache
is), `ram` and `lmdb` (the caches), `build` (how they are filled), `record` and `columns` (a sample as bytes).
"""
