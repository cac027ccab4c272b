"""A drop-in DataLoader for PyTorch over a shared cache of decoded images."""

__version__ = "0.1.0"
