"""Folders of files, on this machine and in object stores, and reading ahead of their files."""
