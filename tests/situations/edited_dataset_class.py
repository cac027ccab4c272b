"""A dataset class that was edited does not get yesterday's samples from its file: other shapes and keys are refused.

$ python edited_dataset_class.py
$ sed -i 's/IMAGE = 1/IMAGE = 2/' edited_dataset_class.py; echo edited
$ python edited_dataset_class.py again
"""

import sys

import fastload

IMAGE = 1


class Photos:
    def __init__(self, scale):
        self.folder, self.scale = fastload.ImageFolder("photos"), scale

    def __len__(self):
        return 40

    def __getitem__(self, index):
        image, label = self.folder[index]
        return image[:: self.scale, :: self.scale], label


for key, path in ((None, "lmdb:photos.lmdb"), ("photos", "lmdb:keyed.lmdb")):
    try:
        dataset = fastload.CachedDataset(Photos(IMAGE), cache=path, cache_key=key)
        assert sys.argv[1:] == []
        assert dataset[39][0].shape == (48, 64, 3)
    except fastload.errors.CacheMismatchError as error:
        assert sys.argv[1:] == ["again"]
        assert "structure of sample 0" in str(error), error
