"""Datasets behind caches, which decode each sample once.

Read in this order: `dataset` (the user's object), `open_cache` (chooses and opens a cache), `protocol` (the
interface of caches), `ram` and `lmdb` (the caches), `build` (fills them), `record` and `columns` (samples as
bytes).
"""
