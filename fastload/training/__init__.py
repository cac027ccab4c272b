"""For the training loop beside the loader: out-of-memory retries, backends, the memory report."""
