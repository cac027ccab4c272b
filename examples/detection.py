"""Detection: a variable number of boxes per image, through albumentations and your own collate_fn.

    python examples/detection.py [FOLDER]

FOLDER holds a folder of images for each class.
"""

from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import torch
from pictures import SIZE, photo_folder, small_network
from torch.utils.data import Dataset

import fastload


class Objects(Dataset):
    """Images with 0 to 5 boxes: `bboxes` (N, 4) float32 as x1, y1, x2, y2, and `classes` (N,) int64."""

    def __init__(self, folder: Path) -> None:
        self.photos = fastload.ImageFolder(folder, size=SIZE)

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, _ = self.photos[index]
        rng = np.random.default_rng(index)  # yours come from a file: the same boxes every time
        count = index % 6
        corners = rng.integers(0, (70, 40), (count, 2))
        boxes = np.concatenate([corners, corners + rng.integers(8, 50, (count, 2))], axis=1)
        return {"image": image, "bboxes": boxes.astype(np.float32), "classes": np.arange(count), "id": index}


def collate(samples: list[dict[str, Any]]) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Lists in place of tensors: the images differ in size, and have different numbers of boxes."""
    images = [torch.as_tensor(sample["image"]).permute(2, 0, 1) for sample in samples]
    names = ("bboxes", "classes", "id")
    return images, [{name: torch.as_tensor(sample[name]) for name in names} for sample in samples]


def train(dataset: fastload.CachedDataset) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = fastload.DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, collate_fn=collate)
    model = small_network(1).to(device)  # it counts the boxes; yours takes both lists: model(images, targets)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for images, targets in loader:
            optimizer.zero_grad()
            counts = torch.stack([model(image.to(device)[None] / 255)[0, 0] for image in images])
            wanted = torch.tensor([len(target["bboxes"]) for target in targets], device=device)
            loss = (counts - wanted).square().mean()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


# --- The template ends here. The rest runs it, and follows the boxes of each image through the transform. ---


def main() -> None:
    with photo_folder() as folder:
        boxes = A.BboxParams(format="pascal_voc", label_fields=["classes"])
        transform = A.Compose([A.BBoxSafeRandomCrop(), A.HorizontalFlip(p=0.5)], bbox_params=boxes)
        source = Objects(folder)
        dataset = fastload.CachedDataset(source, transform=transform, cache="ram")
        train(dataset)

        kept = 0
        for index in range(len(dataset)):
            before, after = source[index], dataset[index]
            sizes = [np.subtract(one["bboxes"][:, 2:], one["bboxes"][:, :2]) for one in (before, after)]
            same_order = list(after["classes"]) == list(before["classes"])
            kept += same_order and np.allclose(*sizes, atol=0.01)
        print(f"{kept} of {len(dataset)} images kept all of their boxes, in order and in size")


if __name__ == "__main__":
    main()
