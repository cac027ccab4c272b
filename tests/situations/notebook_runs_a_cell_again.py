"""A notebook's cells that are run again, edited, and stopped in the middle give right batches each time."""

import __main__

SETUP = """
import fastload
class Photos:
    def __init__(self): self.folder = fastload.ImageFolder("photos")
    def __len__(self): return 40
    def __getitem__(self, index): return self.folder[index][0] {edit}
dataset = fastload.CachedDataset(Photos(), cache_key={key!r})
loader = fastload.DataLoader(dataset, batch_size=10, num_workers=2, persistent_workers=True,
                             multiprocessing_context="fork")
"""
EPOCH = "seen = [images[0, 0, 0, 0].item() for images in loader]"
STOPPED = """
for step, images in enumerate(loader):
    if step == 1:
        raise KeyboardInterrupt
"""
for edit, key, expected in (("", "v1", 0), ("", "v1", 0), ("+ 1", "v2", 1)):
    exec(SETUP.format(edit=edit, key=key), vars(__main__))
    for _ in range(2):
        exec(EPOCH, vars(__main__))
        assert __main__.seen == [value + expected for value in (0, 60, 120, 180)]
    try:
        exec(STOPPED, vars(__main__))
    except KeyboardInterrupt:
        exec(EPOCH, vars(__main__))
    assert __main__.seen == [value + expected for value in (0, 60, 120, 180)]
