"""A script without standard input, output and error, as a daemon's, caches and trains with workers.

$ python no_output_at_all.py <&- >&- 2>&-
"""

import fastload

dataset = fastload.CachedDataset(fastload.ImageFolder("photos"), cache="lmdb:photos.lmdb")
loader = fastload.DataLoader(dataset, batch_size=10, num_workers=2, on_error="replace")
for epoch in range(2):
    assert [images[0, 0, 0, 0].item() for images, labels in loader] == [0, 60, 120, 180]
