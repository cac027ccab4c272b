"""Seed random numbers, either once per worker or for each sample.

Read in this order: `entry_points` (where transforms of albumentations and MONAI draw), `seeding`
(seeding="worker": torch's seeds, and the streams of pipelines), `sample_streams` (seeding="sample": the part
of the parent), `sample_rng` (seeding="sample": the part where samples are fetched), `generators`
(seeding="sample": the generators in attributes of the dataset), `takeover` (generators in the consumer's
process), `keyed` (seeding="sample" through torch's own iterator), `batch_draws` (what transforms of whole
batches draw).
"""
