"""What caches on disk and in RAM share: records, columns, codecs, fingerprints, and the interface of a cache.

Read `record`, `codecs`, `columns`, `undecoded`, `fingerprint`, then `sample_cache`.
"""
