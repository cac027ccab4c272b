"""A file that was made under one cache_key does not open under another: to change the key is to say "made anew"."""

import logging.handlers

import numpy as np

import fastload


class Values:
    def __init__(self, offset):
        self.offset = offset

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return np.full((4, 4, 3), index + self.offset, np.uint8)


fastload.CachedDataset(Values(0), cache="lmdb:values.lmdb", cache_key="v1")
try:
    fastload.CachedDataset(Values(7), cache="lmdb:values.lmdb", cache_key="v2")
except fastload.errors.CacheMismatchError as error:
    assert 'cache_key is "v2" here and "v1" there' in str(error), error
else:
    raise AssertionError("no error")
told = logging.handlers.BufferingHandler(10)  # the same key promises the same samples; a change is told
logging.getLogger("fastload").addHandler(told)
assert fastload.CachedDataset(Values(7), cache="lmdb:values.lmdb", cache_key="v1")[0].max() == 0
assert "change cache_key=" in told.buffer[0].getMessage()
