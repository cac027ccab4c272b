"""Later epochs of a resumed stream: they are whole, also those of a stream of Hugging Face's."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from fastload import DataLoader
from tests.resume import zoo
from tests.resume.loaders import STREAMS, labels, through_json

if TYPE_CHECKING:
    from collections.abc import Callable


def _hugging_face(length: int = 41) -> Any:
    hugging_face = pytest.importorskip("datasets")
    return hugging_face.Dataset.from_dict({"x": list(range(length))}).to_iterable_dataset(num_shards=4)


def _number(sample: dict[str, int]) -> dict[str, int]:
    return {"x": sample["x"] + 1}


KINDS: dict[str, Callable[[], Any]] = {
    **{kind: getattr(zoo, kind) for kind in [*STREAMS, "Rounds"]},
    "Hugging Face": _hugging_face,
    "Hugging Face, mapped": lambda: _hugging_face().map(_number),
}
PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
ONE_OF_EACH = ("Mute", "Stream", "Rounds", "Hugging Face")
CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in KINDS),
    *((kind, PERSISTENT) for kind in ONE_OF_EACH),
    *((kind, {"num_workers": 2}) for kind in ("Mute", "Hugging Face")),  # a new copy for each epoch
]


def _values(samples: list[Any]) -> Any:
    return [sample["x"] if isinstance(sample, dict) else sample for sample in samples]


def loader_of(kind: str, **options: Any) -> DataLoader:
    return DataLoader(KINDS[kind](), 4, collate_fn=_values, **options)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_epochs_after_a_resume_are_those_of_a_run_without_one(kind: str, options: dict[str, Any]) -> None:
    """After a batch in the middle, and after the last one; also if the state is loaded once more."""
    with loader_of(kind, **options) as plain:
        whole = [labels(plain) for _ in range(3)]
    # The state of a stream that has ended is not asked for: it begins its count anew.
    for num_batches in (3,) if kind == "Rounds" else (3, len(whole[0])):
        with loader_of(kind, **options) as loader:
            list(itertools.islice(loader, num_batches))
            state = through_json(loader.state_dict())
        with loader_of(kind, **options) as resumed:
            resumed.load_state_dict(state)
            epochs = [labels(resumed) for _ in range(3)]

            assert epochs == [whole[0][num_batches:], *whole[1:]]
            if num_batches == 3:
                resumed.load_state_dict(state)
                assert [labels(resumed) for _ in range(2)] == epochs[:2]
