"""The version of fastload, below everything that reports it."""

__version__ = "0.2.0"
