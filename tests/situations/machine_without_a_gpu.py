"""Without a GPU, device="auto" gives batches on the CPU, device="cuda" says what is missing, and `fastload doctor` ends well.

$ python machine_without_a_gpu.py
$ fastload doctor photos
"""

import os

import fastload

os.environ["CUDA_VISIBLE_DEVICES"] = ""
photos = fastload.ImageFolder("photos")
normalize = fastload.transforms.Normalize((0, 0, 0), (1, 1, 1))
loader = fastload.DataLoader(photos, batch_size=10, device="auto", device_transform=normalize)
for images, labels in loader:
    assert images.shape == (10, 3, 48, 64)
    assert images.device.type == "cpu"
try:
    iter(fastload.DataLoader(photos, batch_size=10, device="cuda"))
except fastload.errors.DeviceUnavailableError as error:
    assert "device='auto'" in str(error), error
else:
    raise AssertionError("no error")
