"""A state machine: builds, kills, reopens and damage, with a dict as the model of what a cache holds."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastload.cache.build import writer as lmdb_writer
from fastload.cache.build.build import build_lmdb
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheCorruptError, CacheMismatchError
from tests.kit.batches import assert_same_samples

_IMAGES = st.builds(
    lambda seed, height, width: np.random.RandomState(seed).randint(0, 256, (height, width, 3), np.uint8),
    st.integers(0, 1000),
    st.integers(1, 40),
    st.integers(1, 40),
)
_SAMPLES = st.one_of(
    st.tuples(_IMAGES, st.integers()),
    st.fixed_dictionaries({"image": _IMAGES, "name": st.text(max_size=5), "box": st.none() | st.floats()}),
    st.binary(max_size=6000),
)


class Killed(BaseException):
    """What a kill looks like to the code under test, which has no time to clean up."""


class Source:
    """Samples from the model; index -> sample, or None for what cannot be read."""

    def __init__(self, model: dict[int, Any], killed_at: int | None = None) -> None:
        self.model = model
        self.killed_at = killed_at
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.model)

    def __getitem__(self, index: int) -> Any:
        if index == self.killed_at:
            raise Killed
        self.reads.append(index)
        if self.model[index] is None:
            raise OSError(f"no sample {index}")
        return self.model[index]


class LMDBStates(RuleBasedStateMachine):
    """One destination, of which at any time there is nothing, a part, or all."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp()
        self.path = Path(self.directory, "cache")
        self.cache: LMDBCache | None = None
        self.is_damaged = False

    @initialize(
        samples=st.lists(st.none() | _SAMPLES, max_size=12),
        codec=st.sampled_from(["raw", "png"]),
        shards=st.integers(1, 4),
        commit_bytes=st.integers(1, 9000),
    )
    def begin(self, samples: list[Any], codec: str, shards: int, commit_bytes: int) -> None:
        self.model = dict(enumerate(samples))
        self.settings = {"codec": codec, "shards": shards, "on_error": "skip", "num_workers": 0}
        self.commit_bytes = commit_bytes

    def build(self, source: Source) -> LMDBCache:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lmdb_writer, "_COMMIT_BYTES", self.commit_bytes)
            patch.setattr("time.time", lambda: 1e9)  # the same bytes at every run: damage hits the same
            patch.setattr("os.urandom", bytes)
            return build_lmdb(source, self.path, progress=False, **self.settings)

    @precondition(lambda self: self.cache is None and len(self.model) > 1)
    @rule(data=st.data())
    def build_is_killed(self, data: st.DataObject) -> None:
        """Dies at a sample that was not written yet."""
        at = data.draw(st.integers(1, len(self.model) - 1))
        source = Source(self.model, killed_at=at)
        with contextlib.suppress(Killed):
            self.cache = self.build(source)  # it may be beyond that sample already
        assert os.path.exists(self.path) == (self.cache is not None)
        if self.cache is None:
            later = source.reads[1:]  # sample 0 comes first, to be compared
            assert later == list(range(at))[at - len(later) :]

    @precondition(lambda self: self.cache is None)
    @rule()
    def build_finishes(self) -> None:
        """Goes on with whatever lies there."""
        self.cache = self.build(Source(self.model))

    @precondition(lambda self: self.cache is not None and not self.is_damaged)
    @rule()
    def build_again_opens(self) -> None:
        """A second build reads no more than sample 0."""
        source = Source(self.model)
        self.cache = self.build(source)
        assert source.reads in ([], [0])

    @precondition(lambda self: self.cache is not None and not self.is_damaged and bool(self.model))
    @rule()
    def another_source_is_refused(self) -> None:
        """A source with one more sample is another."""
        with pytest.raises(CacheMismatchError):
            self.build(Source({**self.model, len(self.model): (1, 2)}))

    @precondition(lambda self: self.cache is not None and not self.is_damaged)
    @rule()
    def reopen(self) -> None:
        """As another process would, after this one has let go."""
        assert self.cache is not None
        self.cache.close()
        self.cache = LMDBCache(self.path)

    @precondition(lambda self: self.cache is not None and not self.is_damaged)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """One bit of one file, copied so that nobody has it open."""
        assert self.cache is not None
        self.cache.close()
        files = [self.path] if self.path.is_file() else sorted(self.path.iterdir())
        file = data.draw(st.sampled_from(files))
        content = bytearray(file.read_bytes())
        content[int(data.draw(st.floats(0, 0.9999)) * len(content))] ^= 1 << data.draw(st.integers(0, 7))
        file.unlink()
        file.write_bytes(content)
        self.is_damaged = True
        try:
            self.cache = LMDBCache(self.path)
        except (CacheCorruptError, CacheMismatchError):
            self.cache = None
            if self.path.is_dir():
                shutil.rmtree(self.path)
            else:
                self.path.unlink()
            self.is_damaged = False

    @precondition(lambda self: self.cache is not None and self.is_damaged)
    @rule()
    def delete(self) -> None:
        """What the error says to do."""
        assert self.cache is not None
        self.cache.close()
        self.cache = None
        shutil.rmtree(self.path) if self.path.is_dir() else self.path.unlink()
        self.is_damaged = False

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        """Every sample as in the model; one record at most is lost to one flipped bit, with an error."""
        if self.cache is None:
            return
        lost = 0
        for index, sample in self.model.items():
            try:
                assert_same_samples(self.cache.get(index), sample)
            except CacheCorruptError:
                lost += 1
        assert lost <= self.is_damaged
        assert self.cache.num_cached == sum(sample is not None for sample in self.model.values())

    def teardown(self) -> None:
        if self.cache is not None:
            self.cache.close()
        shutil.rmtree(self.directory)


TestLMDBStates = pytest.mark.slow(LMDBStates.TestCase)
TestLMDBStates.settings = settings(
    max_examples=40, stateful_step_count=10, suppress_health_check=list(HealthCheck)
)
