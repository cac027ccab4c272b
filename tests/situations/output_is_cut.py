"""A script whose output goes to `head` ends like any program whose reader has left, and leaves no worker.

$ { python output_is_cut.py 2> told.txt; test $? = 1; } | head -n 1 > /dev/null; tail -n 1 told.txt | grep -q BrokenPipeError && rm told.txt
"""

import fastload

dataset = fastload.CachedDataset(fastload.ImageFolder("photos"))
loader = fastload.DataLoader(dataset, batch_size=1, num_workers=2, persistent_workers=True)
for epoch in range(1000):
    for images, labels in loader:
        print("images of the shape", tuple(images.shape), flush=True)
