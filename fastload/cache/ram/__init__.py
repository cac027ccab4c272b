"""Caches in RAM: shared memory that other processes can find, its layout, and a private fallback.

Read in this order: `shared` (the cache), `arena` (its segment: how samples are read and stored), `layout`
(the bytes of the segment), `registry` and `owners` (how processes find a cache), `private` (the fallback).
"""
