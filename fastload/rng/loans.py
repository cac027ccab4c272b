"""Generators of the user's, and the attributes that hold them, borrowed for the time of one batch.

Used where a dataset is read in the user's own process, by `sample_rng` and `local_pipelines`. Rules:

1. After a batch everything is as it was before it, also after an error. Between batches nothing is borrowed,
   so that an iterator may be dropped at any time.
2. Loans may lie within each other (a dataset that iterates a loader) and may overlap (two threads that read
   one dataset). A loan that ends before a later loan of the same thing leaves it to that one to put back.
3. The books are those of one process: a forked child begins with none, and takes no lock of its parent's.
"""

from __future__ import annotations

import functools
import os
import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.rng.pipelines import own_attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# By what is borrowed: how it is put back to what it was.
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
        find: Says what is borrowed, and how it is put back to what it is now.
        take: Sets what is borrowed.

    Raises:
        Exception: What ``take`` raised; then nothing is borrowed.
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
        """Put back what no later loan has."""
        books = _books_of_this_process()
        with books.lock:
            later: list[Loan] = []
            if self in books.loans:  # not in a child that was forked meanwhile
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
    """Whether this thread is in the middle of a loan: a dataset that is being read iterates a loader."""
    thread = threading.get_ident()
    return any(loan.thread == thread for loan in list(_books_of_this_process().loans))


def library_generators() -> Returns:
    """Those of random, numpy and torch."""
    return {
        "random": functools.partial(random.setstate, random.getstate()),
        "numpy": functools.partial(np.random.set_state, np.random.get_state()),
        "torch": functools.partial(torch.default_generator.set_state, torch.default_generator.get_state()),
    }


def places(owners: Iterable[Any], names: tuple[str, ...]) -> Returns:
    """The attributes of these names; one that an owner does not have by itself is deleted at the end."""
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


def _forget(owner: Any, name: str) -> None:
    if own_attributes(owner, (name,)):
        delattr(owner, name)
