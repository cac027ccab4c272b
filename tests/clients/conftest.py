"""What torch's loader gives in each client, for all tests of a session."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.clients.contract import Client


LIMIT_S = 1_300  # of a test: it starts up to three runs, each of which has a limit of its own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test time for all of its runs to be ended by the harness, which leaves no process behind."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(LIMIT_S))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each client's class says in which ways it is used, with how many workers, and how it resumes."""
    client, names = metafunc.cls, metafunc.fixturenames
    if client is not None and "num_workers" in names:
        every = [(way, number) for way in client.ways for number in client.worker_numbers]
        pairs = [(way, number) for way, number in every if number or way == client.ways[0]]
        metafunc.parametrize(("way", "num_workers"), pairs)
    elif client is not None and "way" in names:
        metafunc.parametrize("way", client.ways)
    if client is not None and "ranks" in names:
        metafunc.parametrize("ranks", client.num_ranks)


@pytest.fixture(scope="session")
def torchs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Called with a client and options: the records of all ranks with torch's loader, which run once."""
    known: dict[Any, list[list[tuple[str, Any]]]] = {}

    def records(client: Client, **options: Any) -> list[list[tuple[str, Any]]]:
        key = (type(client), *sorted(options.items()))
        if key not in known:
            folder = tmp_path_factory.mktemp("torch")
            known[key] = client.run(folder, "torch", **options).check("torch").named()
        return known[key]

    return records
