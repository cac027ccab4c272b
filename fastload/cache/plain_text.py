"""Plain values as JSON, in a closed form: None, bool, int, float, str, bytes, and lists, tuples and dicts.

An array of JSON begins with a letter that says what it is: ``["l", ...]`` a list, ``["t", ...]`` a tuple,
``["d", key, value, ...]`` a dict, ``["b", "00ff"]`` bytes. All other values stand for themselves.
"""

from __future__ import annotations

import json
from typing import Any

_SCALARS = frozenset({type(None), bool, int, float, str})


def plain_text(value: Any) -> bytes | None:
    """The text of a value; None if it has values of other types, or would not come back as it is."""
    try:
        text = json.dumps(_tagged(value), separators=(",", ":")).encode("ascii")
        # NaN, which equals nothing, and two halves of a surrogate pair, which become one character.
        return text if repr(parse_plain_text(text)) == repr(value) else None
    except (TypeError, ValueError, RecursionError):
        return None


def parse_plain_text(text: bytes | memoryview) -> Any:
    """The value of a text.

    Raises:
        ValueError: The text is none that `plain_text` makes.
    """
    try:
        return _untagged(json.loads(bytes(text)))
    except (TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"not the text of plain values: {error}") from None


def _tagged(value: Any) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is bytes:
        return ["b", value.hex()]
    if kind is dict:
        return ["d", *(_tagged(part) for item in value.items() for part in item)]
    if kind is tuple or kind is list:
        return ["t" if kind is tuple else "l", *map(_tagged, value)]
    raise TypeError(f"{kind.__name__} is not plain")


def _untagged(value: Any) -> Any:
    if type(value) in _SCALARS:
        return value
    if type(value) is not list:
        raise ValueError("an object of JSON")
    tag, parts = value[0], value[1:]
    if tag == "t":
        return tuple(map(_untagged, parts))
    if tag == "l":
        return [*map(_untagged, parts)]
    if tag == "d":
        parts = [*map(_untagged, parts)]
        return dict(zip(parts[::2], parts[1::2], strict=True))
    if tag == "b":
        return bytes.fromhex(*parts)
    raise ValueError(f"an array of JSON that begins with {tag!r}")
