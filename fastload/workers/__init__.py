"""Make batches in worker processes, worker threads, actors of a Ray cluster, or the calling thread.

Read in this order: `settings` (of a loader), `schedule` (which worker makes which batch), `messages`; `pool`
(the contract of all pools); `inline_pool`; `process_pool`,
`process`, `channel`, `preload` and `pinned_pool` (processes); `thread_pool`; `ray_pool`;
`sent_plan` (what workers need to start), `batch_maker` (what they have in common) and `worker` (a process).
"""
