"""An albumentations pipeline over (image, boxes) tuples raises an error that names the dict which moves the boxes."""

import albumentations as A
import numpy as np

import fastload


class Boxes:
    def __init__(self, form):
        self.form = form

    def __len__(self):
        return 4

    def __getitem__(self, index):
        image = np.zeros((64, 64, 3), np.uint8)
        image[10:20, 4:12] = 255
        target = {"bboxes": np.array([[4.0, 10.0, 12.0, 20.0]]), "labels": np.array([1])}
        return (image, target) if self.form is tuple else {"image": image, **target}


flip = A.Compose([A.HorizontalFlip(p=1)], bbox_params=A.BboxParams("pascal_voc", label_fields=["labels"]))
moved = fastload.CachedDataset(Boxes(dict), flip)[0]
assert moved["image"][10, 52:60].min() == 255
assert np.asarray(moved["bboxes"]).tolist() == [[52, 10, 60, 20]]
try:
    fastload.CachedDataset(Boxes(tuple), flip)[0]
except (TypeError, ValueError) as error:
    assert "bboxes" in str(error), error
else:
    raise AssertionError("no error")
