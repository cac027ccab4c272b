"""Make batches in worker processes or worker threads.

Read in this order: `core` (the work of one worker), `worker` (the worker process around it), `workers` (the
interface of its owner), `pool` (the owner in the parent), `schedule` and `task` (which worker makes which
batch), `channel` and `job` (messages between the two), `process`, `starting` and `death_message` (start and
end of a worker), `threads`, `tally` (counts their work); `auto_workers` chooses the number of workers.
"""
