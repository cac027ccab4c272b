"""Detection: another number of boxes in each picture, through albumentations and a collate_fn of your own.

    python examples/detection.py [PHOTOS]

Claim: each picture keeps its boxes, in their order and size, through crops, flips, workers and batches.
"""

from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import torch
from pictures import SIZE, photo_folder
from torch.utils.data import Dataset

import fastload

MAX_BOXES = 5


class Objects(Dataset):
    """Pictures with 0 to 5 boxes: `bboxes` (N, 4) float32 as x1, y1, x2, y2, and `classes` (N,) int64."""

    def __init__(self, folder: Path) -> None:
        self.photos = fastload.ImageFolder(folder, size=SIZE)

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, _ = self.photos[index]
        rng = np.random.default_rng(index)  # the same at each access: what is random belongs to transform
        count = index % (MAX_BOXES + 1)
        corners = rng.integers(0, (70, 40), (count, 2))
        boxes = np.concatenate([corners, corners + rng.integers(8, 50, (count, 2))], axis=1)
        return {"image": image, "bboxes": boxes.astype(np.float32), "classes": np.arange(count), "id": index}


def collate(samples: list[dict[str, Any]]) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Lists in place of tensors: the pictures differ in size, and have different numbers of boxes."""
    images = [torch.as_tensor(sample["image"]).permute(2, 0, 1) for sample in samples]
    names = ("bboxes", "classes", "id")
    return images, [{name: torch.as_tensor(sample[name]) for name in names} for sample in samples]


def main() -> None:
    with photo_folder() as folder:
        boxes = A.BboxParams(format="pascal_voc", label_fields=["classes"])
        transform = A.Compose([A.BBoxSafeRandomCrop(), A.HorizontalFlip(p=0.5)], bbox_params=boxes)
        source = Objects(folder)
        dataset = fastload.CachedDataset(source, transform=transform, cache="ram")
        loader = fastload.DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, collate_fn=collate)

        seen = total = 0
        for images, targets in loader:
            for image, target in zip(images, targets, strict=True):
                before, after = source[int(target["id"])]["bboxes"], target["bboxes"].numpy()
                if target["classes"].tolist() != list(range(len(before))):
                    raise SystemExit(f"picture {target['id']} had {len(before)} boxes, now {target}")
                height, width = image.shape[1:]
                inside = (after >= -0.01).all() and (after <= np.tile((width, height), 2) + 0.01).all()
                same_size = np.allclose(after[:, 2:] - after[:, :2], before[:, 2:] - before[:, :2], atol=0.01)
                if not inside or not same_size:
                    raise SystemExit(f"picture {target['id']}: {before} became {after} in {width} x {height}")
                total += len(after)
            seen += len(images)
        print(f"the last batch has {[len(target['classes']) for target in targets]} boxes")
        print(f"{seen} pictures kept their {total} boxes in order")


if __name__ == "__main__":
    main()
