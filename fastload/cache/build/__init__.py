"""How several processes fill caches and build files, and how a build is resumed.

Read in this order: `build` (a build from beginning to end), `plan` (what is built), `unfinished` (the
directory of an unfinished cache), `build_lock`, `tasks` and `processes` (workers that read samples), `writer`
(one file); then `on_executor` and `upload` (builds elsewhere), `inventory` (what is on disk), and
`fill` (caches in RAM).
"""
