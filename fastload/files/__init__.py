"""Folders of files, on this machine and in object stores, and reading ahead of their files.

Read in this order: `listing` (the files of a folder), `read_ahead`, `remote` (folders in object stores),
`file_systems` (what differs between stores) and `retry` (requests that stall or fail).
"""
