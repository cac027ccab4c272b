"""Three threads that iterate over loaders of one cached dataset at once each get their own epoch."""

import threading

import fastload

dataset = fastload.CachedDataset(fastload.ImageFolder("photos"))
results = {}


def read(name, options):
    loader = fastload.DataLoader(dataset, batch_size=4, **options)
    results[name] = [
        value for epoch in range(3) for images, labels in loader for value in images[:, 0, 0, 0].tolist()
    ]


kinds = [
    {},
    {"num_workers": 2},
    {"num_workers": 1, "persistent_workers": True},
    {"num_workers": 2, "worker_type": "thread"},
]
threads = [threading.Thread(target=read, args=pair) for pair in enumerate(kinds)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert results == {name: 3 * list(range(0, 240, 6)) for name in range(4)}
