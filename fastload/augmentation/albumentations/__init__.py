"""All that knows albumentations: crops in the decoder, ends in the batch, memory that transforms only read.

Read `library` (the answers to the interface), `steps`, `crop`, `deferred_end`, then `read_only`.
"""
