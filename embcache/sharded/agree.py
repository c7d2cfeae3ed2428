"""Errors are agreed: what one rank refuses, all ranks refuse, before any of them has changed anything.

A header carries a flag per rank, so that all see whether somebody refused; only then the texts travel, on the lane of
the header, whose order is the same everywhere. The rank that failed raises its own error, the others RemoteFault naming
the first rank that failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from embcache.errors import RankFailed, RemoteFault
from embcache.sharded.lanes import Lane

__all__ = ["agree", "agreed", "settle", "together"]

T = TypeVar("T")
LONGEST = 4000  # bytes of a message that travel


def settle(lane: Lane, refused: bool, error: BaseException | None) -> None:
    """After a header on ``lane``: raise on all ranks where ``refused``, which all ranks have seen alike; ``error`` is
    this rank's own, if it has one."""
    if isinstance(error, RankFailed):  # the group is broken: nobody can be told
        raise error
    if not refused:
        if error is not None:
            raise error
        return
    text = b"" if error is None else f"{type(error).__name__}\n{error}".encode()[:LONGEST]
    said = [bytes(words.numpy()).decode(errors="replace") for words in lane.all_gather(text)]
    if error is not None:
        raise error
    rank = next((rank for rank, words in enumerate(said) if words), None)
    if rank is not None:
        kind, _, message = said[rank].partition("\n")
        raise RemoteFault.of(rank, kind, message)


def agree(lane: Lane, error: BaseException | None) -> None:
    """Collective: raise on all ranks if any has an ``error``."""
    if isinstance(error, RankFailed):
        raise error
    flags = lane.header(np.full((lane.world, 1), error is not None))
    settle(lane, bool(flags.any()), error)


@contextlib.contextmanager
def agreed(lane: Lane) -> Iterator[None]:
    """Collective: what goes wrong in the body on any rank is raised behind it on all.

    The body holds no collective of its own that a failure would skip.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    agree(lane, problem)


def together(lane: Lane, work: Callable[[], T]) -> T:
    """Collective: ``work()`` of every rank, or its error on all."""
    with agreed(lane):
        value = work()
    return value
