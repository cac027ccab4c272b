"""From a list of indices to a batch in memory.

Read in this order: `fetch` and `collate` (indices to a batch), `worker` and `pool` (in another process),
`threads` (in another thread), `ring`, `memory` and `segment` (where batches lie), `packing`, `channel` and
`job` (what travels).
"""
