"""Where batches lie: shared segments, the leases that keep them, and the ring of slots.

Read in this order: `segment` (anonymous shared memory), `lease` (memory that tensors view, and when it is
free again), `ring` (the slots of one loader).
"""
