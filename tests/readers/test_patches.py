"""patches: libraries are met while datasets are read, and are as they were for everybody else."""

from __future__ import annotations

import copy
import copyreg
import inspect
import math
import os
import pickle
import sys
import threading
import types
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest
import tifffile

from fastload.readers import patches
from fastload.readers.decode_cache import DecodeCache
from fastload.readers.patch import Patch
from tests.kit.decoding import DictStore
from tests.readers.reader_zoo import Images, read_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fastload.readers.decode_cache import DecodeCache as Cache

IMREAD, ASARRAY = cv2.imread, tifffile.TiffFile.asarray


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Libraries are as they were after each test."""
    yield
    owner = object_with_weakref()
    patches.retain(owner)
    patches.release(owner)
    assert cv2.imread is IMREAD
    assert tifffile.TiffFile.asarray is ASARRAY


class object_with_weakref:
    """Stands for a cache."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """An image."""
    path = str(tmp_path / "image.png")
    cv2.imwrite(path, np.arange(60, dtype=np.uint8).reshape(4, 5, 3))
    return path


def test_modules_are_met_during_a_fetch_alone(cache: Cache) -> None:
    """Functions of modules are wrappers while a dataset is read, in fetches within fetches, too."""
    wrapper = cv2.imread
    assert wrapper is not IMREAD
    with patches.installed():
        assert cv2.imread is wrapper
    assert cv2.imread is wrapper


def test_methods_stay_until_the_last_cache_is_closed() -> None:
    """Methods of classes are wrappers until the last cache is released."""
    one, other = object_with_weakref(), object_with_weakref()
    patches.retain(one)
    patches.retain(other)
    with patches.installed():
        assert tifffile.TiffFile.asarray is not ASARRAY
    assert tifffile.TiffFile.asarray is not ASARRAY
    patches.release(one)
    assert tifffile.TiffFile.asarray is not ASARRAY
    with patches.installed():
        patches.release(other)
        assert tifffile.TiffFile.asarray is not ASARRAY
    patches.retain(one)
    patches.release(one)
    assert tifffile.TiffFile.asarray is ASARRAY


def test_without_a_cache_wrappers_do_what_the_original_does(path: str, tmp_path: Path) -> None:
    """Results and errors of a wrapper that is not active are the original's."""
    with patches.installed():
        assert np.array_equal(cv2.imread(path), IMREAD(path))
        assert np.array_equal(cv2.imread(path, flags=0), IMREAD(path, 0))
        assert cv2.imread.__doc__ == IMREAD.__doc__
        assert cv2.imread.__name__ == "imread"
        for arguments in ((), (3,), (path, "x"), (path, 1, 2, 3)):
            with pytest.raises(Exception) as expected:  # noqa: PT011
                IMREAD(*arguments)
            with pytest.raises(type(expected.value)) as error:
                cv2.imread(*arguments)
            assert str(error.value) == str(expected.value)
        assert inspect.signature(tifffile.TiffFile.asarray) == inspect.signature(ASARRAY)


@pytest.mark.parametrize("taken", ["before", "meanwhile"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_dataset_that_keeps_a_function_is_pickled_at_any_time(path: str, taken: str, method: str) -> None:
    """A function that a dataset took, before or during a fetch, pickles then and later, for any process."""
    dataset = Images(path)
    with patches.installed():
        if taken == "meanwhile":
            dataset = Images(path)
        texts = [pickle.dumps(dataset), bytes(ForkingPickler.dumps(dataset))]
        copies = [copy.deepcopy(dataset), *map(pickle.loads, texts)]
        assert all(bytes(one[0]) == bytes(IMREAD(path)) for one in copies)
    texts.append(pickle.dumps(dataset))
    for text in texts:
        assert pickle.loads(text).load is IMREAD
    with get_context(method).Pool(1) as pool:
        assert pool.apply(read_first, (dataset,)) == bytes(IMREAD(path))


def test_a_function_that_a_class_took_meanwhile_is_no_method(path: str) -> None:
    """A built-in function does not bind as the attribute of a class, nor does its wrapper."""
    with patches.installed():

        class Loader:
            load = cv2.imread

        assert np.array_equal(Loader().load(path), IMREAD(path))
    assert np.array_equal(Loader().load(path), IMREAD(path))


def test_other_builtins_pickle_as_ever() -> None:
    """While functions are replaced, functions that are not pickle as they do without."""
    functions = [len, [1].append, np.array, math.sin, dict.fromkeys]
    expected = [pickle.dumps(function) for function in functions]
    with patches.installed():
        assert copyreg.dispatch_table.get(BuiltinFunctionType) is not None
        assert [pickle.dumps(function) for function in functions] == expected


def test_the_table_of_pickle_is_as_it_was() -> None:
    """The last release takes away what pickles built-in functions."""
    owner = object_with_weakref()
    patches.retain(owner)
    with patches.installed():
        pass
    patches.release(owner)
    assert BuiltinFunctionType not in copyreg.dispatch_table


def test_what_other_code_replaced_before_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, path: str, settled: None
) -> None:
    """A function that another library put in place of cv2.imread stays, and is met at imdecode."""

    def imread(filename: str, flags: int = cv2.IMREAD_COLOR) -> Any:
        return cv2.imdecode(np.fromfile(filename, np.uint8), flags)

    monkeypatch.setattr(cv2, "imread", imread)
    store = DictStore()
    with patches.installed(), DecodeCache(store, verify_share=1).active():
        assert cv2.imread is imread
        assert np.array_equal(cv2.imread(path), IMREAD(path))
        assert np.array_equal(cv2.imread(path), IMREAD(path))
    assert cv2.imread is imread
    assert len(store.values) == 1


def test_what_other_code_replaces_meanwhile_stays(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A function that was put in place during a fetch is not taken away, and what it calls still works."""
    with patches.installed():
        wrapped = cv2.imread
        monkeypatch.setattr(cv2, "imread", lambda *args: wrapped(*args))
        theirs = cv2.imread
    assert cv2.imread is theirs
    for _ in range(2):
        assert np.array_equal(cv2.imread(path), IMREAD(path))
        with patches.installed():
            assert cv2.imread is theirs
    vars(cv2)["imread"] = IMREAD  # monkeypatch would restore the wrapper
    monkeypatch.undo()
    vars(cv2)["imread"] = IMREAD


class _Library:
    """A library of three functions, one of which is another's."""

    def __init__(self) -> None:
        self.module = types.ModuleType("library")
        exec("def own(): return 'own'", vars(self.module))
        vars(self.module)["foreign"] = lambda: "foreign"


@pytest.mark.parametrize(("name", "is_met"), [("own", True), ("foreign", False), ("missing", False)])
def test_only_functions_of_the_library_itself_are_replaced(name: str, is_met: bool) -> None:
    """A function that came from elsewhere, or does not exist, is not replaced."""
    module = _Library().module
    patch = Patch(module, name, lambda original: lambda: "met")
    before = vars(module).get(name)
    patch.put()
    assert (vars(module).get(name) is not before) == is_met
    patch.take_away()
    assert vars(module).get(name) is before


def test_a_release_that_a_reader_does_not_know_is_no_error(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A reader that fails to meet its library leaves it alone."""
    broken = types.ModuleType("broken_reader")
    broken.patches = lambda: cv2.gone  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "broken_reader", broken)
    monkeypatch.setattr(patches, "READERS", {"cv2": "broken_reader"})
    monkeypatch.setattr(patches._patches, "by_library", {})
    for _ in range(2):
        with patches.installed():
            assert cv2.imread is IMREAD


def _in_child(work: Callable[[], bool]) -> bool:
    """Whether work is true in a forked child."""
    pid = os.fork()
    if pid == 0:
        is_true = False
        try:
            is_true = work()
        finally:
            os._exit(0 if is_true else 1)
    return os.waitpid(pid, 0)[1] == 0


def test_a_child_forked_by_the_reading_thread_goes_on_reading(path: str, cache: Cache) -> None:
    """A dataset that forks in the middle of a fetch reads in the child as in the parent."""
    expected = IMREAD(path)
    cv2.imread(path)
    assert _in_child(lambda: cv2.imread is not IMREAD and np.array_equal(cv2.imread(path), expected))
    assert np.array_equal(cv2.imread(path), expected)


def test_a_child_forked_during_another_threads_fetch_lets_the_libraries_be(path: str) -> None:
    """Nobody reads in such a child: there the functions are originals, and a fetch works."""
    is_reading, is_over = threading.Event(), threading.Event()

    def fetch() -> None:
        with patches.installed():
            is_reading.set()
            is_over.wait(30)

    thread = threading.Thread(target=fetch)
    thread.start()
    is_reading.wait(30)

    def work() -> bool:
        is_original = cv2.imread is IMREAD
        with patches.installed():
            is_met = cv2.imread is not IMREAD
        return is_original and is_met and cv2.imread is IMREAD

    try:
        assert cv2.imread is not IMREAD
        assert _in_child(work)
    finally:
        is_over.set()
        thread.join()


def test_a_child_forked_while_the_libraries_are_met_does_not_wait() -> None:
    """The lock of a thread that is not in the child is nobody's there."""
    with patches._patches.lock:

        def work() -> bool:
            with patches.installed():
                return True

        assert _in_child(work)


def test_fetches_of_many_threads_end_with_the_originals(path: str) -> None:
    """Functions stay replaced until the last of many threads is done, and are originals afterwards."""
    errors: list[Any] = []

    def work() -> None:
        for _ in range(50):
            with patches.installed():
                if cv2.imread is IMREAD:
                    errors.append("not met")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
