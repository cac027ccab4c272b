"""The iterators over an epoch, one for each kind of loader, and the code that resumes an epoch.

Read in this order: `with_workers`, `without_workers` and `through_torch` (batches on the host), `on_device`
(wraps one of these); `stats` (what they measure and count); `resume` (the position in an epoch), `position`
(its saved form) and `order` (what it depends on); `node_partition` (a sampler) and `agreement` (a check that
the ranks' loaders agree).
"""
