"""What the attacks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kit.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def reader(request: pytest.FixtureRequest) -> Iterator[Job]:
    """A child with little memory, started by the `limited` of the module: what ends it ends no test run."""
    job = Job(request.module.limited)
    job.answer()
    yield job
    job.end()
