"""Nested samples and batches: dicts, lists and tuples of arrays, tensors and plain values.

Read in this order: `leaf` (the types that a cache stores), `leaves` and `tensors` (values to bytes and back),
`spec` (the structure of a sample), `deferred` (images that are computed in the batch), `tree` (the walk over
any nested value, also to a device), `attributes` (those of any object).
"""
