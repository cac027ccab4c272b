"""Decode once: datasets behind caches.

Read in this order: `dataset` (what users hold), `opening` (which cache, and why), `protocol` (what a cache
is), `ram` and `disk` (the caches), `record`, `spec` and `leaves` (what a sample is as bytes).
"""
