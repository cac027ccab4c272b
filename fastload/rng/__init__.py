"""Seeds random numbers, either once per worker or for each sample.

Read `entry_points` (where transforms of libraries draw), `seeding` (seeding="worker": which worker the caller
is, torch's seeds, and the streams of pipelines), `keys` (seeding="sample": what the streams of a sample
depend on), `sample_rng` (sets the generators before each sample), `generators` (those in attributes of the
dataset), `draws` (whether an access draws), `states` (of generators: compared, and restored), then
`batch_draws` (what transforms of whole batches draw).
"""
