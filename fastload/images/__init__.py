"""Files to C-contiguous HWC uint8 RGB arrays."""
