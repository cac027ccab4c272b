"""Turn a list of indices into a batch in memory.

Read in this order: `fetch` (indices to samples), `collate` and `stacking` (samples to a batch), `packing` (a
batch to a message and shared memory); then `replacing` and `failures` (samples that cannot be read).
"""
