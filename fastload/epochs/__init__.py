"""The iterators over an epoch, one for each kind of loader, and the code that resumes an epoch.

Read in this order: `runtime` (what is alive of a loader); `iterator` (the base of iterators);
`epoch` (batches on the host), `torch_path` (where only torch's can serve), `on_device` (wraps one of these,
and transforms its batches); `stats` (what they count and time); `position` (where an epoch stands, saved
and resumed) and `order` (what the order depends on); `node_partition` (a sampler).
"""
