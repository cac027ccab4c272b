"""Thin adapters for other libraries. Each file is imported only by the code that asks for it."""
