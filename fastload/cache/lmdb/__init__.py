"""Finished cache files: their format, and the code that reads them.

Read in this order: `format` and `description` (the bytes of a file, and what it says about itself), `files`
(opening and reading a file), `lmdb_cache` (samples, and batches without a copy of each record),
`lmdb_dataset` (the samples as a dataset).
"""
