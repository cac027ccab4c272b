"""patches: libraries are met while datasets are read, and are as they were for everybody else."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import math
import operator
import os
import pickle
import pkgutil
import sys
import types
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest
import tifffile

from fastload.readers import patches
from fastload.readers.decode_cache import DecodeCache
from fastload.readers.patches import Patch
from tests.kit.decoding import DictStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fastload.readers.decode_cache import DecodeCache as Cache

ASARRAY = tifffile.TiffFile.asarray


def _original(function: str) -> Any:
    """What a library has without us, such as "cv2.imread"."""
    patches.meet()
    found = [each for library in patches._by_library.values() for each in library]
    return next(
        each.original for each in found if f"{getattr(each.owner, '__name__', '')}.{each.name}" == function
    )


IMREAD = _original("cv2.imread")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Libraries are as they were after each test."""
    yield
    owner = object_with_weakref()
    patches.retain(owner)
    patches.release(owner)
    assert vars(tifffile.TiffFile)["asarray"] is ASARRAY


class object_with_weakref:
    """Stands for a cache."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """An image."""
    path = str(tmp_path / "image.png")
    cv2.imwrite(path, np.arange(60, dtype=np.uint8).reshape(4, 5, 3))
    return path


def _library() -> types.ModuleType:
    """A library of two functions, one of which is another's."""
    module = types.ModuleType("library")
    exec("def own(): return 'own'", vars(module))
    vars(module)["foreign"] = lambda: "foreign"
    return module


def _met() -> str:
    return "met"


def test_modules_and_tables_all_get_the_same_function() -> None:
    """Whatever was filled before compares equal with a lookup afterwards, by `is`, too."""
    module, other = _library(), types.ModuleType("other")
    table = {"own": module.own}
    vars(other)["theirs"] = module.own
    Patch(module, "own", lambda original: _met).put()
    assert module.own() == "met"
    assert module.own is other.theirs is table["own"]


def test_what_gc_freeze_has_put_aside_is_found() -> None:
    """Workers and many programs freeze what was imported, so that forks share its pages; it stays frozen."""
    module = _library()
    vars(other := types.ModuleType("other"))["theirs"] = module.own
    gc.freeze()
    num_frozen = gc.get_freeze_count()
    Patch(module, "own", lambda original: _met).put()
    assert module.own is other.theirs
    assert module.own() == "met"
    assert gc.get_freeze_count() >= num_frozen


class _Holder:
    __slots__ = ("function",)

    def __init__(self, function: Any) -> None:
        self.function = function


@pytest.mark.parametrize(
    "hold",
    [
        lambda function: [function],
        lambda function: {function: "a key"},
        lambda function: _Holder(function),
        lambda function: functools.partial(function),
        lambda function: lambda read=function: read,
        lambda function: lambda: function,
    ],
    ids=["list", "key", "attribute", "partial", "default", "closure"],
)
def test_a_function_that_an_object_holds_is_left_alone(hold: Callable[[Any], Any]) -> None:
    """That object could be compared with a lookup; when it is gone, the function is replaced."""
    module = _library()
    patch = Patch(module, "own", lambda original: _met)
    holder = hold(module.own)
    patch.put()
    assert module.own() == "own"
    assert patch.is_left_alone
    del holder
    patch.put()
    assert module.own() == "met"


@pytest.mark.parametrize("name", ["cv2.imread", "cv2.imdecode"])
def test_what_a_program_sees_of_a_function_is_the_function(name: str) -> None:
    """Its names, texts, signature, kind and attributes; pickled and copied, it is itself."""
    original, function = _original(name), pkgutil.resolve_name(name)
    assert function is not original
    patches.meet()
    assert pkgutil.resolve_name(name) is function
    for look in (
        *(repr, inspect.isbuiltin, inspect.isfunction, inspect.isroutine, inspect.getdoc),
        *map(operator.attrgetter, ("__name__", "__qualname__", "__module__", "__doc__", "__class__")),
        lambda function: hasattr(function, "__wrapped__"),
        lambda function: vars(functools.wraps(function)(lambda: None)).keys(),
        lambda function: isinstance(function, types.BuiltinFunctionType),
    ):
        assert look(function) == look(original)
    try:
        assert inspect.signature(function) == inspect.signature(original)
    except ValueError:
        with pytest.raises(ValueError, match="signature"):
            inspect.signature(function)
    for text in (pickle.dumps(function), bytes(ForkingPickler.dumps(function))):
        assert b"fastload" not in text
        assert pickle.loads(text) is function
    assert copy.copy(function) is copy.deepcopy(function) is function


@pytest.mark.parametrize(
    ("name", "attribute"), [("tifffile.TiffFile", "asarray"), ("numpy.lib.npyio.NpzFile", "__getitem__")]
)
def test_as_an_attribute_of_its_class_a_method_is_the_original(
    cache: Cache, name: str, attribute: str
) -> None:
    """So it compares, and pickles, as ever."""
    owner = pkgutil.resolve_name(name)
    patch = next(
        each
        for library in patches._by_library.values()
        for each in library
        if each.owner is owner and each.name == attribute
    )
    assert vars(owner)[attribute] is patch.wrapper
    assert getattr(owner, attribute) is patch.original


def test_methods_stay_until_the_last_cache_is_closed() -> None:
    """Methods of classes are wrappers until the last cache is released."""
    one, other = object_with_weakref(), object_with_weakref()
    patches.retain(one)
    patches.retain(other)
    assert vars(tifffile.TiffFile)["asarray"] is not ASARRAY
    patches.release(one)
    assert vars(tifffile.TiffFile)["asarray"] is not ASARRAY
    patches.release(other)
    assert vars(tifffile.TiffFile)["asarray"] is ASARRAY


def test_without_a_cache_wrappers_do_what_the_original_does(path: str, tmp_path: Path) -> None:
    """Results and errors of a wrapper that is not active are the original's."""
    patches.meet()
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


def test_a_function_that_a_class_took_meanwhile_is_no_method(path: str) -> None:
    """A built-in function does not bind as the attribute of a class, nor does its wrapper."""
    patches.meet()

    class Loader:
        load = cv2.imread

    assert np.array_equal(Loader().load(path), IMREAD(path))
    assert np.array_equal(Loader().load(path), IMREAD(path))


def test_what_other_code_replaced_before_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, path: str, settled: None
) -> None:
    """A function that another library put in place of cv2.imread stays, and is met at imdecode."""

    def imread(filename: str, flags: int = cv2.IMREAD_COLOR) -> Any:
        return cv2.imdecode(np.fromfile(filename, np.uint8), flags)

    monkeypatch.setattr(cv2, "imread", imread)
    store = DictStore()
    patches.meet()
    with DecodeCache(store, verify_share=1).active():
        assert cv2.imread is imread
        assert np.array_equal(cv2.imread(path), IMREAD(path))
        assert np.array_equal(cv2.imread(path), IMREAD(path))
    assert cv2.imread is imread
    assert len(store.values) == 1


def test_what_other_code_replaces_meanwhile_stays(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A function that was put in place during a fetch is not taken away, and what it calls still works."""
    patches.meet()
    wrapped = cv2.imread
    monkeypatch.setattr(cv2, "imread", lambda *args: wrapped(*args))
    theirs = cv2.imread
    assert cv2.imread is theirs
    for _ in range(2):
        assert np.array_equal(cv2.imread(path), IMREAD(path))
        patches.meet()
        assert cv2.imread is theirs


@pytest.mark.parametrize(("name", "is_met"), [("own", True), ("foreign", False), ("missing", False)])
def test_only_functions_of_the_library_itself_are_replaced(name: str, is_met: bool) -> None:
    """A function that came from elsewhere, or does not exist, is not replaced."""
    module = _library()
    before = id(vars(module).get(name))
    Patch(module, name, lambda original: _met).put()
    assert (id(vars(module).get(name)) != before) == is_met


@pytest.mark.parametrize("replacement", [{}.get, math.sqrt], ids=["method", "function"])
def test_what_is_built_in_elsewhere_is_left_alone(replacement: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function in C of another module, or a method of an object, is not taken for OpenCV's."""
    monkeypatch.setattr(cv2, "imread", replacement)
    Patch(cv2, "imread", lambda original: _met).put()
    assert cv2.imread is replacement


def test_a_release_that_a_reader_does_not_know_is_no_error(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A reader that fails to meet its library leaves it alone."""
    broken = types.ModuleType("broken_reader")
    broken.patches = lambda: cv2.gone  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "broken_reader", broken)
    monkeypatch.setattr(patches, "READERS", {"cv2": "broken_reader"})
    monkeypatch.setattr(patches, "_by_library", {})
    for _ in range(2):
        patches.meet()
        assert patches._by_library == {"cv2": []}


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


def test_a_child_forked_while_the_libraries_are_met_does_not_wait() -> None:
    """The lock of a thread that is not in the child is nobody's there."""
    with patches._lock:

        def work() -> bool:
            patches.meet()
            return True

        assert _in_child(work)
