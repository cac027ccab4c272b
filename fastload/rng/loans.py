"""Borrow the user's generators, and the attributes that hold them, during one batch.

`sample_rng` and `local_pipelines` use this where a dataset is read in the consumer's process. Rules:

1. After a batch all generators are restored, also after an error. Between batches nothing is borrowed, so
   that an iterator may be dropped at any time.
2. Loans may be nested (a dataset that iterates over a loader) and may overlap (two threads that read one
   dataset). If a loan ends while a later loan of the same object is open, the later loan restores the object
   at its end.
3. Open loans are recorded for one process: a forked child begins with none, and takes no lock of its parent.
"""

from __future__ import annotations

import functools
import os
import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.rng.pipelines import (
    ALBUMENTATIONS_GENERATORS,
    ALBUMENTATIONS_X_GENERATORS,
    own_attributes,
    seeds_itself,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# For each borrowed object: a function that restores it.
Returns = dict[Any, "Callable[[], object]"]


class _Books:
    """The open loans of this process, the oldest first."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.loans: list[Loan] = []


_books = _Books()


def _books_of_this_process() -> _Books:
    global _books
    if _books.pid != os.getpid():
        _books = _Books()
    return _books


class Loan:
    """One loan, from now on until `end`.

    Args:
        find: Returns the borrowed objects, each with a function that restores its current state.
        take: Sets the borrowed objects.

    Raises:
        Exception: The error of ``take``; then nothing is borrowed.
    """

    def __init__(self, find: Callable[[], Returns], take: Callable[[], None]) -> None:
        self.thread = threading.get_ident()
        books = _books_of_this_process()
        with books.lock:
            self._returns = find()
            books.loans.append(self)
            try:
                take()
            except BaseException:
                self.end()
                raise

    def end(self) -> None:
        """Restore all objects that no later loan has borrowed."""
        books = _books_of_this_process()
        with books.lock:
            later: list[Loan] = []
            if self in books.loans:  # False in a child that was forked during the loan
                position = books.loans.index(self)
                later = books.loans[position + 1 :]
                del books.loans[position]
            for thing, put_back in self._returns.items():
                heir = next((loan for loan in later if thing in loan._returns), None)
                if heir is None:
                    put_back()
                else:
                    heir._returns[thing] = put_back


def is_within_loan() -> bool:
    """Whether this thread has an open loan: true if a dataset being read iterates over a loader."""
    thread = threading.get_ident()
    return any(loan.thread == thread for loan in list(_books_of_this_process().loans))


def library_generators() -> Returns:
    """The generators of random, numpy and torch."""
    return {
        "random": functools.partial(random.setstate, random.getstate()),
        "numpy": functools.partial(np.random.set_state, np.random.get_state()),
        "torch": functools.partial(torch.default_generator.set_state, torch.default_generator.get_state()),
    }


def places(owners: Iterable[Any], names: tuple[str, ...]) -> Returns:
    """The owners' attributes of these names; attributes that an owner did not have are deleted at the end."""
    returns: Returns = {}
    for owner in owners:
        own = own_attributes(owner, names)
        for name in names:
            returns[id(owner), name] = (
                functools.partial(setattr, owner, name, own[name])
                if name in own
                else functools.partial(_forget, owner, name)
            )
    return returns


def pipeline_generators(transforms: Iterable[Any]) -> Returns:
    """The attributes in which transforms keep their generators."""
    returns: Returns = {}
    for transform in transforms:
        names = ALBUMENTATIONS_X_GENERATORS if seeds_itself(transform) else ALBUMENTATIONS_GENERATORS
        returns |= places([transform], names)
    return returns


def _forget(owner: Any, name: str) -> None:
    if own_attributes(owner, (name,)):
        delattr(owner, name)
