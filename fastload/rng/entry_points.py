"""Lets random transforms draw from a loader's random streams, wherever the transforms are kept.

Nothing searches for transforms: a transform gets its generators at the moment when it draws. The attributes
in which a library's base classes keep generators become properties (which they are, its entry in the table
`augmentation.libraries` says). While a loader reads samples, they return generators of the current
`RandomStreams`, and otherwise the transform's own. The transforms themselves are not changed, so nothing
needs to be restored.

A pipeline and all that it calls draw from one pair of generators: `__call__` notes the outermost pipeline.
`set_random_seed` would give every transform its own generators with the same seed: two flips with p=0.5 would
always agree.

No library is imported here. Its classes are hooked if they are imported, or when they are. A worker process
draws from its streams in all of its threads; elsewhere streams serve one thread only.
"""

from __future__ import annotations

import functools
import importlib.machinery
import random
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.augmentation.libraries import LIBRARIES
from fastload.rng.states import restorer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fastload.augmentation.library import GeneratorKind, RandomClass

Pair = tuple[np.random.Generator, random.Random]

# A transform that the user seeds while samples are read keeps the user's generators. Its attribute of this
# name has the streams' token; copies of the transform have it, too.
_USER_SEEDED = "_fastload_user_seeded"


class RandomStreams:
    """Where transforms draw from while a loader reads samples.

    These leave all transforms their own generators.

    Attributes:
        groups: Whether all parts of a pipeline draw from the pipeline's pair.
        locks: Whether other threads can call the same transforms: then one calls at a time, because
            transforms keep values of the current call in their attributes.
        adds_worker_seed: Whether AlbumentationsX may add a worker's seed to one that the user sets.
        token: In the attributes of transforms that the user seeds from now on.
    """

    groups = True
    locks = False
    adds_worker_seed = True

    def __init__(self) -> None:
        self.token = random.SystemRandom().getrandbits(62)
        install()

    def pair(self, pipeline: Any) -> Pair | None:
        """The generators of numpy and Python for a pipeline, or for a transform that is called alone.

        Returns:
            None if it draws from its own.
        """

    def state(self, randomizable: Any) -> np.random.RandomState | None:
        """The RandomState of a transform that keeps one; None if it draws from its own."""

    def was_seeded_by_user(self, transform: Any) -> bool:
        """Whether the user has seeded a transform since these streams were made."""
        return transform.__dict__.get(_USER_SEEDED) == self.token  # type: ignore[no-any-return]


class Drawing:
    """What the transforms that a thread calls draw from: the streams, and the call that draws now.

    Attributes:
        streams: None leaves it to those of the process.
        root: The outermost transform that is being called.
        pair: Of this transform, from its first draw on.
    """

    __slots__ = ("pair", "root", "streams")

    def __init__(self, streams: RandomStreams | None) -> None:
        self.streams = streams
        self.root: Any = None
        self.pair: Any = None


class _Thread(threading.local):
    is_user_seeding: bool | None = None  # within set_random_seed(): whether the user called it

    def __init__(self) -> None:
        # One object, saved and restored by an assignment: a signal handler can interrupt any call.
        self.drawing = Drawing(None)


THREAD = _Thread()
_process_streams: RandomStreams | None = None


def current_streams() -> RandomStreams | None:
    """What the transforms that this thread calls draw from; None: their own generators."""
    return THREAD.drawing.streams or _process_streams


class seeded_by:  # noqa: N801  # a block, used as a function
    """A block in which the transforms that this thread calls draw from ``streams``; reusable.

    A class, not a contextlib generator: it is entered for each batch, and leaves errors untouched.

    Args:
        streams: None changes nothing.
        generators: Of numpy, random or torch: they get the states of before back, also after an error.
    """

    def __init__(self, streams: RandomStreams | None, generators: Iterable[Any] = ()) -> None:
        self._streams = streams
        self._generators = generators
        self._restores: list[Callable[[], object]] = []
        self._outside: Drawing | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was entered."""
        return self._outside is not None

    def __enter__(self) -> None:
        self._restores = list(map(restorer, self._generators))
        # A signal handler can raise before any call: from here on, exit restores.
        self._outside = THREAD.drawing
        if self._streams is not None:
            THREAD.drawing = Drawing(self._streams)

    def __exit__(self, *exc_info: object) -> None:
        if self._outside is not None:
            THREAD.drawing, self._outside = self._outside, None
            for restore in self._restores:
                restore()


def set_worker_streams(streams: RandomStreams | None, *, is_thread: bool) -> None:
    """Let this worker draw from ``streams`` from now on; a worker process does so in all of its threads."""
    global _process_streams
    THREAD.drawing = Drawing(streams if is_thread else None)
    if not is_thread:
        _process_streams = streams


# --- hooks -----------------------------------------------------------------------------------------------

_RANDOM_CLASSES = [cls for library in LIBRARIES for cls in library.random_classes]
_MODULES = frozenset(random_class.module for random_class in _RANDOM_CLASSES)
_hooking = threading.RLock()
_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()


def random_bases() -> list[tuple[RandomClass, type]]:
    """The base classes of random transforms, of the libraries that are imported."""
    classes = ((base, getattr(sys.modules.get(base.module), base.name, None)) for base in _RANDOM_CLASSES)
    return [(base, cls) for base, cls in classes if cls is not None]


def install() -> None:
    """Hook the classes of the libraries; those of a library that is imported later are hooked then."""
    with _hooking:
        for base, cls in random_bases():
            _hook(base, cls)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)


class _Finder:
    """Hooks the classes of a module as soon as it was imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The specification of such a module; None for all others."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in _MODULES else None
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            loader.exec_module = functools.partial(self._run, loader.exec_module)
        return spec

    def _run(self, run: Callable[[Any], None], module: Any) -> None:
        run(module)
        install()


_finder: Any = _Finder()


def _hook(base: RandomClass, cls: Any) -> None:
    if "_fastload_is_hooked" in vars(cls):
        return
    cls._fastload_is_hooked = True
    if base.reserve is not None:
        _hook_methods(cls)
        name, with_generators = base.reserve
        setattr(cls, name, _reserving(getattr(cls, name), with_generators))
        return
    for name, kind in base.generators.items():
        setattr(cls, name, _generator_property(cls, name, kind))
    queue = [cls]
    while queue:
        _hook_methods(queue[-1])
        queue += type.__subclasses__(queue.pop())


def _hook_methods(cls: type) -> None:
    """Hook the methods that a class has itself."""
    for name, wrap in (
        ("__call__", _noting_outermost),
        ("set_random_state", _noting_user_seeds),
        ("set_random_seed", _noting_user_seeds),
    ):
        method: Any = vars(cls).get(name)
        if type(method) is types.FunctionType and not hasattr(method, "_fastload_is_hooked"):
            hooked: Any = functools.wraps(method)(wrap(method))
            hooked._fastload_is_hooked = True
            setattr(cls, name, hooked)


def _generator_property(cls: type, name: str, kind: GeneratorKind) -> property:
    """An attribute that keeps a generator: it returns what the current streams choose, or its own value."""
    # What the class had under this name: nothing, a default, or a property.
    own = [vars(base)[name] for base in cls.__mro__ if name in vars(base)][:1]
    is_of_pair = kind != "legacy"
    position = 1 if kind == "python" else 0

    def get(transform: Any) -> Any:
        # Four to ten draws of a call come here: after the first one, the answer is known.
        drawing = THREAD.drawing
        if is_of_pair and drawing.pair is not None and _USER_SEEDED not in vars(transform):
            generator = drawing.pair[position]
            if generator is not None:
                return generator
        streams = drawing.streams or _process_streams
        if streams is not None:
            if is_of_pair:
                generator = _pair(streams, transform)[position]
            elif THREAD.is_user_seeding is None and not streams.was_seeded_by_user(transform):
                generator = streams.state(transform)
            else:  # MONAI's Compose draws seeds for its parts, also when it is made: from its own generator
                generator = None
            if generator is not None:
                return generator
        value = vars(transform).get(name)
        if value is not None:
            return value
        for default in own:
            is_descriptor = hasattr(type(default), "__get__")
            return default.__get__(transform, type(transform)) if is_descriptor else default
        raise AttributeError(f"{type(transform).__name__!r} object has no attribute {name!r}")

    def put(transform: Any, value: Any) -> None:
        if any(hasattr(type(default), "__set__") for default in own):
            own[0].__set__(transform, value)
        else:
            vars(transform)[name] = value

    return property(get, put)


def _pair(streams: RandomStreams, transform: Any) -> tuple[Any, Any]:
    if streams.was_seeded_by_user(transform):
        return None, None
    drawing = THREAD.drawing
    root = drawing.root
    if root is None:
        return streams.pair(transform) or (None, None)
    if drawing.pair is None:  # else it is known since the first draw of this call
        drawing.pair = (None if streams.was_seeded_by_user(root) else streams.pair(root)) or (None, None)
    return drawing.pair  # type: ignore[no-any-return]


def _noting_outermost(call: Any) -> Any:
    """`__call__`, which notes the outermost transform."""

    def noting_outermost(self: Any, *args: Any, **kwargs: Any) -> Any:
        drawing = THREAD.drawing
        streams = drawing.streams or _process_streams
        if drawing.root is not None or streams is None or not streams.groups:
            return call(self, *args, **kwargs)
        drawing.root = self
        try:
            if not streams.locks:
                return call(self, *args, **kwargs)
            with _lock_of(self):
                return call(self, *args, **kwargs)
        finally:
            drawing.root = drawing.pair = None

    return noting_outermost


def identity_of(transform: Any) -> Any:
    """An object that identifies a pipeline and its shallow copies, which share their generators."""
    return vars(transform).get("py_random", transform)


def _lock_of(transform: Any) -> threading.RLock:
    with _hooking:
        return _locks.setdefault(identity_of(transform), threading.RLock())


def _noting_user_seeds(method: Any) -> Any:
    """`set_random_seed` or `set_random_state`, which notes what the user seeds.

    A constructor that calls them, or a call without a seed, is not the user's. The outermost call decides for
    all parts of a pipeline.
    """

    def noting_user_seeds(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer = THREAD.is_user_seeding
        if outer is None:
            is_made = hasattr(self, "seed") or not hasattr(self, "set_random_seed")  # MONAI's lack both
            has_seed = any(value is not None for value in (*args, *kwargs.values()))
            THREAD.is_user_seeding = is_made and has_seed
        try:
            return method(self, *args, **kwargs)
        finally:
            streams = current_streams()
            if THREAD.is_user_seeding and streams is not None:
                vars(self)[_USER_SEEDED] = streams.token
                if not streams.adds_worker_seed and vars(self).get("_manual_random_state") is False:
                    self.set_random_state(np.random.default_rng(self.seed), random.Random(self.seed))
            THREAD.is_user_seeding = outer

    return noting_user_seeds


def _reserving(reserve: Any, with_generators: Callable[[Any, Any, Any], Any]) -> Any:
    """A method that reserves generators for each call of a pipeline: let them be those of the streams."""

    @functools.wraps(reserve)
    def reserving(self: Any) -> Any:
        reserved, streams = reserve(self), current_streams()
        generator, py_random = (None, None) if streams is None else _pair(streams, self)
        return reserved if py_random is None else with_generators(reserved, generator, py_random)

    return reserving
