"""One iterator for each kind of epoch, and how an epoch is resumed.

Read in this order: `with_workers`, `without_workers` and `through_torch` (batches on the host), `on_device`
(around one of these); `epoch` and `resume` (where an epoch stands), `saved_state` and `sampler_state` (what
is saved of it).
"""
