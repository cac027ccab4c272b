"""A pytest plugin for runs against mutants: hypothesis does not shrink, and draws the same each time."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "mutants",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
    derandomize=True,
    database=None,
    print_blob=False,
)
settings.load_profile("mutants")
