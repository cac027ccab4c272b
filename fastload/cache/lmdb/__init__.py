"""Finished cache files: their format, and the code that reads them."""
