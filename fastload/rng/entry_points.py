"""Let the transforms of albumentations and MONAI draw from a loader's random streams, wherever they are kept.

Nothing searches for transforms: a transform gets its generators at the moment when it draws. Rules:

1. The attributes in which the libraries' base classes keep generators are descriptors. While a loader reads
   samples, they return generators of its `Source`, and otherwise the transform's own. The transforms
   themselves are not changed, so nothing needs to be restored.
2. A pipeline and all that it calls draw from one pair of generators: `__call__` notes the outermost pipeline.
   `set_random_seed` would give every transform its own generators with the same seed: two flips with p=0.5
   would always agree.
3. A transform that the user seeds while samples are read keeps the user's generators.
4. Neither library is imported here. Their classes are hooked if they are imported, or when they are.
5. A worker process draws from its source in all of its threads; elsewhere a source serves one thread only.
"""

from __future__ import annotations

import functools
import importlib.machinery
import random
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

Pair = tuple[np.random.Generator, random.Random]

# In the attributes of a transform that the user has seeded, so that copies have it, too.
_IS_SET = "_fastload_is_set"


class Source:
    """Where transforms draw from while a loader reads samples.

    This one leaves all transforms their own generators.

    Attributes:
        groups: Whether all parts of a pipeline draw from the pipeline's pair.
        locks: Whether other threads can call the same transforms: then one calls at a time, because
            transforms keep values of the current call in their attributes.
        token: Marks transforms that the user seeds from now on.
    """

    groups = True
    locks = False

    def __init__(self) -> None:
        self.token = random.SystemRandom().getrandbits(62)
        install()

    def pair(self, pipeline: Any) -> Pair | None:
        """The generators of a pipeline of albumentations, or of a transform that is called alone.

        Returns:
            None if it draws from its own.
        """

    def state(self, randomizable: Any) -> np.random.RandomState | None:
        """The generator of one of MONAI's random objects; None if it draws from its own."""

    def leaves(self, transform: Any) -> bool:
        """Whether the user has seeded a transform."""
        marks = transform.__dict__
        return _IS_SET in marks and marks[_IS_SET] == self.token


class _Here(threading.local):
    source: Source | None = None  # of this thread
    root: Any = None  # the outermost transform that is being called
    pair: Any = None  # of this transform, from its first draw on
    is_setting: bool | None = None  # within set_random_seed(): whether it marks transforms


HERE = _Here()  # set without a call where a signal handler must not come between
_of_process: Source | None = None
_has_marks = False  # whether the user has seeded a transform while samples were read


class Place(NamedTuple):
    """The source of a thread, and the outermost transform that it is calling, with its generators."""

    source: Source | None = None
    root: Any = None
    pair: Any = None


def current() -> Source | None:
    """The source of this thread."""
    return HERE.source or _of_process


def draw_from(place: Place) -> Place:
    """Let this thread draw from the place; returns where it drew from before."""
    before = Place(HERE.source, HERE.root, HERE.pair)
    HERE.source, HERE.root, HERE.pair = place
    return before


class reading:  # noqa: N801  # a block, used as a function
    """A block in which the transforms that this thread calls draw from ``source``; None changes nothing.

    A class, not a contextlib generator: it is entered for each batch, and leaves errors untouched.
    """

    def __init__(self, source: Source | None) -> None:
        self._source = source
        self._before = Place()

    def __enter__(self) -> None:
        if self._source is not None:
            self._before = draw_from(Place(self._source))

    def __exit__(self, *exc_info: object) -> None:
        if self._source is not None:
            draw_from(self._before)


def begin_worker(source: Source | None, *, is_thread: bool) -> None:
    """Let this worker draw from ``source`` from now on; a worker process does so in all of its threads."""
    global _of_process
    draw_from(Place(source if is_thread else None))
    if not is_thread:
        _of_process = source


# --- hooks -----------------------------------------------------------------------------------------------

_BASES = {
    "albumentations.core.invocation": "InvocationRngOwner",  # of AlbumentationsX
    "albumentations.core.composition": "BaseCompose",
    "albumentations.core.transforms_interface": "BasicTransform",
    "monai.transforms.transform": "Randomizable",
}
_hooking = threading.RLock()
_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()


def random_bases() -> list[type]:
    """The base classes of random transforms, of the libraries that are imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in _BASES.items())
    return [cls for cls in found if cls is not None]


def install() -> None:
    """Hook the classes of the libraries; those of a library that is imported later are hooked then."""
    with _hooking:
        for cls in random_bases():
            _hook(cls)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)


class _Finder:
    """Hooks the classes of a module as soon as it was imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The specification of such a module; None for all others."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in _BASES else None
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            loader.exec_module = functools.partial(self._run, loader.exec_module)
        return spec

    def _run(self, run: Callable[[Any], None], module: Any) -> None:
        run(module)
        install()


_finder: Any = _Finder()


def _hook(cls: Any) -> None:
    if "_fastload_is_hooked" in vars(cls):
        return
    cls._fastload_is_hooked = True
    if cls.__name__ == "InvocationRngOwner":
        _hook_methods(cls)
        cls._reserve_invocation_streams = _reserving(cls._reserve_invocation_streams)
        return
    if cls.__name__ == "Randomizable":
        cls.R = _generators(cls, "R", _state, 0)
    else:
        cls.random_generator = _generators(cls, "random_generator", _pair, 0)
        cls.py_random = _generators(cls, "py_random", _pair, 1)
    own = vars(cls).get("__init_subclass__")

    def init_subclass(subclass: Any, /, **options: Any) -> None:
        if own is None:
            super(cls, subclass).__init_subclass__(**options)
        else:
            own.__func__(subclass, **options)
        _hook_methods(subclass)

    cls.__init_subclass__ = classmethod(init_subclass)
    queue = [cls]
    while queue:
        _hook_methods(queue[-1])
        queue += type.__subclasses__(queue.pop())


def _hook_methods(cls: type) -> None:
    """Hook the methods that a class has itself."""
    for name, wrap in (
        ("__call__", _entering),
        ("set_random_state", _setting),
        ("set_random_seed", _setting),
    ):
        method: Any = vars(cls).get(name)
        if type(method) is types.FunctionType and not hasattr(method, "_fastload_is_hooked"):
            hooked: Any = functools.wraps(method)(wrap(method))
            hooked._fastload_is_hooked = True
            setattr(cls, name, hooked)


def _generators(
    cls: type, name: str, choose: Callable[[Source, Any], tuple[Any, ...]], position: int
) -> property:
    """An attribute that keeps a generator: it returns what the current source chooses, or its own value.

    Args:
        cls: The class that gets it.
        name: Its name.
        choose: Returns the generators of a source for a transform.
        position: Which of them this one is.
    """
    # What the class had under this name: nothing, a default, or a property.
    own = [vars(base)[name] for base in cls.__mro__ if name in vars(base)][:1]
    is_of_pair = choose is _pair

    def get(transform: Any) -> Any:
        # Four to ten draws of a call come here: after the first one, the answer is known.
        if is_of_pair and (pair := HERE.pair) is not None and not _has_marks:
            chosen = pair[position]
            if chosen is not None:
                return chosen
        source = HERE.source or _of_process
        if source is not None:
            chosen = choose(source, transform)[position]
            if chosen is not None:
                return chosen
        value = vars(transform).get(name)
        if value is not None:
            return value
        for found in own:
            return found.__get__(transform, type(transform)) if hasattr(type(found), "__get__") else found
        raise AttributeError(f"{type(transform).__name__!r} object has no attribute {name!r}")

    def put(transform: Any, value: Any) -> None:
        if any(hasattr(type(found), "__set__") for found in own):
            own[0].__set__(transform, value)
        else:
            vars(transform)[name] = value

    return property(get, put)


def _pair(source: Source, transform: Any) -> tuple[Any, Any]:
    if _has_marks and source.leaves(transform):
        return None, None
    root = HERE.root
    if root is None:
        return source.pair(transform) or (None, None)
    pair: Any = HERE.pair
    if pair is None:  # else it is known since the first draw of this call
        is_left = _has_marks and source.leaves(root)
        pair = HERE.pair = (None if is_left else source.pair(root)) or (None, None)
    return pair  # type: ignore[no-any-return]


def _state(source: Source, transform: Any) -> tuple[Any]:
    # MONAI's Compose draws seeds for its parts, also when it is made: from its own generator.
    is_own = HERE.is_setting is not None or source.leaves(transform)
    return (None if is_own else source.state(transform),)


def _entering(call: Any) -> Any:
    """`__call__`: notes the outermost transform."""

    def entering(self: Any, *args: Any, **kwargs: Any) -> Any:
        if HERE.root is not None:
            return call(self, *args, **kwargs)
        source = HERE.source or _of_process
        if source is None or not source.groups:
            return call(self, *args, **kwargs)
        HERE.root = self
        try:
            if not source.locks:
                return call(self, *args, **kwargs)
            with _lock_of(self):
                return call(self, *args, **kwargs)
        finally:
            HERE.root = HERE.pair = None

    return entering


def name_of(transform: Any) -> Any:
    """An object that identifies a pipeline and its shallow copies."""
    return vars(transform).get("py_random", transform)


def _lock_of(transform: Any) -> threading.RLock:
    with _hooking:
        return _locks.setdefault(name_of(transform), threading.RLock())


def _setting(method: Any) -> Any:
    """`set_random_seed` or `set_random_state`: marks what the user seeds.

    A constructor that calls them, or a call without a seed, marks nothing. A pipeline's call decides for all
    of its parts.
    """

    def setting(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _has_marks
        outer = HERE.is_setting
        if outer is None:
            is_made = hasattr(self, "seed") or not hasattr(self, "set_random_seed")  # MONAI's lack both
            HERE.is_setting = is_made and any(value is not None for value in (*args, *kwargs.values()))
        try:
            return method(self, *args, **kwargs)
        finally:
            source = HERE.source or _of_process
            if HERE.is_setting and source is not None:
                vars(self)[_IS_SET] = source.token
                _has_marks = True
            HERE.is_setting = outer

    return setting


def _reserving(reserve: Any) -> Any:
    """AlbumentationsX reserves a pair of generators for each call of a pipeline: let it be the source's."""

    @functools.wraps(reserve)
    def reserving(self: Any) -> Any:
        streams, source = reserve(self), HERE.source or _of_process
        generator, py_random = (None, None) if source is None else _pair(source, self)
        if py_random is None:
            return streams
        return type(streams)(random_generator=generator, py_random=py_random, epoch=streams.epoch)

    return reserving
