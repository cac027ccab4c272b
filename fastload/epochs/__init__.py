"""The iterators over an epoch, one for each kind of loader, and the code that resumes an epoch.

Read in this order: `with_workers`, `without_workers` and `through_torch` (batches on the host), `on_device`
(wraps one of these); `stats` (what they measure and count); `epoch` and `resume` (the position in an epoch),
`position` and `sampler_state` (that position, and its saved form); `node_partition` (a sampler) and
`agreement` (a check that the ranks' loaders fit together).
"""
