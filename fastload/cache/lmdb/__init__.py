"""Finished cache files: their format, and the code that reads them.

Read in this order: `format`, `table` and `description` (the bytes of a file, where its records are, and what
it says about itself), `files` and `open_file` (finding and opening files), `lmdb_cache` (the cache), `gather`
(batches without a copy of each record); then `manifest` and `copies` (caches in object stores).
"""
