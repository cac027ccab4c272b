"""(label, image), {"mask", "image"} and nests of them give the same batches as torch's loader."""

import numpy as np
import torch
import torch.utils._pytree as tree
import torch.utils.data as tud

import fastload


class Reordered:
    def __init__(self, form):
        self.folder, self.form = fastload.ImageFolder("photos", size=(80, 80)), form

    def __len__(self):
        return len(self.folder)

    def __getitem__(self, index):
        image, label = self.folder[index]
        mask = (image[..., 0] > 100).astype(np.int64)
        return {
            "label": (label, image),
            "masks": {"mask": mask, "name": f"{index}.png", "image": image},
            "nest": (index, [label, {"mask": mask, "sizes": (image.shape[0], image)}]),
        }[self.form]


for form in ("label", "masks", "nest"):
    for cached in (False, True):
        dataset = fastload.CachedDataset(Reordered(form)) if cached else Reordered(form)
        for options in ({}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}):
            batches = list(fastload.DataLoader(dataset, batch_size=16, **options))
            for ours, torchs in zip(batches, tud.DataLoader(Reordered(form), batch_size=16), strict=True):
                pairs = zip(tree.tree_leaves(ours), tree.tree_leaves(torchs), strict=True)
                assert all(a == b if isinstance(a, str) else torch.equal(a, b) for a, b in pairs)
