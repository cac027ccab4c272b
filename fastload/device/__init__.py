"""To the GPU, and what a training loop needs there.

Read in this order: `prefetch` (what users hold), `copies` (how), `cuda` and `plain` (which device),
`registered` (slots that it reads in place); then `normalize`, `oom`, `report` and `backends`, each by itself.
"""
