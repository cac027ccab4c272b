"""A pytest plugin for runs against mutants: hypothesis does not shrink, and draws the same each time."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile(
    "mutants",
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    derandomize=True,
    database=None,
    print_blob=False,
)
settings.load_profile("mutants")
