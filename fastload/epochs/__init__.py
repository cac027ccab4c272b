"""The iterators over an epoch, one for each kind of loader, and the code that resumes an epoch.

Read in this order: `loader_state` (what is alive of a loader); `iterator` (the base of iterators);
`with_workers`, `without_workers` and `through_torch` (batches on the host), `on_device` (wraps one of these)
and `transform` (what they call); `stats` (what they count and time); `position` (where an epoch stands, saved
and resumed) and `order` (what the order depends on); `node_partition` (a sampler).
"""
