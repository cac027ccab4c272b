"""Copy batches to the GPU.

Read in this order: `device_prefetcher` (the class for users), `stream_prefetcher` (the mechanism), `cuda` and
`synchronous` (the devices), `registered` (slots that the GPU reads in place), `pin_thread`.
"""
