"""Lays out rows of text as lines with aligned columns."""

from __future__ import annotations


def table(rows: list[list[str]]) -> list[str]:
    """Format rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
