"""What random numbers follow from: a worker's seed, or the sample itself.

Read in this order: `seeding` (rng="worker", as torch seeds, and pipelines), `loans` and `local_pipelines`
(pipelines in the user's own process), `draws` and `sample_rng` (rng="sample", in the parent and where samples
are fetched), `keyed` (the same through torch's own iterator), `pipelines` (the search for what is random in a
dataset).
"""
