"""Reads image files as C-contiguous HWC uint8 RGB arrays."""
