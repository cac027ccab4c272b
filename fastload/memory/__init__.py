"""The memory that processes share: segments, the leases on them, the ring of slots, and lists of records.

Read in this order: `segment` (anonymous shared memory), `lease` (memory that tensors view, and when it can be
reused), `ring` (the slots of one loader), `shared_list` (records that workers read), `memory_model` (when
other processes see what one has written).
"""
