"""Decode on the machines of a Ray cluster: the loader's workers are Ray actors.

    pip install ray
    python examples/ray_workers.py [FOLDER]

FOLDER holds a folder of images for each class, at the same path on all machines. Without a running cluster
(RAY_ADDRESS), the script starts one on this machine.
"""

import os
from pathlib import Path

import torch
from pictures import SIZE, photo_folder, small_network
from torch import nn

import fastload

try:
    import ray
except ImportError:
    raise SystemExit("This example needs Ray: pip install ray") from None


def train(folder: Path, worker_type: str = "ray", epochs: int = 2) -> list[torch.Tensor]:
    """Train a small network; returns the images of the last epoch."""
    torch.manual_seed(1)
    photos = fastload.ImageFolder(folder, size=SIZE)
    loader = fastload.DataLoader(
        photos,
        batch_size=8,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,  # actors import torch when they start, which takes seconds
        worker_type=fastload.RayWorkers(num_cpus=1) if worker_type == "ray" else worker_type,
        device="auto",
        device_transform=fastload.transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    )
    model = small_network(len(photos.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with loader:
        for _ in range(epochs):
            seen = []
            for images, labels in loader:
                model.to(images.device)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                seen.append(images)
    return seen


# --- The template ends here. The rest compares with worker processes. ---------------------------------------


def main() -> None:
    ray.init(os.environ.get("RAY_ADDRESS", "local"), log_to_driver=False, logging_level="error")
    with photo_folder() as folder:
        remote, local = train(folder), train(folder, "process")
    num_equal = sum(torch.equal(one, other) for one, other in zip(remote, local, strict=True))
    print(f"ray {ray.__version__}: {num_equal} of {len(local)} batches are those of worker processes")
    ray.shutdown()


if __name__ == "__main__":
    main()
