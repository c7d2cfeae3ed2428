"""Walking the rows of a cache and of the tier below it as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..tiers.base import Block
from .hot import ascending


def merged(
    stored: Iterator[Block], resident: np.ndarray, read: Callable[[np.ndarray], np.ndarray], block: int
) -> Iterator[Block]:
    """(keys, rows), at most ``block`` at a time, ascending as unsigned numbers: those of ``stored``, and in their place
    or besides those of ``resident`` (ascending), whose rows ``read`` gives."""
    order, at = resident.view(np.uint64), 0
    for keys, rows in stored:
        if len(keys):
            stop = int(np.searchsorted(order, keys.view(np.uint64)[-1], side="right"))
            mine, at = resident[at:stop], stop
            yield from _joined(keys, rows, mine, read, block)
    for start in range(at, len(resident), block):
        keys = resident[start : start + block]
        yield keys.copy(), read(keys)


def _joined(
    keys: np.ndarray, rows: np.ndarray, mine: np.ndarray, read: Callable[[np.ndarray], np.ndarray], block: int
) -> Iterator[Block]:
    if len(mine):
        other = ~np.isin(keys, mine, assume_unique=True)
        keys, rows = np.concatenate([keys[other], mine]), np.concatenate([rows[other], read(mine)])
        order = ascending(keys)
        keys, rows = keys[order], rows[order]
    for start in range(0, len(keys), block):
        part = slice(start, start + block)
        yield keys[part].copy(), rows[part].copy()
