"""Walking all rows of a table: those of the base in key order, with the overlay's laid over them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import CorruptStore
from .base import Block
from .basefile import Snapshot
from .overlay import Overlay, View

__all__ = ["merged", "problems"]

_CHUNK = 1 << 16


def _base_blocks(snapshot: Snapshot, table: int, row_bytes: int, block: int) -> Iterator[Block]:
    """Rows of the base in fresh arrays."""
    first = 0
    while True:
        keys, rows = np.empty(block, np.int64), np.empty((block, row_bytes), np.uint8)
        n = snapshot.walk(table, first, keys, rows)
        if n:
            yield keys[:n], rows[:n]
        if n < block:
            return
        first = int(keys[n - 1 :].view(np.uint64)[0]) + 1
        if first == 2**64:
            return


def merged(
    overlay: Overlay, entries: tuple[np.ndarray, np.ndarray, View], snapshot: Snapshot, table: int, block: int
) -> Iterator[Block]:
    """(keys, rows), at most ``block`` at a time, of a snapshot under the entries of an overlay taken before it."""
    newer, ordinals, view = entries
    order = newer.view(np.uint64)
    at = 0
    for keys, rows in _base_blocks(snapshot, table, overlay.row_bytes, block):
        end = int(np.searchsorted(order, keys[-1:].view(np.uint64)[0], side="right"))
        yield from _pieces(overlay, newer[at:end], ordinals[at:end], view, (keys, rows), block)
        at = end
    for i in range(at, len(newer), block):
        none = np.empty(0, np.int64), np.empty((0, overlay.row_bytes), np.uint8)
        part = slice(i, i + block)
        yield from _pieces(overlay, newer[part], ordinals[part], view, none, block)


def _pieces(
    overlay: Overlay, newer: np.ndarray, ordinals: np.ndarray, view: View, below: Block, block: int
) -> Iterator[Block]:
    """One block of the base and the part of the overlay that falls into its range, in blocks."""
    keys, rows = below
    if not len(newer):
        yield keys, rows
        return
    # the overlay's part may be far larger than the block: its rows are fetched a block at a time
    stays = ~np.isin(keys, newer, assume_unique=True)
    both = np.concatenate([keys[stays], newer])
    source = np.concatenate([np.flatnonzero(stays), len(keys) + np.arange(len(newer))])
    order = np.argsort(both.view(np.uint64), kind="stable")
    for i in range(0, len(order), block):
        part = source[order[i : i + block]]
        out = np.empty((len(part), overlay.row_bytes), np.uint8)
        old = part < len(keys)
        out[old] = rows[part[old]]
        mine = np.flatnonzero(~old)
        fetched = np.empty((len(mine), overlay.row_bytes), np.uint8)
        state, _ = overlay.fill(ordinals[part[mine] - len(keys)], view, fetched)
        out[mine] = fetched
        good = np.ones(len(part), bool)
        good[mine] = state == 1
        if good.any():
            yield both[order[i : i + block]][good], out[good]


def problems(snapshot: Snapshot, table: int, row_bytes: int) -> Iterator[str]:
    """Lines about a table of the base that cannot be read, is out of order, or has another number of rows."""
    total, last = 0, -1
    try:
        for keys, _ in _base_blocks(snapshot, table, row_bytes, max(1, min(_CHUNK, (64 << 20) // row_bytes))):
            numbers = keys.view(np.uint64)
            if int(numbers[0]) <= last or (numbers[1:] <= numbers[:-1]).any():
                yield f"table {table}: keys of the base are out of order"
            total, last = total + len(keys), int(numbers[-1])
        if total != snapshot.count(table):
            yield f"table {table}: the base has {total} rows, {snapshot.count(table)} were counted"
    except CorruptStore as error:
        yield str(error)
