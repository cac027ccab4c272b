"""Seed random numbers, either once per worker or for each sample.

Read in this order: `entry_points` (where transforms of albumentations and MONAI draw), `seeding`
(rng="worker": torch's seeds, and the streams of pipelines), `sample_streams` (rng="sample": the part of the
parent), `sample_rng` (rng="sample": the part where samples are fetched), `generators` (rng="sample": the
generators in attributes of the dataset), `takeover` (generators in the consumer's process), `keyed`
(rng="sample" through torch's own iterator), `batch_draws` (what transforms of whole batches draw).
"""
