"""All that knows albumentations: crops in the decoder, ends in the batch, memory that transforms only read.

Read `library` (the answers to the interface), `targets` (what of a sample moves), `pipelines` (what is known
of their code), `crop`, then `deferred_end`.
"""
