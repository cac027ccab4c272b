"""The iterators over an epoch, one for each kind of loader, and the code that resumes an epoch.

Read in this order: `loader_state` (what is alive of a loader); `iterator` (the base of iterators);
`with_workers`, `without_workers` and `through_torch` (batches on the host), `on_device` (wraps one of these)
and `transform` (what they call); `stats` (what they count and time); `cursor` (the position in an epoch),
`saved_cursor` (its saved form), `sampler_state` (what it depends on) and `resume` (begins, saves and resumes
epochs); `node_partition` (a sampler).
"""
