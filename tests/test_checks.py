"""Checks of values from outside: what they accept, and what their errors say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.system.checks import (
    TEXT,
    check_fields,
    dict_of,
    instance_of,
    integer,
    list_of,
    one_of,
    optional,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
CHECKS = {
    "an int from 3 to 9": (integer(3, 10), lambda v: type(v) is int and 3 <= v < 10),
    "an int of at least 3": (integer(3), lambda v: type(v) is int and v >= 3),
    'None, "a" or 2': (one_of(None, "a", 2), lambda v: v is None or v == "a" or (type(v) is int and v == 2)),
    "of type bool": (instance_of(bool), lambda v: v is True or v is False),
    "of type str, or None": (optional(TEXT), lambda v: v is None or type(v) is str),
    "a list whose items are of type str": (
        list_of(TEXT),
        lambda v: type(v) is list and all(type(item) is str for item in v),
    ),
    "a dict whose values are of type str": (
        dict_of(TEXT),
        lambda v: type(v) is dict and all(type(item) is str for item in v.values()),
    ),
}


@pytest.mark.parametrize("expected", CHECKS)
@given(value=JSON)
def test_a_check_returns_what_it_accepts_and_says_what_it_expects(expected: str, value: Any) -> None:
    """Any JSON value is returned as it is, or refused with both what was expected and what came."""
    check, accepts = CHECKS[expected]
    if accepts(value):
        assert check(value) is value
        return
    with pytest.raises(ValueError, match="should be") as caught:
        check(value)
    assert str(caught.value).startswith(f"should be {expected}, but got ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "the plan should have the fields a, b, but is []"),
        ({"a": 1}, "the plan should have the fields a, b, but is {'a': 1}"),
        ({"a": 1, "b": "x", "c": 2}, "the plan should have the fields a, b"),
        ({"a": True, "b": "x"}, "a of the plan should be an int of at least 0, but got True"),
        ({"a": 1, "b": None}, "b of the plan should be of type str, but got None"),
    ],
)
def test_fields_are_those_of_the_table_and_no_others(fields: Any, message: str) -> None:
    """The error names the owner, the field, what was expected and what came."""
    checks = {"a": integer(0), "b": TEXT}
    check_fields({"a": 1, "b": "x"}, checks, "the plan")
    with pytest.raises(ValueError, match=r"the plan") as caught:
        check_fields(fields, checks, "the plan")
    assert str(caught.value).startswith(message)
