"""Datasets behind caches, which decode each sample once.

Read in this order: `dataset` (the user's object), `open_cache` (chooses and opens a cache), `sample_cache`
(the interface of caches), `ram` and `lmdb` (the caches), `build` (fills them), `record` and `columns` (the
bytes of samples).
"""
