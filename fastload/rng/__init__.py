"""Seed random numbers, either once per worker or for each sample.

Read in this order: `seeding` (rng="worker": torch's seeds, and the seeds of pipelines), `takeover`
(generators in the consumer's process), `sample_streams` (rng="sample": the part of the
parent), `sample_rng` (rng="sample": the part where samples are fetched), `generators` (rng="sample": the
generators that the dataset keeps), `keyed` (rng="sample" through torch's own iterator), `batch_draws` (what
transforms of whole batches draw), `pipelines` (the search for random objects in a dataset).
"""
