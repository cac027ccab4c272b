"""The images of a folder, each read as torchvision's ImageFolder reads it, to be remembered by file."""

from __future__ import annotations

import os
from typing import Any

from PIL import Image
from torch.utils.data import Dataset

from fastload.images.folder import IMAGE_EXTENSIONS
from fastload.images.listing import files_below


class OpenedImages(Dataset[Any]):
    """The images of a folder and of those below it.

    Args:
        root: The folder.

    Raises:
        FileNotFoundError: It has no images.
    """

    def __init__(self, root: str) -> None:
        self.paths = [path for path in files_below(root) if path.lower().endswith(IMAGE_EXTENSIONS)]
        if not self.paths:
            raise FileNotFoundError(f"there are no images below {os.path.abspath(root)}")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        with open(self.paths[index], "rb") as file:
            return Image.open(file).convert("RGB")
