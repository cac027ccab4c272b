"""The interface to a library of transforms: how it draws, how it is called, what it can leave to others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastload.nested.tree import is_namedtuple
from fastload.system.torchvision_arrays import V1_MODULE, V2_INSTEAD, V2_MODULE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# What an attribute holds: a numpy.random.Generator, a random.Random, or a numpy.random.RandomState.
GeneratorKind = Literal["numpy", "python", "legacy"]


class RandomClass(NamedTuple):
    """A base class of random transforms: where its objects keep the generators that they draw from.

    While a loader reads samples, these attributes return the loader's generators (see `rng.entry_points`).

    Attributes:
        module: The module of the class.
        name: The name of the class.
        generators: The attributes, and what each of them holds. A transform with generators of numpy and
            Python has the user's seed, if any, in the attribute `seed`.
        reserve: The method that returns the generators of one call, if the library has such a method, and a
            function of its result and the two generators to be used, which returns the result to be used.
    """

    module: str
    name: str
    generators: Mapping[str, GeneratorKind]
    reserve: tuple[str, Callable[[Any, Any, Any], Any]] | None = None


class AugmentationLibrary:
    """One library of transforms. This base class knows nothing: a transform is any function of a sample.

    Attributes:
        package: Its top-level package.
        random_classes: The base classes of its random transforms.
        private_generators: Further attributes in which its transforms keep generators.
        input_name: What its transforms get of a sample, for error messages.
    """

    package = ""
    random_classes: tuple[RandomClass, ...] = ()
    private_generators: frozenset[str] = frozenset()
    input_name = "the whole sample"

    def owns(self, transform: Any) -> bool:
        """Whether this library defines a base class of a transform, or the metaclass of a class."""
        return any(base.__module__.partition(".")[0] == self.package for base in type(transform).__mro__)

    def seeds_itself(self, pipeline: Any) -> bool:
        """Whether a pipeline seeds its generators in each worker process, so that it is left alone there."""
        return False

    def description(self, transform: Any) -> Any | None:
        """What the transform does, as a JSON value; None if it cannot be described."""

    def call(self, transform: Any, sample: Any) -> Any:
        """The transformed sample.

        Args:
            transform: A transform, or what `defer_end` or `split_crop` made of it.
            sample: Any sample; the transform may change it.

        Raises:
            TypeError: The library takes no such samples.
            Exception: An error of the transform.
        """
        return transform(sample)

    def image_of(self, sample: Any) -> Any:
        """The value in a sample that the transform gets as the image."""
        return sample[0] if isinstance(sample, (tuple, list)) and sample else sample

    def advice(self, transform: Any, sample: Any) -> str:
        """What may be wrong with a sample for which a transform failed; empty if nothing is known."""
        module = f"{type(transform).__module__}."
        is_v1 = module.startswith(V1_MODULE) and not module.startswith(V2_MODULE)
        return V2_INSTEAD if is_v1 and isinstance(sample, (tuple, list, dict)) else ""

    def steps_of(self, pipeline: Any) -> list[Any] | None:
        """What must stay equal for the answers below to stay valid; None if they are always valid."""

    def only_reads(self, pipeline: Any) -> bool:
        """Whether no code of a pipeline writes to read-only arrays, so that it can have a cache's own."""
        return False

    def accepts_read_only(self, sample: Any) -> bool:
        """Whether this sample's arrays can be read-only, for a pipeline that only reads."""
        return False

    def defer_end(self, pipeline: Any) -> Any | None:
        """The pipeline with an image that is computed when it is written into its batch.

        Returns:
            None if its end cannot be deferred. Otherwise an object for `call` whose image is a
            `DeferredImage`. It has an attribute ``only_reads``, of the part that runs, and a method
            ``through(crop)``, which returns an object for `call` that runs the result of `split_crop` first.
        """

    def split_crop(self, pipeline: Any) -> Any | None:
        """The pipeline with its first crop in the decoder, for samples whose image is an `EncodedImage`.

        Args:
            pipeline: A pipeline or a single transform.

        Returns:
            None if images must be decoded first. Otherwise an object for `call`, with a method ``explain()``,
            which says what is decoded, in one clause.
        """


def with_first(sequence: Any, value: Any) -> Any:
    """A tuple, namedtuple or list with another first value."""
    values = (value, *sequence[1:])
    if is_namedtuple(sequence):
        return type(sequence)._make(values)
    return values if isinstance(sequence, tuple) else list(values)
