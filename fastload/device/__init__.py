"""Copy batches to the GPU.

Read in this order: `device_prefetcher` (the class for users), `stream_prefetcher` (the mechanism), `devices`
(CUDA and others), `registered` (slots that the GPU reads in place), `pinning`.
"""
