"""What caches on disk and in RAM share: records, columns, fingerprints, and the interface of a cache.

Read in this order: `record`, `columns`, `fingerprint`, `sample_cache`, then `progress` (the bar of a
build) and `plain_text` (plain values as JSON).
"""
