"""Make batches in worker processes, worker threads, or actors of a Ray cluster.

Read in this order: `settings` (of a loader), `schedule` (which worker makes which batch), `messages`; `pool`
(the contract of the three pools) and `slot_pool` (what two of them share); `process_pool`, `process`,
`channel` and `preload` (worker processes); `thread_pool`; `ray_pool` and `ray_worker`; `worker_spec` (what
workers need to start), `batch_maker` (what they have in common) and `worker` (a worker process).
"""
