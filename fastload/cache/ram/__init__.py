"""Caches in RAM: shared memory that other processes can find, its layout, and a private fallback.

Read in this order: `arena` (a segment, and the space in it), `registry` (how processes find it), `layout`
(where samples lie in it), `shared` (the cache of samples), `private` (the fallback). `arena` and
`registry` know nothing of samples: a cache with keys of its own can build on them.
"""
