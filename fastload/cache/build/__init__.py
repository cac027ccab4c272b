"""How samples are read to fill caches and to build files.

Read in this order: `sources` and `random_check` (the datasets that samples are read from), `build` (a build
from beginning to end), `plan` (what is built), `staging` (the unfinished file, its report, and a lock),
`tasks` and `processes` (workers that read samples), `writer` (the file); then `inventory` (what is on disk),
and `fill` (caches in RAM).
"""
