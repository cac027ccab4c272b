"""What every way to build a cache promises: in this process, shard by shard, by an executor, and at a URL."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.cache.build.build import build_lmdb, build_shard, join
from fastload.cache.build.on_executor import build_on
from fastload.cache.build.upload import build_at_url
from fastload.cache.fingerprint import fingerprint_of
from fastload.cache.lmdb import copies
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheError, CacheMismatchError, ErrorBudgetError, ImageReadError
from fastload.files import attempts
from tests.cache.build_zoo import BrokenImages
from tests.kit.batches import assert_same_samples
from tests.kit.remote import FaultyFileSystem, cut, raising, register

if TYPE_CHECKING:
    from collections.abc import Iterator


class Source(BrokenImages):
    """Images; those of `bad` cannot be read, Ctrl-C comes at `stop`, and `shift` is added to each pixel."""

    def __init__(
        self, num_samples: int = 20, *, bad: Any = (), stop: int = -1, version: Any = None, shift: int = 0
    ) -> None:
        super().__init__(num_samples, bad=sorted(bad))
        self.stop, self.version, self.shift = stop, version, shift

    def sample(self, index: int) -> Any:
        if index == self.stop:
            raise KeyboardInterrupt
        image, label = super().sample(index)
        return image + self.shift, label

    def fingerprint(self) -> Any:
        return self.version


def here(source: Source, place: str, *, shards: int = 3, **options: Any) -> LMDBCache:
    known = fingerprint_of(source)
    return build_lmdb(source, place, shards=shards, num_workers=0, fingerprint=known, **options)


def by_shards(source: Source, place: str, *, shards: int = 3, **options: Any) -> LMDBCache:
    known, order = fingerprint_of(source), range(shards)
    for shard in reversed(order) if source.stop < 0 and "on_error" in options else order:
        build_shard(source, place, shard, shards, num_workers=0, fingerprint=known, **options)
    return join(place, error_budget=options.get("error_budget"))


def by_tasks(source: Source, place: str, *, shards: int = 3, **options: Any) -> LMDBCache:
    with ThreadPoolExecutor(1) as executor:
        return build_on(executor, lambda: source, place, num_cpus=1, shards=shards, **options)


def at_url(source: Source, place: str, *, shards: int = 3, **options: Any) -> LMDBCache:
    build_at_url(source, place, shards=shards, num_workers=0, fingerprint=fingerprint_of(source), **options)
    return LMDBCache(place)


WAYS = {way.__name__: way for way in (here, by_shards, by_tasks, at_url)}
URL = "faulty://bucket/cache"


class Builder:
    """One way to build, and its place."""

    def __init__(self, way: str, folder: Path) -> None:
        self.way, self.folder = way, folder
        self.place = URL if way == "at_url" else str(folder / "cache")
        self.files = f"{URL}/" if way == "at_url" else f"{self.place}.partial/"

    def __call__(self, source: Source, **options: Any) -> LMDBCache:
        cache = WAYS[self.way](source, self.place, progress=False, **options)
        cache.close()
        return LMDBCache(self.place)

    def stopped(self, **options: Any) -> None:
        """Leave an unfinished build: the first two of three shards are finished."""
        with pytest.raises(KeyboardInterrupt):
            self(Source(stop=15, **options), on_error="skip")

    def content(self) -> dict[str, bytes]:
        """All files, but those of local copies, by their paths."""
        local = {str(path): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        remote = {path: bytes(file.getvalue()) for path, file in FaultyFileSystem.store.items()}
        return {path: data for path, data in (local | remote).items() if "/host/" not in path}

    def plan(self, data: bytes) -> None:
        """Replace the plan of an unfinished build."""
        if self.way == "at_url":
            FaultyFileSystem().pipe_file(f"{URL}/plan.json", data)
        else:
            Path(self.files).mkdir(exist_ok=True)
            Path(self.files, "plan.json").write_bytes(data)

    def reported(self) -> list[int]:
        """The samples in the report."""
        end = "/errors.jsonl" if self.way == "at_url" else ".errors.jsonl"
        found = [data for path, data in self.content().items() if path.endswith(f"cache{end}")]
        return [json.loads(line)["index"] for data in found for line in data.splitlines()]


@contextlib.contextmanager
def builder_in(folder: Path, way: str) -> Iterator[Builder]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(copies.DIRECTORY_VARIABLE, str(folder / "host"))
        patch.setattr(attempts, "_sleep", lambda _: None)
        register()
        FaultyFileSystem.reset()
        yield Builder(way, folder)
        FaultyFileSystem.reset()


@pytest.fixture(params=WAYS)
def builder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Builder]:
    with builder_in(tmp_path, request.param) as made:
        yield made


@given(
    st.sampled_from([*WAYS]),
    st.integers(0, 13),
    st.integers(1, 6),
    st.sets(st.integers(1, 12), max_size=3),
    st.sets(st.integers(0, 12), max_size=4),
    st.lists(st.sampled_from([raising(ConnectionError("reset")), cut]), max_size=4),
)
@settings(max_examples=50)
def test_any_stops_and_faults_give_the_readable_samples(
    way: str, num_samples: int, shards: int, stops: set[int], bad: set[int], faults: list[Any]
) -> None:
    """Builds that end early and are run again, in any order of shards, give every readable sample."""
    options: dict[str, Any] = {"on_error": "skip", "shards": shards}
    bad = {index for index in bad if index < num_samples}
    with tempfile.TemporaryDirectory() as folder, builder_in(Path(folder), way) as build:
        FaultyFileSystem.faults[".lmdb"] = faults
        for stop in sorted(stops - bad):
            if stop < num_samples:
                with contextlib.suppress(KeyboardInterrupt):  # its shard is finished, maybe
                    build(Source(num_samples, stop=stop, bad=bad), **options)
        cache = build(Source(num_samples, bad=bad), **options)

        assert [index for index in range(num_samples) if index not in cache] == sorted(bad)
        for index in range(num_samples):
            assert_same_samples(cache.get(index), None if index in bad else Source().sample(index))
        assert cache.verify() == []
        assert build.reported() == sorted(bad)
        assert not [path for path in build.content() if ".partial" in path]
        cache.close()


@pytest.mark.parametrize("version", [None, "1"])
def test_a_second_build_opens_the_cache(version: Any, builder: Builder) -> None:
    """It writes nothing, and reads sample 0 at most, none where the fingerprints are the same."""
    builder(Source(version=version))
    before, again = builder.content(), Source(version=version)

    assert builder(again).num_shards == 3
    assert builder.content() == before
    if builder.way in ("here", "by_shards"):
        assert sum(again.reads) == (version is None) * (1 if builder.way == "here" else 3)
    elif builder.way == "at_url":
        assert sum(again.reads) == 1


def test_finished_shards_are_not_read_again(builder: Builder) -> None:
    """A build goes on with those that are missing, but for samples that it compares."""
    builder.stopped()
    again = Source()

    assert builder(again).verify() == []
    assert again.reads[1:9] + again.reads[10:13] == [0] * 11
    assert min(again.reads[13:]) == 1


DIFFERENCES: list[tuple[Source, dict[str, Any], str]] = [
    (Source(21, version="1"), {}, "number of samples is 21 here and 20 there"),
    (Source(version="1"), {"shards": 4}, "number of shards is 4 here and 3 there"),
    (Source(version="1"), {"codec": "png"}, "codec is png here and raw there"),
    (Source(version="2"), {}, '"2" here and "1" there'),
    (Source(shift=1), {}, "content of sample 0 is"),
]


@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_a_build_of_other_samples_or_settings_is_refused(state: str, builder: Builder) -> None:
    """The error says what differs and what to do, and nothing is changed."""
    builder(Source(version="1")) if state == "finished" else builder.stopped(version="1")
    before = builder.content()
    for source, options, said in DIFFERENCES:
        with pytest.raises(CacheMismatchError, match=rf"{said}.*(fastload cache rm|give another URL)"):
            builder(source, **options)
    assert builder.content() == before


def test_a_damaged_plan_is_an_error(builder: Builder) -> None:
    """It is never replaced: it may be that of another release, which is at work elsewhere."""
    builder.stopped()
    good = next(data for path, data in builder.content().items() if path.endswith("plan.json"))
    changes = (
        (b'"num_samples": 20', b'"num_samples": -20'),
        (b'"codec"', b'"coder"'),
        (b'"version": 1', b'"version": 9'),
    )
    damaged = [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"version": 1, "plan": 5}',
        *(good.replace(*c) for c in changes),
    ]
    for data in damaged:
        builder.plan(data)
        before = builder.content()
        with pytest.raises(CacheError, match=rf"{builder.place}.*(plan\.json is damaged|format 9)"):
            builder(Source())
        assert builder.content() == before


def test_a_bad_sample_ends_the_build_and_skip_leaves_it_out_later(builder: Builder) -> None:
    """The error names the sample and what is kept; finished shards are not built again."""
    kind = CacheError if builder.way == "by_tasks" else ImageReadError
    with pytest.raises(kind, match=r"14\.jpg") as caught:
        builder(Source(bad=[14]))
    said = "\n".join([str(caught.value), *caught.value.__notes__])
    again = Source(bad=[14])

    assert "in sample 14 of the dataset" in said
    assert 'on_error="skip"' in said
    assert f"Finished shards are kept at {builder.files.rstrip('/')}" in said
    assert builder(again, on_error="skip").num_cached == 19
    assert (again.reads[1:9], builder.reported()) == ([0] * 8, [14])


def test_left_out_samples_are_refused_where_none_may_be_left_out(builder: Builder) -> None:
    """Whoever wants all samples does not get a cache without some."""
    builder.stopped(bad=[3])

    with pytest.raises(CacheError, match="leaves out 1 samples"):
        builder(Source())
    assert builder(Source(bad=[3]), on_error="skip").num_cached == 19


def test_the_error_budget_holds_for_the_whole(builder: Builder) -> None:
    """One sample of each shard is left out, and two may be; a larger budget finishes the build."""
    options: dict[str, Any] = {"on_error": "skip"}
    with pytest.raises(ErrorBudgetError, match=r"3 samples .* allows 2 of 20"):
        builder(Source(bad=[1, 8, 19]), error_budget=2, **options)
    with pytest.raises(FileNotFoundError):
        LMDBCache(builder.place)

    assert builder(Source(bad=[1, 8, 19]), error_budget=0.15, **options).num_cached == 17


@pytest.mark.parametrize(
    ("call", "is_begun"),
    [
        *((call, False) for call in ("fsync", "link", "ftruncate", "makedirs", "rename")),
        ("fsync", True),
        ("rename", True),
    ],
)
def test_a_full_disk_is_an_error_whichever_call_meets_it(
    call: str, is_begun: bool, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says that a file could not be written, and the build goes on where there is room."""
    if is_begun:
        builder.stopped(bad=[3])

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(CacheError, match=r"cannot write .*No space left"):
            builder(Source(bad=[3]), on_error="skip")

    assert builder(Source(bad=[3]), on_error="skip").num_cached == 19
    assert not [path for path in builder.content() if ".partial" in path]


@pytest.mark.parametrize(
    "builder", ["here", "by_shards", "by_tasks"], indirect=True
)  # a URL's plan has digests
@pytest.mark.parametrize("damage", ["cut", "of another build", "its report"])
def test_a_finished_shard_that_is_damaged_is_built_again(
    damage: str, builder: Builder, tmp_path: Path
) -> None:
    """A shard is taken over whole, of the same build, and with the reasons of what it leaves out."""
    builder.stopped(bad=[3])
    shard = Path(builder.files, "00000-of-00003.lmdb")
    if damage == "its report":
        lines = b'{"index": "x", "path": null, "type": "", "reason": ""}', b"[" * 100_000, b"5", b"\xff"
        shard.with_name("00000-of-00003.errors.jsonl").write_bytes(b"\n".join(lines))
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-5])
    else:
        (tmp_path / "other").mkdir()
        other = Builder("here", tmp_path / "other")
        other.stopped(bad=[3])
        shard.write_bytes(Path(other.files, shard.name).read_bytes())
    again = Source(bad=[3])

    cache = builder(again, on_error="skip")

    assert (cache.num_cached, cache.verify(), builder.reported()) == (19, [], [3])
    assert min(again.reads[1:6]) == 1
    assert again.reads[6:9] == [0] * 3
