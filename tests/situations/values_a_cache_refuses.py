"""Values that a cache would change (images of Pillow, sparse tensors, objects) are refused, with their place in the sample."""

import warnings

import numpy as np
import torch
from PIL import Image

import fastload


class Mine:
    pass


warnings.simplefilter("ignore")  # torch warns of nested tensors
values = {
    "an image": Image.new("RGB", (4, 4)),
    "a sparse tensor": torch.eye(3).to_sparse(),
    "a masked array": np.ma.masked_array([1, 2], [True, False]),
    "a strided nested tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "an object": Mine(),
    "a key": {1: "one"},
    "a gradient": torch.ones(2, requires_grad=True),
}
for name, value in values.items():

    class Samples:
        def __len__(self):
            return 4

        def __getitem__(self, index, value=value):
            return {"label": index, "extra": [value]}

    try:
        fastload.CachedDataset(Samples())
    except fastload.errors.UnsupportedSampleError as error:
        assert "extra" in str(error), (name, error)
    else:
        raise AssertionError(name)
