"""Caches in RAM: shared memory that other processes can find, its layout, and a private fallback.

Read in this order: `shared` (the cache), `generation` (one segment: how samples are read and stored, and how
processes move to the next one), `layout` (the bytes of a segment), `registry` and `owners` (how processes
find a cache), `private` (the fallback).
"""
