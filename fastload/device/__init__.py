"""To the GPU."""
