"""Two jobs that a shell script starts together ask for one file: one builds it, and both read it.

$ python two_jobs_one_file.py & first=$!; python two_jobs_one_file.py && wait $first
"""

import fastload

dataset = fastload.CachedDataset(fastload.ImageFolder("photos"), cache="lmdb:photos.lmdb")
loader = fastload.DataLoader(dataset, batch_size=10, shuffle=True, num_workers=1)
for epoch in range(2):
    values = sorted(value for images, labels in loader for value in images[:, 0, 0, 0].tolist())
    assert values == [6 * number for number in range(40)]
