"""A subclass of CachedDataset with its own __init__, __getitem__ and attributes works, with every kind of worker."""

import pickle

import fastload


class Photos(fastload.CachedDataset):
    def __init__(self, root, scale, **options):
        super().__init__(fastload.ImageFolder(root), **options)
        self.scale = scale

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {"image": image[:: self.scale, :: self.scale], "label": label, "class": self.classes[label]}


if __name__ == "__main__":
    dataset = Photos("photos", 2, cache="ram")
    for options in ({}, {"num_workers": 2}, {"num_workers": 1, "worker_type": "thread"},
                    {"num_workers": 1, "multiprocessing_context": "spawn"}):  # fmt: skip
        for batch in fastload.DataLoader(dataset, batch_size=10, **options):
            assert batch["image"].shape == (10, 24, 32, 3)
            assert batch["class"] == [("cat", "dog")[label] for label in batch["label"]]
    assert pickle.loads(pickle.dumps(dataset))[39]["class"] == "dog"
    assert dataset.cache_info().num_cached == 40
