"""What a fork server imports before it forks workers: everything they need, once.

Imported for its effect in that one process only.
"""

import gc

import fastload.workers.worker  # noqa: F401

# What was imported so far will live as long as the process: keep the collector from touching, and so from
# copying, its pages in every worker (gc.freeze(), "before fork" in the documentation of gc).
gc.freeze()
