"""remember: any pure function of a file or of bytes; what comes back is what the function returns."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import logging
import os
import pickle
import random
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fastload
from fastload.readers import identity, nest
from fastload.readers.code_digest import CodeDigest
from fastload.readers.decode_cache import UNUSUAL, DecodeCache, inactive
from fastload.readers.identity import Unknown
from fastload.system.cache_counts import cache_counts
from fastload.system.logs import say_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kit.decoding import DictStore

NUMBERS = np.arange(24, dtype=np.int16)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of numbers."""
    path = tmp_path / "numbers"
    NUMBERS.tofile(path)
    return path


@fastload.remember
def read(path: Any, *shape: int, scale: Any = 1) -> Any:
    """As users write them."""
    return np.fromfile(path, np.int16).reshape(*(shape or (4, 6))) * scale


@fastload.remember(of="bytes")
def parse(content: Any) -> Any:
    """Bytes as numbers."""
    return np.frombuffer(content, np.int16).copy()


# --- results ----------------------------------------------------------------------------------------------

DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.unicode_string_dtypes(max_len=3),
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=3)


@st.composite
def arrays(draw: Any) -> Any:
    """Arrays in any order of memory, turned, read-only; some with gaps."""
    array = draw(hnp.arrays(DTYPES, SHAPES))
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    for axis in range(array.ndim):
        step = draw(st.sampled_from([1, 1, -1, 2]))
        array = array[(slice(None),) * axis + (slice(None, None, step),)]
    if draw(st.booleans()):
        array.flags.writeable = False
    return array


LEAVES = st.one_of(
    arrays(),
    hnp.arrays(st.sampled_from(["f4", "u1", "i8"]), SHAPES).map(torch.from_numpy),
    hnp.arrays(DTYPES, ()).map(lambda array: array[()]),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
)
RESULTS = st.recursive(
    LEAVES,
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), parts, max_size=3)
    ),
    max_leaves=6,
)


def facts(value: Any) -> Any:
    """All that a caller can see of a result."""
    if isinstance(value, (list, tuple)):
        return type(value), [facts(part) for part in value]
    if isinstance(value, dict):
        return dict, [(facts(key), facts(part)) for key, part in value.items()]
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.shape, value.stride(), value.numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        strides = [step for step, length in zip(value.strides, value.shape, strict=True) if length > 1]
        flags = isinstance(value, np.generic) or value.flags.writeable
        return type(value), value.dtype.str, value.shape, strides, flags, value.tobytes()
    return type(value), repr(value)


def overwrite(value: Any) -> None:
    """Write to all memory of a result."""
    if isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            overwrite(part)
    elif isinstance(value, torch.Tensor):
        value.zero_()
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        value[...] = np.zeros((), value.dtype)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(RESULTS)
def test_results_come_back_as_they_are(result: Any) -> None:
    """Any nest of arrays, tensors and plain values that is stored is equal in all that a caller can see."""
    packed = nest.pack(result)
    if packed is None:
        return
    memory, note = packed[0].copy(), packed[1]
    memory.flags.writeable = False
    for _ in range(2):
        again = nest.unpack(memory, note)
        assert facts(again) == facts(result)
        overwrite(again)


def test_dense_arrays_are_stored_however_they_lie() -> None:
    """Turned, transposed, Fortran order, BGR as RGB, read-only: strides come back, too."""
    image = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    frozen = image.copy()
    frozen.flags.writeable = False
    for array in (image, image[..., ::-1], image.T, np.asfortranarray(image), image[::-1, ::-1], frozen):
        packed = nest.pack((array, 1))
        assert packed is not None
        assert facts(nest.unpack(*packed)) == facts((array, 1))


class Pixels(np.ndarray):
    """A subclass."""


SHARED = np.zeros(9)
ENDLESS: list[Any] = [SHARED]
ENDLESS.append(ENDLESS)
ODD_RESULTS: dict[str, Any] = {
    "gaps": np.zeros((4, 6))[:, ::2],
    "broadcast": np.broadcast_to(np.zeros(1), 5),
    "objects": np.array([None]),
    "fields": np.zeros(2, "i4,f8"),
    "empty": np.zeros((0, 3)),
    "subclass": np.zeros(3).view(Pixels),
    "masked": np.ma.masked_array([1, 2], [True, False]),
    "shared memory": (SHARED, SHARED[2:4]),
    "one array twice": [SHARED, SHARED],
    "one list twice": [*[[SHARED.copy()]] * 2],
    "endless": ENDLESS,
    "no array": {"a": 1},
    "none": None,
    "set": {1, 2},
    "object": object(),
    "generator": (SHARED, (number for number in range(3))),
    "named tuple": types.SimpleNamespace(a=SHARED),
    "keys": {np.int64(1): SHARED},
    "a view of a tensor": torch.zeros(6)[2:],
    "a tensor with a history": torch.zeros(3, requires_grad=True),
    "bfloat16": torch.zeros(3, dtype=torch.bfloat16),
    "sparse": torch.zeros(3).to_sparse(),
    "parameter": torch.nn.Parameter(torch.zeros(3)),
    "conjugate": torch.zeros(3, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("name", ODD_RESULTS)
def test_other_results_are_computed_each_time(
    name: str, path: Path, cache: DecodeCache, store: DictStore
) -> None:
    """What would not come back as it is is returned as the very object of the function."""
    odd = fastload.remember(lambda path: ODD_RESULTS[name], version="1")
    for _ in range(2):
        assert odd(path) is ODD_RESULTS[name]
    assert not store.values


# --- files and arguments ----------------------------------------------------------------------------------


def test_a_function_of_a_path_runs_once(
    path: Path, cache: DecodeCache, store: DictStore, counts: Any
) -> None:
    """Every access returns an equal array of its own, and writes to it do not reach the store."""
    expected = np.fromfile(path, np.int16).reshape(4, 6)
    for number in range(3):
        result = read(path)
        assert np.array_equal(result, expected)
        result[...] = -1
        checksum = store.checksum()
        assert counts() == ((0, 1) if number == 0 else (1, 0))
    assert store.checksum() == checksum
    assert len(store.values) == 1


def test_arguments_belong_to_the_key(path: Path, cache: DecodeCache, store: DictStore) -> None:
    """Each combination has its own entry; 1, 1.0 and True are three."""
    calls: list[Callable[[], Any]] = [
        functools.partial(read, path, *shape, **options)
        for shape in ((), (24,), (2, 12))
        for options in ({}, {"scale": 1}, {"scale": 1.0}, {"scale": True}, {"scale": 2})
    ]
    for call in calls * 2:
        with inactive():
            expected = call()
        assert facts(call()) == facts(expected)
    assert len(store.values) == len(calls)


@pytest.mark.parametrize(
    "scale",
    [np.int64(3), np.ones(6), Ellipsis, object(), 10**5000, {1}, slice(1), print],
    ids=lambda value: type(value).__name__,
)
def test_odd_arguments_are_the_real_call(
    scale: Any, path: Path, cache: DecodeCache, store: DictStore
) -> None:
    """Arguments that cannot be keys give the results and errors of the function, and are counted."""

    def outcome(call: Callable[..., Any]) -> Any:
        try:
            return facts(call(path, scale=scale))
        except Exception as error:  # noqa: BLE001  # the same one is expected
            return type(error), str(error)

    cache_counts.take_reasons()
    with inactive():
        expected = outcome(read)
    assert [outcome(read), outcome(read)] == [expected] * 2
    assert not store.values
    assert cache_counts.take_reasons() == {UNUSUAL: 2}


class OwnPath(str):
    """Might be anything."""


@pytest.mark.parametrize("kind", [OwnPath, io.FileIO], ids=["subclass", "file"])
def test_other_first_arguments_are_the_real_call(
    kind: Any, path: Path, cache: DecodeCache, store: DictStore
) -> None:
    """Subclasses, which could carry more than a path, open files, keywords, and nothing at all."""
    source = kind(str(path))
    assert read(source).size == 24
    if hasattr(source, "close"):
        source.close()
    assert read(path=path).size == 24
    with pytest.raises(TypeError):
        read()  # type: ignore[call-arg]
    assert not store.values


@pytest.mark.parametrize("kind", [str, Path, np.str_, os.fsencode])
def test_every_kind_of_path_is_a_path(kind: Any, path: Path, cache: DecodeCache, store: DictStore) -> None:
    """Also a NumPy string of an array of paths; bytes are a path, not a content."""
    size = fastload.remember(lambda path: np.array([os.stat(path).st_size]))
    for _ in range(2):
        assert size(kind(path)) == 48
    path.write_bytes(b"1234")
    for _ in range(2):
        assert size(kind(path)) == 4
    assert len(store.values) == 2


def test_the_text_of_a_path_is_an_argument(
    tmp_path: Path, path: Path, cache: DecodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two names of one file are two entries, and so is one relative name in two folders."""
    named = fastload.remember(lambda path: (np.fromfile(path, np.int16), os.path.abspath(path)))
    places = []
    for folder in ("cat", "dog"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "link").symlink_to(path)
        monkeypatch.chdir(tmp_path / folder)
        for text in (str(tmp_path / folder / "link"), "link"):
            places += [named(text)[1] for _ in range(2)]
    assert places == [str(tmp_path / folder / "link") for folder in ("cat", "dog") for _ in range(4)]


def test_files_that_changed_are_read_again(
    tmp_path: Path, path: Path, cache: DecodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewritten, replaced, switched by a link, with the old mtime: never the old result; nor if too new."""
    link = tmp_path / "link"
    link.symlink_to(path)
    status = path.stat()
    for number in range(1, 6):
        other = tmp_path / f"other{number}"
        (NUMBERS * number).tofile(other)
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        if number % 2:
            other.replace(path)
        else:
            (tmp_path / "new").symlink_to(other)
            (tmp_path / "new").replace(link)
        for _ in range(2):
            assert np.array_equal(read(link), np.fromfile(link, np.int16).reshape(4, 6))
            assert np.array_equal(read(path), np.fromfile(path, np.int16).reshape(4, 6))
    monkeypatch.setattr(identity, "SETTLED_S", 1e9)
    identity._file_systems.clear()
    cache_counts.take_reasons()
    read(path)
    read(path)
    assert cache_counts.take_reasons() == {Unknown.TOO_NEW.value: 2}


def test_a_file_that_changes_while_it_is_read_is_not_stored(
    path: Path, cache: DecodeCache, store: DictStore
) -> None:
    """It is identified before and after."""

    def changing(path: Any) -> Any:
        result = np.fromfile(path, np.int16)
        os.truncate(path, os.path.getsize(path) - 2)
        return result

    remembered = fastload.remember(changing)
    assert remembered(path).size == 24
    assert remembered(path).size == 23
    assert not store.values


@pytest.mark.parametrize(
    "kind", [bytes, bytearray, memoryview, lambda content: np.frombuffer(content, np.uint8)]
)
def test_bytes_are_known_by_their_content(
    kind: Any, cache: DecodeCache, store: DictStore, counts: Any
) -> None:
    """Equal content is found, whatever object holds it; a change of one byte is seen."""
    for number in (0, 0, 1, 1, 0):
        content = kind((NUMBERS + number).tobytes())
        assert np.array_equal(parse(content), NUMBERS + number)
    assert len(store.values) == 2
    assert counts() == (3, 2)


@pytest.mark.parametrize(
    "content", ["text", None, np.arange(8)[::2], np.array(["2020"], "M8[D]"), np.array([None])], ids=str
)
def test_what_is_no_bytes_is_the_real_call(content: Any, cache: DecodeCache, store: DictStore) -> None:
    """A path given to a function of bytes is not taken for its content."""
    same = fastload.remember(lambda content: (content, np.zeros(2)), of="bytes")
    assert same(content)[0] is content
    assert not store.values


def test_errors_are_the_functions(tmp_path: Path, cache: DecodeCache) -> None:
    """A missing file raises what it raises without a cache, each time."""
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "missing")
    for bad in ({"of": "file"}, {"version": 3}):
        with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
            fastload.remember(read, **bad)
    with pytest.raises(TypeError, match="function"):
        fastload.remember(3)  # type: ignore[call-overload]


def test_what_a_function_reads_is_not_stored_twice(
    tmp_path: Path, cache: DecodeCache, store: DictStore
) -> None:
    """Inside it, libraries that are met remember nothing."""
    np.savez_compressed(tmp_path / "a.npz", a=NUMBERS)
    load = fastload.remember(lambda path: np.load(path)["a"] + 1)
    for _ in range(2):
        assert np.array_equal(load(tmp_path / "a.npz"), NUMBERS + 1)
    assert len(store.values) == 1


# --- the function -----------------------------------------------------------------------------------------

LIBRARY = """
import functools, math
SIZE = {size}
LEVELS = [1, 2]
def helper(x): return x {operator} SIZE
def unused(x): return x * {unused}
class Reader:
    gain = {gain}
    def read(self, x): return x * self.gain
    @staticmethod
    def shift(x): return x + {shift}
def outer(x, rate={rate}):
    def inner(y): return helper(y) * {inner}
    # {comment}
    return [inner(x) for _ in LEVELS] + [Reader.shift(math.floor(x)), Reader().read(x), rate]
"""
USUAL = {
    "size": 1,
    "operator": "+",
    "unused": 1,
    "gain": 2,
    "shift": 3,
    "rate": 4,
    "inner": 5,
    "comment": "a",
}


def module_of(**changes: Any) -> Any:
    """A user's module, with some edits."""
    module = types.ModuleType("own_module")
    exec(LIBRARY.format(**{**USUAL, **changes}), vars(module))
    return module


@pytest.mark.parametrize(
    "change",
    [{"size": 2}, {"size": 1.0}, {"operator": "-"}, {"gain": 9}, {"shift": 9}, {"rate": 9}, {"inner": 9}],
)
def test_an_edit_of_what_a_function_uses_is_seen(change: dict[str, Any]) -> None:
    """Of constants, helpers, classes, defaults and inner functions, at any depth."""
    assert CodeDigest(module_of(**change).outer).now() != CodeDigest(module_of().outer).now()


@pytest.mark.parametrize("change", [{}, {"unused": 9}, {"comment": "b"}], ids=str)
def test_other_edits_change_nothing(change: dict[str, Any]) -> None:
    """Comments, and functions that are not used."""
    assert CodeDigest(module_of(**change).outer).now() == CodeDigest(module_of().outer).now()


def test_a_change_in_a_living_process_is_seen() -> None:
    """A cell that defines a helper again, code that is replaced in place, a list that grows, a new global."""
    module = module_of()
    code = CodeDigest(module.outer)
    seen = {code.now()}

    def again() -> None:
        assert code.now() not in seen
        seen.add(code.now())

    module.helper = lambda x: x
    again()
    module.outer.__code__ = module_of(inner=8).outer.__code__
    again()
    module.outer.__defaults__ = (7,)
    again()
    module.LEVELS.append(3)
    again()
    module.Reader.gain = 11
    again()
    module.Reader.shift = staticmethod(abs)
    again()
    module.math = module_of
    again()
    module.SIZE = 3.5
    module.helper.__globals__["x"] = 3
    assert code.now() in seen  # the new helper does not use these


def test_functions_from_one_factory_differ() -> None:
    """By what they close over, and by arguments of a partial."""

    def factory(number: Any) -> Any:
        return lambda path: path * number

    values = [1, 2, 1.0, True, "1", (1,), [1], np.ones(2), np.zeros(2), np.float32, re_of("a"), re_of("b")]
    codes = [CodeDigest(factory(value)).now() for value in values]
    codes += [CodeDigest(functools.partial(read, scale=value)).now() for value in (1, 2)]
    assert len(set(codes)) == len(codes)
    assert CodeDigest(factory(2)).now() == CodeDigest(factory(2)).now()


def re_of(text: str) -> Any:
    """A compiled pattern."""
    import re

    return re.compile(text)


class Decoder:
    """An object with a state."""

    def __init__(self, gain: int) -> None:
        self.gain = gain

    def decode(self, path: Any) -> Any:
        """A method of it."""
        return np.fromfile(path, np.int16) * self.gain


def test_objects_with_a_state_need_a_version(
    path: Path, cache: DecodeCache, store: DictStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Without one, the function is called each time, and a warning says so once; versions differ."""
    decoder = Decoder(2)
    plain = fastload.remember(lambda path: decoder.decode(path))
    say_once.cache_clear()
    with caplog.at_level(logging.INFO, "fastload"):
        for gain in (2, 3):
            decoder.gain = gain
            assert np.array_equal(plain(path), NUMBERS * gain)
    assert not store.values
    assert sum("give it a version" in record.getMessage() for record in caplog.records) == 1
    for gain, version in itertools.product((2, 3), repeat=2):
        if gain == version:
            decoder.gain = gain
            named = fastload.remember(lambda path: decoder.decode(path), version=str(version))
            for _ in range(2):
                assert np.array_equal(named(path), NUMBERS * gain)
    assert len(store.values) == 2


def test_methods_and_pickles(path: Path, cache: DecodeCache, counts: Any) -> None:
    """In a class it is a method; by name it pickles as the function, else with it; copies are the same."""

    class Own:
        load = read
        parts = staticmethod(read)

    assert Own.load is read
    with pytest.raises(AttributeError):
        Own().load(path)
    assert Own().parts(path).size == 24
    assert pickle.loads(pickle.dumps(read)) is read
    assert copy.deepcopy(read) is read
    load = fastload.remember(np.loadtxt)
    again = pickle.loads(pickle.dumps(load))
    (path.parent / "a.txt").write_text("1 2 3")
    counts()
    assert [load(path.parent / "a.txt").tolist(), again(path.parent / "a.txt").tolist()] == [[1, 2, 3]] * 2
    assert counts() == (1, 1)
    assert read.__name__ == "read"
    assert read.__doc__ == "As users write them."


JOB = """
import sys
sys.path.insert(0, sys.argv[1])
import own, fastload
print(fastload.remember(own.read).key())
"""


def test_keys_are_equal_in_every_process(tmp_path: Path) -> None:
    """Two interpreters with different seeds of hashing have one key, and another one after an edit."""
    text = (
        "import numpy as np, zlib\nNAMES = {{'a', 'b'}}\ndef read(path): return np.zeros(len(NAMES)) + {}\n"
    )
    keys = []
    for number, seed in ((1, "1"), (1, "2"), (2, "1")):
        (tmp_path / "own.py").write_text(text.format(number))
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"}
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-c", JOB, str(tmp_path)],
            cwd=root,
            env=environment,
            capture_output=True,
            check=True,
        )
        keys.append(done.stdout)
    assert keys[0] == keys[1] != keys[2]


# --- check_remembered --------------------------------------------------------------------------------------

SHARED_RESULT = np.zeros(3)
NEXT = itertools.count()


def _beside(path: Any) -> Any:
    return np.fromfile(f"{path}.mask", np.uint8) if os.path.exists(f"{path}.mask") else np.zeros(3)


def _opens(path: Any) -> Any:
    with open(__file__, "rb") as file, open(f"{path}.mask", "rb") as mask:
        return np.array([file.read(1) == b"", len(mask.read())])


WRONG: dict[str, tuple[Any, str]] = {
    "draws": (lambda path: np.zeros(3) + random.random() * 0, "random numbers"),
    "draws of NumPy": (lambda path: np.zeros(3) + np.random.rand() * 0, "random numbers"),
    "draws of torch": (lambda path: torch.rand(3) * 0, "random numbers"),
    "own generator": (lambda path: np.array([next(NEXT)]), "state"),
    "path": (lambda path: np.frombuffer(os.fsencode(path), np.uint8).copy(), "copy of the file"),
    "beside": (_beside, r"opened '.*mask'"),
    "opens": (_opens, r"opened '.*mask'"),
    "memo": (lambda path: [SHARED_RESULT, 1], "cache of its own"),
    "object": (lambda path: object(), "returned object"),
}


@pytest.mark.parametrize("name", WRONG)
def test_functions_that_are_not_pure_fail_the_check(name: str, path: Path) -> None:
    """Each way to be wrong is told, with the file."""
    function, text = WRONG[name]
    (path.parent / "numbers.mask").write_bytes(b"abc")
    version = "1" if name == "own generator" else None
    with pytest.raises(AssertionError, match="gave different" if version else text) as caught:
        fastload.check_remembered(fastload.remember(function, version=version or "2"), [path])
    assert "numbers" in str(caught.value)


def test_pure_functions_pass_the_check(path: Path) -> None:
    """Of paths of every kind and of bytes, with arguments; and it needs files."""
    fastload.check_remembered(read, [path, str(path), os.fsencode(path)], 24, scale=2)
    fastload.check_remembered(parse, [path.read_bytes(), bytearray(b"1234")])
    with pytest.raises(AssertionError, match="no files"):
        fastload.check_remembered(read, [])
    with pytest.raises(AssertionError, match="no argument"):
        fastload.check_remembered(read, [3])
    with pytest.raises(TypeError, match="version"):
        fastload.check_remembered(Decoder(2).decode, [path])


def test_a_function_that_writes_to_its_bytes_fails_the_check() -> None:
    """A found result would leave the argument as it was."""

    def spoil(content: Any) -> Any:
        content[0] = content[0] ^ 1
        return np.zeros(3)

    with pytest.raises(AssertionError, match="changed its argument"):
        fastload.check_remembered(fastload.remember(spoil, of="bytes"), [bytearray(b"abc")])
