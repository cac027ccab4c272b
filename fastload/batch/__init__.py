"""From a list of indices to a batch in memory.

Read in this order: `fetch` (indices to samples), `collate` and `stacking` (samples to a batch), `packing` (a
batch as a message and the memory it lies in); then `replacing` and `failures` (samples that cannot be read).
"""
