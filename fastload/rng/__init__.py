"""Seeds random numbers, either once per worker or for each sample.

Read `entry_points` (where transforms of libraries draw), `seeding` (rng="worker": torch's seeds, and the
streams of pipelines), `keys` (rng="sample": what the streams of a sample depend on), `sample_rng` (how the
generators are set before each sample), `generators` (those in attributes of the dataset), `rng_scope`
(generators in the consumer's process), `keyed` (rng="sample" through torch's own iterator), `batch_draws`
(what transforms of whole batches draw).
"""
