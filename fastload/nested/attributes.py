"""The attributes of any object, read without running its code."""

from __future__ import annotations

import contextlib
import types
from typing import Any

# As in inspect.getattr_static: a metaclass cannot intercept these.
read_class_dict = type.__dict__["__dict__"].__get__
read_mro = type.__dict__["__mro__"].__get__


def attributes(value: Any) -> dict[str, Any]:
    """The instance attributes by name, in the order they were set; slots last.

    What methods and partials wrap are slots, too.
    """
    class_dicts = list(map(read_class_dict, read_mro(type(value))))
    descriptor: Any = next((own["__dict__"] for own in class_dicts if "__dict__" in own), None)
    is_builtin = type(descriptor) in (types.GetSetDescriptorType, types.MemberDescriptorType)
    values: dict[str, Any] = dict(dict.items(descriptor.__get__(value))) if is_builtin else {}
    for own in class_dicts:
        for name, member in own.items():
            if type(member) is types.MemberDescriptorType and name != "__dict__":
                with contextlib.suppress(AttributeError):  # the slot was never set
                    values.setdefault(name, member.__get__(value))
    return values
