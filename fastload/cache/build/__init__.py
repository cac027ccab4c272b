"""How samples are read to fill caches and to build files, and how a build is resumed.

Read in this order: `sources` and `random_check` (the datasets that samples are read from), `build` (a build
from beginning to end), `plan` (what is built), `staging` (the directory of an unfinished cache, and a lock),
`tasks` and `processes` (workers that read samples), `writer` (one file); then `on_executor` (builds
elsewhere), `inventory` (what is on disk), and `fill` (caches in RAM).
"""
