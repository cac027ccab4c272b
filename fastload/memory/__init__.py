"""The memory that batches live in: shared segments, the leases on them, and the ring of slots.

Read in this order: `segment` (anonymous shared memory), `lease` (memory that tensors view, and when it may be
written again), `ring` (the slots of one loader).
"""
