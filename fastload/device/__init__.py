"""To the GPU, and what a batch meets there.

Read in this order: `prefetch` (what users hold), `copies` (how), `cuda` and `plain` (which device),
`registered` (slots that it reads in place), `pin_thread`; then `normalize`.
"""
