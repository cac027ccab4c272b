"""Turns a list of indices into a batch in memory.

Read `source` (datasets that make batches themselves, or read ahead), `fetch` (indices to samples), `collate`
and `stacking` (samples to a batch), `packing` (a batch to a message and shared memory, and its size), then
`failures` (samples that cannot be read).
"""
