"""Subclasses that call their base by name, by an alias or with a mixin work under patch_torch()."""

import torch.utils.data
from torch.utils.data import DataLoader as Alias

import fastload

fastload.patch_torch()
from torch.utils.data import DataLoader  # noqa: E402


class ByName(torch.utils.data.DataLoader):
    def __init__(self, dataset, **options):
        torch.utils.data.DataLoader.__init__(self, dataset, **options)


class ByAlias(Alias):
    def __init__(self, dataset, **options):
        Alias.__init__(self, dataset, **options)


class Mixin:
    def __iter__(self):
        return (batch[0] for batch in super().__iter__())


class Mixed(Mixin, DataLoader):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)


class Deep(ByName):
    def __init__(self, dataset):
        super().__init__(dataset, batch_size=10, num_workers=1)


photos = fastload.ImageFolder("photos")
for loader in (ByName(photos, batch_size=10), ByAlias(photos, batch_size=10), Deep(photos)):
    assert [images[0, 0, 0, 0].item() for images, labels in loader] == [0, 60, 120, 180]
assert [images[0, 0, 0, 0].item() for images in Mixed(photos, 10, num_workers=1)] == [0, 60, 120, 180]
