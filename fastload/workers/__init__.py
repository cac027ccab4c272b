"""Make batches in worker processes or worker threads.

Read in this order: `core` (the work of a worker), `worker` (the process around it), `pool` (its owner in the
parent), `schedule` (which worker makes which batch), `messages`, `channel` and `job` (what the two send each
other), `process` (start and end of a worker), `threads`; `auto_workers` chooses the number of workers.
"""
