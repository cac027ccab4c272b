"""Copy batches to the GPU.

Read in this order: `prefetch` (the class for users), `copies` (the mechanism), `cuda` and `streamless` (the
devices), `registered` (slots that the GPU reads in place), `pin_thread`.
"""
