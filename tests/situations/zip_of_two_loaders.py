"""zip() over a long and a short loader pairs their batches, epoch after epoch."""

import fastload

photos = fastload.ImageFolder("photos")
labelled = fastload.DataLoader(photos, batch_size=4, num_workers=2, persistent_workers=True)
unlabelled = fastload.DataLoader(photos, batch_size=10, num_workers=1)
for epoch in range(3):
    pairs = [
        (a[0, 0, 0, 0].item(), b[0, 0, 0, 0].item())
        for (a, _), (b, _) in zip(labelled, unlabelled, strict=False)
    ]
    assert pairs == [(24 * step, 60 * step) for step in range(4)]
