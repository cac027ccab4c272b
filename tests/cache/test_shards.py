"""Shards that single processes build, and the cache that is joined from them."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.cache.build import inventory
from fastload.cache.build.build import build_lmdb, build_shard, join
from fastload.cache.fingerprint import Fingerprint
from fastload.errors import CacheBusyError, CacheError, CacheMismatchError, ErrorBudgetError, ImageReadError
from tests.cache.build_zoo import BrokenImages, Stopping
from tests.cache.zoo import Everything, Images, RaggedImages
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastload.cache.build.build import BuiltShard


def shard_of(dataset: Any, path: Any, shard: int, num_shards: int, **options: Any) -> BuiltShard:
    return build_shard(dataset, path, shard, num_shards, num_workers=0, progress=False, **options)


def all_shards(dataset: Any, path: Any, num_shards: int, **options: Any) -> None:
    for shard in range(num_shards):
        shard_of(dataset, path, shard, num_shards, **options)


def local_twin(dataset: Any, path: Path, twin: Path, **options: Any) -> Path:
    """The cache that one process builds by the plan of the shards in PATH.partial."""
    fields = json.loads((path.parent / f"{path.name}.partial" / "plan.json").read_text())
    partial = twin.parent / f"{twin.name}.partial"
    partial.mkdir()
    local = {"version": fields["version"], "plan": fields["plan"], "error_budget": 1.0}
    (partial / "plan.json").write_text(json.dumps(local))
    shards = fields["plan"]["num_shards"]
    build_lmdb(dataset, twin, shards=shards, num_workers=0, progress=False, **options).close()
    return twin


def files_at(path: Path) -> dict[str, bytes]:
    """The content of all files of a cache."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {one.name: one.read_bytes() for one in path.iterdir()}


def own_files(path: Path) -> list[str]:
    """The names in PATH.partial that a process gives to files that it is writing."""
    return sorted(name for name in os.listdir(f"{path}.partial") if name.startswith("."))


class Calling(Images):
    """Calls a function when it reads one sample."""

    def __init__(self, num_samples: int, at: int, call: Any) -> None:
        super().__init__(num_samples)
        self.at = at
        self.call = call

    def sample(self, index: int) -> Any:
        if index == self.at:
            self.at = -1
            self.call()
        return super().sample(index)


# --- the result ------------------------------------------------------------------------------------------


@given(
    st.integers(0, 24),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
    st.sets(st.integers(0, 23), max_size=5),
    st.sets(st.integers(0, 23), max_size=5),
)
@settings(deadline=None, max_examples=40)
def test_any_order_and_any_stops_give_the_cache_of_one_process(
    num_samples: int, num_shards: int, random: Any, stops: set[int], bad: set[int]
) -> None:
    """Shards in any order are byte for byte a local build; some are stopped and begin again."""
    with tempfile.TemporaryDirectory() as folder:
        path, twin = Path(folder, "cache"), Path(folder, "twin")
        order = [shard for shard in range(num_shards) for _ in range(2)]
        random.shuffle(order)
        for stop in sorted(stops):
            if 0 < stop < num_samples and stop not in bad:
                actual = min(num_shards, num_samples)
                shard = next(s for s in range(actual) if stop < (s + 1) * num_samples // actual)
                with pytest.raises(KeyboardInterrupt):
                    shard_of(Stopping(num_samples, stop, bad=bad), path, shard, num_shards, on_error="skip")
        dataset = BrokenImages(num_samples, bad=sorted(bad))
        for shard in order:
            shard_of(dataset, path, shard, num_shards, on_error="skip")
        local_twin(dataset, path, twin, on_error="skip")

        cache = join(path)

        assert files_at(path) == files_at(twin)
        cache.close()
        reports = [Path(folder, f"{name}.errors.jsonl") for name in ("cache", "twin")]
        assert reports[0].exists() == reports[1].exists() == any(index < num_samples for index in bad)
        if reports[0].exists():
            assert reports[0].read_text() == reports[1].read_text()
        assert {"cache", "twin"} >= set(os.listdir(folder)) - {one.name for one in reports}


@pytest.mark.parametrize("options", [{}, {"codec": "png"}, {"codec": "jpeg", "quality": 80}])
@pytest.mark.parametrize("kind", [Images, RaggedImages, Everything])
def test_a_joined_cache_is_that_of_a_local_build(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Kinds of samples and codecs; the fingerprint and the classes are those of the plan."""
    known = Fingerprint({"files": "a"})
    all_shards(kind(30), tmp_path / "cache", 4, fingerprint=known, **options)
    twin = local_twin(kind(30), tmp_path / "cache", tmp_path / "twin", fingerprint=known, **options)

    cache = join(tmp_path / "cache")

    assert files_at(tmp_path / "cache") == files_at(twin)
    assert (cache.num_shards, cache.parts, cache.verify()) == (4, {"files": "a"}, [])


def test_one_shard_is_a_file(tmp_path: Path) -> None:
    """With N = 1 the cache is one file, as that of a local build, and no directory is left."""
    all_shards(Images(9), tmp_path / "cache", 1)
    twin = local_twin(Images(9), tmp_path / "cache", tmp_path / "twin")

    assert_same_samples(join(tmp_path / "cache").get(8), Images(9).sample(8))
    assert (tmp_path / "cache").read_bytes() == twin.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["cache", "twin"]


def test_workers_give_the_same_shard(tmp_path: Path) -> None:
    """A shard that two workers decode is the one that no worker decodes, but for the id of the build."""
    build_shard(Images(40), tmp_path / "cache", 1, 2, num_workers=2, progress=False)
    shard_of(Images(40), tmp_path / "cache", 0, 2)
    twin = local_twin(Images(40), tmp_path / "cache", tmp_path / "twin")
    join(tmp_path / "cache").close()

    assert files_at(tmp_path / "cache") == files_at(twin)


def test_a_finished_shard_is_not_built_again(tmp_path: Path) -> None:
    """The second call reads sample 0 alone, to compare it, and changes nothing."""
    first = shard_of(Images(20), tmp_path / "cache", 1, 2)
    before = files_at(tmp_path / "cache.partial")
    dataset = Images(20)
    second = shard_of(dataset, tmp_path / "cache", 1, 2)

    assert (first.was_built, second.was_built) == (True, False)
    assert (second.num_samples, second.nbytes) == (10, first.nbytes)
    assert sum(dataset.reads) == dataset.reads[0] == 1
    assert files_at(tmp_path / "cache.partial") == before


def test_shards_beyond_the_samples_are_empty(tmp_path: Path) -> None:
    """A dataset of three samples has three shards, whatever number was asked for."""
    built = [shard_of(Images(3), tmp_path / "cache", shard, 8) for shard in range(8)]

    assert [one.num_samples for one in built] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert join(tmp_path / "cache").num_shards == 3


def test_joining_twice_is_harmless(tmp_path: Path) -> None:
    """The second call opens the cache; a shard that is built once more finds it, too."""
    all_shards(Images(20), tmp_path / "cache", 3)
    join(tmp_path / "cache").close()
    before = files_at(tmp_path / "cache")

    assert "joined before" in join(tmp_path / "cache").explain()
    assert shard_of(Images(20), tmp_path / "cache", 2, 3).is_joined
    assert files_at(tmp_path / "cache") == before
    assert os.listdir(tmp_path) == ["cache"]
    with pytest.raises(CacheMismatchError, match="number of samples"):
        shard_of(Images(21), tmp_path / "cache", 2, 3)


# --- what is missing -------------------------------------------------------------------------------------


def test_join_names_missing_shards_as_commands(tmp_path: Path) -> None:
    """The numbers are those of `build-shard`, the first one in a command, and everything is kept."""
    for shard in (0, 1, 3, 4, 5):
        shard_of(Images(20), tmp_path / "cache", shard, 7)
    with pytest.raises(CacheError) as caught:
        join(tmp_path / "cache")

    command = f"fastload cache build-shard SOURCE {tmp_path}/cache"
    assert str(caught.value).startswith("2 of 7 shards are missing or damaged: 3, 7. ")
    assert f"'{command} 3/7', then join again" in str(caught.value)
    for shard in (2, 6):
        shard_of(Images(20), tmp_path / "cache", shard, 7)
    assert join(tmp_path / "cache").verify() == []


def test_join_of_many_missing_shards_is_short(tmp_path: Path) -> None:
    """Ten shards are named at most."""
    shard_of(Images(500), tmp_path / "cache", 4, 500)
    with pytest.raises(
        CacheError, match=r"^499 of 500 shards are missing or damaged: 1, 2, .*, \.\.\.\. Build"
    ):
        join(tmp_path / "cache")


@pytest.mark.parametrize("damage", ["cut", "of another build"])
def test_join_refuses_a_shard_that_is_damaged_or_foreign(damage: str, tmp_path: Path) -> None:
    """The error says so, and building this shard again replaces it."""
    all_shards(Images(20), tmp_path / "cache", 3)
    all_shards(Images(20), tmp_path / "other", 3)
    name = "00001-of-00003.lmdb"
    other = (tmp_path / "other.partial" / name).read_bytes()
    (tmp_path / "cache.partial" / name).write_bytes(other if damage == "of another build" else other[:-5])

    with pytest.raises(CacheError, match="1 of 3 shards are missing or damaged: 2"):
        join(tmp_path / "cache")
    shard_of(Images(20), tmp_path / "cache", 1, 3)
    assert join(tmp_path / "cache").verify() == []


def test_join_of_nothing(tmp_path: Path) -> None:
    """Without a cache and shards the error says so; an empty directory is nothing."""
    with pytest.raises(FileNotFoundError, match="neither a cache nor a shard"):
        join(tmp_path / "cache")
    (tmp_path / "cache.partial").mkdir()
    with pytest.raises(FileNotFoundError, match="neither a cache nor a shard"):
        join(tmp_path / "cache")


# --- samples that are left out ---------------------------------------------------------------------------


def test_reports_become_one(tmp_path: Path) -> None:
    """In the order of the indices, whatever shard was built first; the shards' own reports go."""
    dataset = BrokenImages(20, bad=[1, 2, 9, 13, 19])
    for shard in (3, 1, 0, 2):
        shard_of(dataset, tmp_path / "cache", shard, 4, on_error="skip")
    cache = join(tmp_path / "cache")
    lines = [json.loads(line) for line in (tmp_path / "cache.errors.jsonl").read_text().splitlines()]

    assert [line["index"] for line in lines] == [1, 2, 9, 13, 19]
    assert lines[0] == {
        "index": 1, "path": "1.jpg", "type": "ImageReadError", "reason": "it is broken", "worker": None
    }  # fmt: skip
    assert (cache.num_samples, cache.num_cached) == (20, 15)
    assert sorted(os.listdir(tmp_path / "cache")) == [f"{shard:05d}-of-00004.lmdb" for shard in range(4)]


def test_a_shard_without_its_report_is_built_again(tmp_path: Path) -> None:
    """No sample is left out without its reason."""
    shard_of(BrokenImages(9, bad=[4]), tmp_path / "cache", 0, 1, on_error="skip")
    (report,) = (tmp_path / "cache.partial").glob("*.jsonl")
    report.write_text("")

    assert shard_of(BrokenImages(9, bad=[4]), tmp_path / "cache", 0, 1, on_error="skip").was_built
    assert join(tmp_path / "cache").num_cached == 8


def test_the_budget_holds_for_the_whole(tmp_path: Path) -> None:
    """Shards within it are joined only if their sum is; all is kept, and a larger budget joins them."""
    dataset = BrokenImages(20, bad=[0, 6, 12])
    all_shards(dataset, tmp_path / "cache", 4, on_error="skip", error_budget=2)
    before = files_at(tmp_path / "cache.partial")
    with pytest.raises(
        ErrorBudgetError, match=r"3 samples .* allows 2 of 20\. The last one is 12 \(12.jpg\)"
    ):
        join(tmp_path / "cache")

    assert files_at(tmp_path / "cache.partial") == before
    assert join(tmp_path / "cache", error_budget=0.15).num_cached == 17


def test_a_shard_above_the_budget_ends_early(tmp_path: Path) -> None:
    """It is not finished; it is built again with a larger budget."""
    options: dict[str, Any] = {"on_error": "skip"}
    with pytest.raises(ErrorBudgetError, match=r"2 samples .* allows 1 of 40.* build again to resume"):
        shard_of(BrokenImages(40, bad=[21, 23, 25]), tmp_path / "cache", 1, 2, error_budget=1, **options)
    dataset = BrokenImages(40, bad=[21, 23, 25])

    assert shard_of(dataset, tmp_path / "cache", 1, 2, **options).num_left_out == 3


def test_a_shard_that_left_samples_out_is_refused_without_skip(tmp_path: Path) -> None:
    """Somebody who wants all samples does not get a cache without some."""
    shard_of(BrokenImages(9, bad=[3]), tmp_path / "cache", 0, 2, on_error="skip")

    with pytest.raises(CacheMismatchError, match=r"shard 1 .* leaves out 1 samples"):
        shard_of(Images(9), tmp_path / "cache", 0, 2)


def test_a_bad_sample_is_raised_and_the_shard_is_built_with_skip_later(tmp_path: Path) -> None:
    """The note names the way out; the plan of the first process is followed."""
    with pytest.raises(ImageReadError) as caught:
        shard_of(BrokenImages(9, bad=[7]), tmp_path / "cache", 1, 2)

    assert caught.value.__notes__[-1] == 'on_error="skip" leaves out samples that cannot be read'
    all_shards(BrokenImages(9, bad=[7]), tmp_path / "cache", 2, on_error="skip")
    assert join(tmp_path / "cache").num_cached == 8


# --- other plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "num_shards", "options", "reason"),
    [
        (Images(21), 4, {}, "number of samples is 21 here and 20 there"),
        (RaggedImages(20), 4, {}, "content of sample 0 is"),
        (Images(20), 5, {}, "number of shards is 5 here and 4 there"),
        (Images(20), 4, {"codec": "png"}, "codec is png here and raw there"),
        (Images(20), 4, {"fingerprint": Fingerprint({"size": "9"})}, 'size is "9" here and "8" there'),
    ],
)
def test_a_difference_of_plans_is_an_error_that_deletes_nothing(
    dataset: Any, num_shards: int, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Other machines may be at work, so the error names the difference, and all files stay."""
    known = {"fingerprint": Fingerprint({"size": "8"})} if "fingerprint" in options else {}
    shard_of(Images(20), tmp_path / "cache", 0, 4, **known)
    before = files_at(tmp_path / "cache.partial")
    with pytest.raises(CacheMismatchError, match=reason):
        shard_of(dataset, tmp_path / "cache", 1, num_shards, **options)

    assert files_at(tmp_path / "cache.partial") == before


@pytest.mark.parametrize("text", ["", "[]", '{"sharded": true}', '{"sharded": true, "version": 99}'])
def test_a_plan_that_cannot_be_read_is_an_error(text: str, tmp_path: Path) -> None:
    """It is never replaced: it may be that of another release, which is at work elsewhere."""
    shard_of(Images(20), tmp_path / "cache", 0, 2)
    (tmp_path / "cache.partial" / "plan.json").write_text(text)
    for attempt in (lambda: shard_of(Images(20), tmp_path / "cache", 1, 2), lambda: join(tmp_path / "cache")):
        with pytest.raises(CacheMismatchError, match="fastload cache rm"):
            attempt()

    assert len(os.listdir(tmp_path / "cache.partial")) == 2


def test_one_process_finishes_what_single_shards_began(tmp_path: Path) -> None:
    """A build of the whole follows the plan of the shards, and reads only what is missing."""
    shard_of(Images(20), tmp_path / "cache", 1, 2)
    dataset = Images(20)

    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=0)

    assert cache.verify() == []
    assert dataset.reads == [1] * 10 + [0] * 10


def test_single_shards_finish_what_one_process_began(tmp_path: Path) -> None:
    """A shard continues the build of the whole."""
    with pytest.raises(ImageReadError):
        build_lmdb(BrokenImages(20, bad=[13]), tmp_path / "cache", num_workers=0, shards=2)
    dataset = Images(20)

    assert shard_of(dataset, tmp_path / "cache", 1, 2).was_built
    assert dataset.reads == [1] + [0] * 9 + [1] * 10
    assert join(tmp_path / "cache").verify() == []


def test_a_build_of_the_whole_never_replaces_a_plan_of_shards(tmp_path: Path) -> None:
    """Other machines may follow it."""
    shard_of(Images(20), tmp_path / "cache", 0, 2)
    before = files_at(tmp_path / "cache.partial")

    with pytest.raises(CacheMismatchError, match="number of shards is 1 here and 2 there"):
        build_lmdb(Images(20), tmp_path / "cache", num_workers=0, shards=1)
    assert files_at(tmp_path / "cache.partial") == before


@pytest.mark.parametrize("num_shards", [0, True, "4"])
def test_numbers_of_shards_that_are_not_valid(num_shards: Any, tmp_path: Path) -> None:
    """The error is that of a local build."""
    with pytest.raises(ValueError, match="shards should be an int from 1"):
        build_shard(Images(4), tmp_path / "cache", 0, num_shards)


@pytest.mark.parametrize("shard", [-1, 4, True, "1"])
def test_shards_that_do_not_exist(shard: Any, tmp_path: Path) -> None:
    """The error states the range."""
    with pytest.raises(ValueError, match="shard should be an int from 0 to 3"):
        build_shard(Images(4), tmp_path / "cache", shard, 4)


# --- several processes -----------------------------------------------------------------------------------


def test_two_builders_of_one_shard_exclude_each_other(tmp_path: Path) -> None:
    """The second one is told, and the first one finishes."""

    def again() -> None:
        with pytest.raises(CacheBusyError, match=r"00001-of-00002\.lmdb is being built by another thread"):
            shard_of(Images(20), tmp_path / "cache", 1, 2)

    shard_of(Calling(20, 14, again), tmp_path / "cache", 1, 2)

    assert sorted(os.listdir(tmp_path / "cache.partial")) == ["00001-of-00002.lmdb", "plan.json"]
    shard_of(Images(20), tmp_path / "cache", 0, 2)
    assert join(tmp_path / "cache").verify() == []


@pytest.mark.parametrize("instead", ["nothing", "one process", "other shards"])
def test_a_directory_that_is_removed_meanwhile_is_an_error(instead: str, tmp_path: Path) -> None:
    """The error says what happened, and files of another build at the same place are not touched."""
    path, partial = tmp_path / "cache", tmp_path / "cache.partial"
    found = []

    def remove() -> None:
        for one in partial.iterdir():
            one.unlink()
        partial.rmdir()
        if instead == "one process":
            with pytest.raises(KeyboardInterrupt):
                build_lmdb(Stopping(30, 19), path, num_workers=0, shards=3)
        if instead == "other shards":
            shard_of(Images(30), path, 0, 3)
        if partial.exists():
            found.append(files_at(partial))

    with pytest.raises(CacheError, match=r"was removed while a shard was built in it"):
        shard_of(Calling(20, 14, remove), path, 1, 2)

    if found:
        assert files_at(partial) == found[0]


def test_processes_that_begin_at_once_agree_on_one_plan(tmp_path: Path) -> None:
    """Six processes, released by one event; their shards have one id."""
    context = multiprocessing.get_context("fork")
    event = context.Event()
    children = [context.Process(target=_begin, args=(event, tmp_path / "cache", shard)) for shard in range(6)]
    for child in children:
        child.start()
    event.set()
    for child in children:
        child.join()
    codes = [child.exitcode for child in children]
    for child in children:
        child.close()

    assert codes == [0] * 6
    assert own_files(tmp_path / "cache") == []
    assert join(tmp_path / "cache").verify() == []


def _begin(event: Any, path: Path, shard: int) -> None:
    event.wait()
    shard_of(Images(24), path, shard, 6)


def _die(path: Path) -> None:
    shard_of(Calling(20, 14, lambda: os.kill(os.getpid(), 9)), path, 1, 2)


def killed(path: Path) -> str:
    """Kill a process in the middle of shard 2 of 2; returns the name of the file that it leaves."""
    child = multiprocessing.get_context("fork").Process(target=_die, args=(path,))
    child.start()
    child.join()
    child.close()
    return next(name for name in own_files(path) if not name.endswith("-lock"))


@pytest.mark.parametrize("way", ["the same shard", "join", "rm"])
def test_leftovers_of_a_killed_process_go(way: str, tmp_path: Path) -> None:
    """With the next build of the same shard, with join, and with rm; the shard is built from its start."""
    path = tmp_path / "cache"
    leftover = tmp_path / "cache.partial" / killed(path)
    if way == "rm":
        inventory.remove(str(path))
        assert os.listdir(tmp_path) == []
        return
    shard_of(Images(20), path, 0, 2)
    assert leftover.exists()
    content = leftover.read_bytes()
    shard_of(Images(20), path, 1, 2)
    assert not leftover.exists()
    if way == "join":
        # As if the process had been killed on another machine.
        leftover.with_name(f".00001-of-00002.lmdb.elsewhere.{'0' * 16}").write_bytes(content)
        assert len(own_files(path)) == 1
        shard_of(Images(20), path, 1, 2)
        assert len(own_files(path)) == 1  # it may be alive there

    assert join(path).verify() == []
    assert sorted(os.listdir(path)) == ["00000-of-00002.lmdb", "00001-of-00002.lmdb"]


def test_a_shard_that_is_being_built_here_is_not_removed(tmp_path: Path) -> None:
    """`rm` says that a process is at work, and the process finishes its shard."""
    said = []

    def try_to_remove() -> None:
        said.append([one.state for one in inventory.list_caches(str(tmp_path))])
        with pytest.raises(CacheBusyError, match=r"shards of .* are being built"):
            inventory.remove(str(tmp_path / "cache"))

    assert shard_of(Calling(20, 14, try_to_remove), tmp_path / "cache", 1, 2).was_built
    assert said == [["building"]]


@pytest.mark.parametrize("name", ["notes.txt", ".00000-of-00002.lmdb.swp", "00000-of-00002.errors.txt"])
def test_foreign_files_stay(name: str, tmp_path: Path) -> None:
    """A build of a shard, join and rm refuse a directory with a file of another program."""
    all_shards(Images(4), tmp_path / "cache", 2)
    (tmp_path / "cache.partial" / name).write_text("mine")
    before = files_at(tmp_path / "cache.partial")
    for attempt in (
        lambda: shard_of(Images(4), tmp_path / "cache", 0, 2),
        lambda: join(tmp_path / "cache"),
        lambda: inventory.remove(str(tmp_path / "cache")),
    ):
        with pytest.raises(CacheError, match=r"cache\.partial"):
            attempt()

    assert files_at(tmp_path / "cache.partial") == before


@pytest.mark.parametrize(
    ("shards", "problem"),
    [
        ([0], "1 of 2 shards are missing: run the build again"),
        ([0, 1], "all 2 shards are built: run 'fastload cache join"),
    ],
)
def test_unfinished_shards_are_listed(shards: Sequence[int], problem: str, tmp_path: Path) -> None:
    """With what is left to do."""
    for shard in shards:
        shard_of(Images(4), tmp_path / "cache", shard, 2)
    (found,) = inventory.list_caches(str(tmp_path))

    assert found.state == "unfinished"
    assert found.problem is not None
    assert found.problem.startswith(problem)


# --- a system that refuses -------------------------------------------------------------------------------


def shard_under_limit(path: str) -> None:
    """Run in a child: exit with 0 if a file-size limit gives a clear error and leaves no file."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        shard_of(Images(40, shape=(64, 64, 3)), path, 1, 2)
    except CacheError as error:
        is_clear = "cannot write the cache" in str(error) and "`ulimit -f`" in str(error)
        os._exit(0 if is_clear and not os.path.exists(f"{path}.partial") else 2)
    os._exit(1)


def test_a_full_disk(tmp_path: Path) -> None:
    """A shard that does not fit is a clear error, and is built where there is room."""
    child = multiprocessing.get_context("fork").Process(
        target=shard_under_limit, args=(str(tmp_path / "cache"),)
    )
    child.start()
    child.join()
    code = child.exitcode
    child.close()

    assert code == 0
    all_shards(Images(40, shape=(64, 64, 3)), tmp_path / "cache", 2)
    assert join(tmp_path / "cache").verify() == []


@pytest.mark.parametrize(
    ("call", "when"),
    [
        *((call, "first") for call in ("fsync", "link", "ftruncate", "makedirs", "rename")),
        *((call, "in the middle") for call in ("fsync", "ftruncate", "rename")),
    ],
)
def test_any_call_may_be_refused(
    call: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is a clear error whichever call meets it, and the shard can be built afterwards."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, os.strerror(28))

    dataset = BrokenImages(6, bad=[4])
    if when == "in the middle":
        shard_of(dataset, tmp_path / "cache", 0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(CacheError, match=r"cannot write the cache .*No space left"):
            shard_of(dataset, tmp_path / "cache", 1, 2, on_error="skip")

    all_shards(dataset, tmp_path / "cache", 2, on_error="skip")
    assert join(tmp_path / "cache").num_cached == 5


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan gets its name in another way."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    all_shards(Images(6), tmp_path / "cache", 2)
    assert join(tmp_path / "cache").verify() == []


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Shards are built and joined all the same, as no lock is needed."""
    from fastload.cache import locks

    def refuse(*args: Any) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(locks.fcntl, "lockf", refuse)
    all_shards(Images(6), tmp_path / "cache", 2)
    with caplog.at_level(logging.INFO, "fastload"):
        assert join(tmp_path / "cache").verify() == []

    assert "not locked, because" in caplog.text
    assert os.listdir(tmp_path) == ["cache"]
    inventory.remove(str(tmp_path / "cache"))
    assert os.listdir(tmp_path) == []


def test_progress_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The shard is named as on the command line."""
    with caplog.at_level(logging.INFO, "fastload"):
        shard_of(BrokenImages(9, bad=[1]), tmp_path / "cache", 0, 3, on_error="skip")

    assert f"building shard 1 of 3 of {tmp_path}/cache: finished" in caplog.text
