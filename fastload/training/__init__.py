"""Tools for the training loop: out-of-memory retries, torch's speed switches, the memory report."""
