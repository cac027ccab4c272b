"""Strings, bytes, None and ragged lists in samples come through workers and caches as they are."""

import torch.utils.data as tud

import fastload


class Captions:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        words = ["ein Bild", "画像 😀", "", "\x00\udc80"[:1]][index % 4]
        sample = {"text": words, "raw": bytes([index] * index * 100), "more": (index, None)}
        return sample | {"words": words.split(), "large": b"x" * 40_000}


expected = list(tud.DataLoader(Captions(), batch_size=5, collate_fn=list))
for dataset in (Captions(), fastload.CachedDataset(Captions())):
    for options in ({}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}):
        for epoch in range(2):
            assert list(fastload.DataLoader(dataset, batch_size=5, collate_fn=list, **options)) == expected


class Named(Captions):
    def __getitem__(self, index):
        return super().__getitem__(index)["text"], index


for options in ({}, {"num_workers": 2}):
    ours, torchs = (
        list(kind(Named(), batch_size=4, **options)) for kind in (fastload.DataLoader, tud.DataLoader)
    )
    assert str(ours) == str(torchs)
