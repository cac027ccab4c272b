"""Nested samples and batches: dicts, lists, tuples and namedtuples of arrays, tensors and plain values.

Read in this order: `leaf` (the types that a cache stores), `leaves` (values to bytes and back), `spec` (the
structure of a sample), `tree` (the walk over any nested value, also to a device).
"""
