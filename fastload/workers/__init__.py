"""Make batches in worker processes, worker threads, or actors of a Ray cluster.

`pool` has what the three pools have in common for the iterator, and `settings` their names. `batch_maker`
has what their workers have in common.
"""
