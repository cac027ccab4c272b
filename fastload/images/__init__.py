"""Reads image files as C-contiguous HWC uint8 RGB arrays.

Read in this order: `decode`, `jpeg` and `geometry` (a file to an array), `listing` and `remote` (the files
of a folder, here and at a URL), `folder` (the dataset), `opened_files` (images that are read as people's own
datasets read them).
"""
