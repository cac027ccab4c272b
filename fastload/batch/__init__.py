"""Turns a list of indices into a batch in memory.

Read in this order: `plan` (the settings); `source` (datasets that make batches, or are told what comes next),
`dataset_state` (datasets that save theirs), `fetch` (indices to samples), `collate`, `collate_errors` and
`stacking` (samples to a batch), `loader_collate` (what a framework that rebuilds the loader would lose),
`packing` (a batch to a message and shared memory, and its size), `failures` (samples that cannot be read).
"""
