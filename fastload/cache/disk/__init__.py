"""Decoded files in a directory on disk, found by keys of 16 bytes.

Read in this order: `rows` (the entries of the index, byte by byte), `records` (an array and its note as
bytes), `segments` (the files of a directory, and who writes them), `index` (where a key is), `disk_store`
(what readers use, and how a file is known on disk), and `upkeep` (verify, list, remove).
"""
