"""`fastload profile` of a script with torch's loader advises nothing that cannot be done, and blames nobody of ours.

$ fastload profile profile_of_a_plain_loader.py 2> told.txt
$ ! grep -E "fastload/|_add|Ray|cuda" told.txt && grep -q "waits for data" told.txt
"""

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        image = Image.open(f"photos/{'cat' if index < 20 else 'dog'}/{index:02}.png")
        return torch.from_numpy(np.asarray(image.convert("RGB")).copy()), int(index >= 20)


if __name__ == "__main__":
    model = torch.nn.Linear(64 * 48 * 3, 2)
    loader = DataLoader(Photos(), batch_size=4, shuffle=True)
    for epoch in range(3):
        for images, labels in loader:
            model(images.flatten(1).float()).sum().backward()
