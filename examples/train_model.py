"""A small residual network of plain torch.nn, and what the sizes of its layers mean for mixed precision."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Two convolutions and a way round them: (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        # No bias: the batch norm behind would take it away again.
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Both ways, added."""
        hidden = nn.functional.relu(self.norm1(self.conv1(images)))
        return nn.functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class SmallResNet(nn.Module):
    """(B, 3, H, W) float images to (B, num_classes) logits.

    Args:
        num_classes: Outputs.
        width: Channels of the first block; the second and third have two and four times as many.
        input_batchnorm: Normalize the input here, by its own statistics.
        checkpointing: Keep the blocks' inputs only, and compute the rest again in backward.
    """

    def __init__(self, num_classes: int, width: int, *, input_batchnorm: bool, checkpointing: bool) -> None:
        super().__init__()
        # affine=False: no weights that could undo what it does.
        self.normalize: nn.Module = nn.BatchNorm2d(3, affine=False) if input_batchnorm else nn.Identity()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.ModuleList(
            [Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)]
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, num_classes))
        self.checkpointing = checkpointing

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The logits; softmax belongs to the loss."""
        hidden = self.stem(self.normalize(images))
        for block in self.blocks:
            if self.checkpointing and self.training:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        return self.head(hidden)


def odd_sizes(model: nn.Module, batch_size: int) -> list[str]:
    """Sizes that are no multiple of 8, which tensor cores pad, or leave to slower kernels."""
    sizes = {"the batch": batch_size}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d):
            sizes[f"input channels of {name}"] = layer.in_channels
            sizes[f"output channels of {name}"] = layer.out_channels
        elif isinstance(layer, nn.Linear):
            sizes[f"inputs of {name}"] = layer.in_features
            sizes[f"outputs of {name}"] = layer.out_features
    return [f"{name}: {size}" for name, size in sizes.items() if size % 8]
