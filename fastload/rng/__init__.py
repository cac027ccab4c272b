"""Seed random numbers, either once for each worker or anew for each sample.

Read in this order: `seeding` (rng="worker": torch's seeds, and pipelines), `loans` and `local_pipelines`
(pipelines in the user's own process), `sample_streams` and `sample_rng` (rng="sample", in the parent and
where samples are fetched), `keyed` (rng="sample" through torch's own iterator), `pipelines` (the search for
random objects in a dataset).
"""
