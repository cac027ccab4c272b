"""Decode once: caches of samples, and the dataset that reads them."""
