"""remember: any pure function of a file or of bytes; what comes back is what the function returns."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import runpy
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
from fastload.errors import DecodeMismatchError
from fastload.readers import results
from fastload.readers.decode_cache import DecodeCache, inactive
from fastload.readers.reasons import UNUSUAL
from fastload.system.cache_counts import cache_counts
from tests.kit.decoding import facts, overwrite

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


@fastload.remember(version="1")
def read(path: Any, *shape: int, scale: Any = 1) -> Any:
    """As users write them."""
    return np.fromfile(path, np.int16).reshape(*(shape or (4, 6))) * scale


@fastload.remember(version="1", of="bytes")
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


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(RESULTS)
def test_results_come_back_as_they_are(result: Any) -> None:
    """Any nest of arrays, tensors and plain values that is stored is equal in all that a caller can see."""
    packed = results.pack(result)
    if packed is None:
        return
    memory, note = packed[0].copy(), packed[1]
    memory.flags.writeable = False
    for _ in range(2):
        again = results.unpack(memory, note)
        assert facts(again) == facts(result)
        overwrite(again)


def test_dense_arrays_are_stored_however_they_lie() -> None:
    """Turned, transposed, Fortran order, BGR as RGB, read-only: strides come back, too."""
    image = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    frozen = image.copy()
    frozen.flags.writeable = False
    for array in (image, image[..., ::-1], image.T, np.asfortranarray(image), image[::-1, ::-1], frozen):
        packed = results.pack((array, 1))
        assert packed is not None
        assert facts(results.unpack(*packed)) == facts((array, 1))


def test_dense_tensors_are_stored_however_they_lie() -> None:
    """Channels last, as decoders return images, and dtypes that NumPy has not; the copies can be resized."""
    image = torch.arange(60, dtype=torch.uint8).reshape(4, 5, 3)
    for tensor in (image, image.permute(2, 0, 1), image.to(torch.bfloat16), image.to(torch.complex64)):
        packed = results.pack({"image": tensor})
        assert packed is not None
        again = results.unpack(*packed)["image"]
        assert (again.dtype, again.stride()) == (tensor.dtype, tensor.stride())
        assert torch.equal(again, tensor)
        assert again.resize_(100).numel() == 100


class Pixels(np.ndarray):
    """A subclass."""


SHARED = np.zeros(9)
ENDLESS: list[Any] = [SHARED]
ENDLESS.append(ENDLESS)


def marked(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with an attribute of the user's."""
    vars(tensor)["label"] = 1
    return tensor


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
    "sparse": torch.zeros(3).to_sparse(),
    "parameter": torch.nn.Parameter(torch.zeros(3)),
    "a tensor with an attribute": marked(torch.zeros(3)),
    "conjugate": torch.zeros(3, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("name", ODD_RESULTS)
def test_other_results_are_computed_each_time(
    name: str, path: Path, cache: DecodeCache, store: DictStore
) -> None:
    """What would not come back as it is is returned as the very object of the function."""

    @fastload.remember(version="1")
    def odd(path: Path) -> Any:
        return ODD_RESULTS[name]

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

    @fastload.remember(version="1")
    def size(path: Any) -> Any:
        return np.array([os.stat(path).st_size])

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

    @fastload.remember(version="1")
    def named(path: Any) -> Any:
        return np.fromfile(path, np.int16), os.path.abspath(path)

    places = []
    for folder in ("cat", "dog"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "link").symlink_to(path)
        monkeypatch.chdir(tmp_path / folder)
        for text in (str(tmp_path / folder / "link"), "link"):
            places += [named(text)[1] for _ in range(2)]
    assert places == [str(tmp_path / folder / "link") for folder in ("cat", "dog") for _ in range(4)]


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

    @fastload.remember(version="1", of="bytes")
    def same(content: Any) -> Any:
        return content, np.zeros(2)

    assert same(content)[0] is content
    assert not store.values


def test_errors_are_the_functions(tmp_path: Path, cache: DecodeCache) -> None:
    """A missing file raises what it raises without a cache, each time."""
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "missing")
    for bad in (3, functools.partial(read, scale=2)):
        with pytest.raises(TypeError, match="function should be one that has a name"):
            fastload.remember(version="1")(bad)


def test_what_a_function_reads_is_not_stored_twice(
    tmp_path: Path, cache: DecodeCache, store: DictStore
) -> None:
    """Inside it, libraries that are met remember nothing."""
    np.savez_compressed(tmp_path / "a.npz", a=NUMBERS)

    @fastload.remember(version="1")
    def load(path: Any) -> Any:
        return np.load(path)["a"] + 1

    for _ in range(2):
        assert np.array_equal(load(tmp_path / "a.npz"), NUMBERS + 1)
    assert len(store.values) == 1


# --- the function -----------------------------------------------------------------------------------------


def gain(factor: int, version: str) -> Any:
    """A function of a factor, of which its name says nothing."""

    @fastload.remember(version=version)
    def scaled(path: Any) -> Any:
        return np.fromfile(path, np.int16) * factor

    return scaled


def test_a_version_is_a_function_of_its_own(path: Path, cache: DecodeCache, store: DictStore) -> None:
    """Each has its own entries, and so has each name."""
    for _ in range(2):
        for factor in (2, 3):
            assert np.array_equal(gain(factor, str(factor))(path), NUMBERS * factor)
        assert np.array_equal(read(path), NUMBERS.reshape(4, 6))
    assert len(store.values) == 3


def test_a_version_that_was_forgotten_is_found(path: Path, cache: DecodeCache) -> None:
    """When a hit is compared; the error says what can be wrong."""
    gain(2, "1")(path)
    with pytest.raises(DecodeMismatchError, match=r"numbers.*remember\(version=") as caught:
        gain(3, "1")(path)
    assert caught.value.where == path


def test_the_function_is_a_function_still(path: Path, cache: DecodeCache, store: DictStore) -> None:
    """It is pickled and copied by name, and binds as a method, whose first argument is no path."""

    class Own:
        load = read
        parts = staticmethod(read)

    with pytest.raises(AttributeError, match="'Own' object"):
        Own().load(path)
    assert not store.values
    assert Own().parts(path).size == 24
    assert pickle.loads(pickle.dumps(read)) is read
    assert copy.deepcopy(read) is read
    assert read.__name__ == "read"
    assert read.__doc__ == "As users write them."


@pytest.mark.parametrize("names", [("__main__", "__mp_main__"), ("data", "data")])
@pytest.mark.parametrize("decorator", ["", "@keeping\n"])
def test_each_file_has_functions_of_its_own(
    names: tuple[str, str], decorator: str, tmp_path: Path, path: Path, cache: DecodeCache, store: DictStore
) -> None:
    """All scripts are named `__main__`, and modules of two programs can share a name; decorators hide files.

    In a spawned worker, the same script has another name.
    """
    text = (
        "import fastload, numpy as np\nfrom tests.readers.test_remember import keeping\n\n\n"
        f"@fastload.remember(version='1')\n{decorator}def read(path): return np.array([{{}}])\n"
    )
    for number in range(2):
        script = tmp_path / f"{number}.py"
        script.write_text(text.format(number))
        for name in names:
            function: Any = runpy.run_path(str(script), run_name=name)["read"]
            assert function(path).tolist() == [number]
            assert len(store.values) == number + 1


def keeping(function: Any) -> Any:
    """A decorator of another file."""
    return functools.wraps(function)(lambda *args: function(*args))


def test_a_method_of_an_object_is_refused() -> None:
    """Its result depends on the object, which is no argument."""

    class Photos:
        def read(self, path: Any) -> Any:
            return path

    with pytest.raises(TypeError, match="no method of an object"):
        fastload.remember(version="1")(Photos().read)
