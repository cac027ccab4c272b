"""What launchers of ranks, such as torchrun and mpirun, say in environment variables."""

from __future__ import annotations

import os

# The number of ranks on this host, from torchrun, Open MPI, MPICH and Intel MPI.
RANKS_OF_HOST = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def number_in(variable: str) -> int | None:
    """The number in an environment variable; None if there is none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def ranks_of_host() -> int | None:
    """The number of ranks on this host, at least 1; None if no variable has it."""
    return next((number for number in map(number_in, RANKS_OF_HOST) if number), None)
