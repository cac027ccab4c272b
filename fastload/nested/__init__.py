"""Nested samples and batches: dicts, lists, tuples and namedtuples of arrays, tensors and plain values.

Read in this order: `leaves` (the types that a cache stores), `spec` (the structure of a sample), `tree`
(walks over samples on the host), `device_tree` (walks over batches that move to a device).
"""
