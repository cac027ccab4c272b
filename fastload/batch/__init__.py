"""Turns a list of indices into a batch in memory.

Read in this order: `plan` (the settings); `access` (datasets that make batches, or are told what comes next),
`dataset_state` (how far streams were read), `fetch` (indices to samples), `collate` and `collate_errors`
(samples to a batch), `loader_collate` (what a framework that rebuilds the loader would lose), `packing` (a
batch to a message and shared memory), `failures` (samples that cannot be read).
"""
