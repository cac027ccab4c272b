"""Copy batches to the GPU, and transform them there.

Read in this order: `prefetch` (the class for users), `copies` (the mechanism), `cuda` and `streamless` (the
devices), `registered` (slots that the GPU reads in place), `pin_thread`; then `images` (which part of a batch
are the images), `normalize`, and for crops and flips `augment`, `boxes` and `resample`.
"""
