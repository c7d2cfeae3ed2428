"""From descriptions of tiers to what holds the rows."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ..config import TableConfig
from ..errors import BadConfig
from ..kernels.memory import available_bytes
from ..tiers.base import BackTier
from ..tiers.ram import Ram
from ..tiers.rows import RowStore
from .direct import DirectTable
from .front import Front
from .hot import HotTable
from .middle import Middle
from .slots import SlotArrays

MOST_SLOTS = 2**31 - 2  # the index holds a slot + 1 in 31 bits
OVERFLOW_ROWS = 2**27
ROW_EXTRA = SlotArrays.BYTES + 32  # bytes of a cached row besides itself: index 24, score 8
OVERFLOW_BYTES = 64 << 30
OVERFLOW_TOTAL = 4 << 40  # bytes of address space for the overflow extents of all tables


def open_chain(tables: Sequence[TableConfig], tiers: Sequence[Any], kernels: ModuleType) -> Front:
    """The front of a chain of tiers, all of them opened.

    ``[Ram()]``: bounded tables lie whole in memory, unless they do not fit; unbounded ones, and those, are hashed and
    grow. A longer chain begins with bounded ``Ram(rows=...)`` or ``Ram(bytes=...)``; its last tier holds every row.
    """
    if not tiers:
        raise BadConfig("tiers = [], must have at least one tier")
    for k, tier in enumerate(tiers[:-1]):
        if not isinstance(tier, Ram):
            raise BadConfig(f"tiers[{k}] = {tier!r}: every tier but the last is a cache, Ram(rows=...)")
        if not tier.bounded:
            raise BadConfig(f"tiers[{k}] = {tier!r}: over another tier it needs rows= or bytes=")
    last = tiers[-1]
    if isinstance(last, Ram) and last.bounded:
        raise BadConfig(
            f"tiers[{len(tiers) - 1}] = {last!r}: rows=, bytes= and policy= are for a cache over a tier below"
        )
    if len(tiers) == 1 and isinstance(last, Ram):
        return Front(tables, _whole(tables, kernels), [])
    if len(tiers) == 1:
        raise BadConfig(
            f"tiers = [{last!r}]: lookups read memory, so the first tier is Ram(rows=...) or Ram(bytes=...)"
        )
    below = _below(tables, tiers)
    try:
        rows = tiers[0].split(tables, ROW_EXTRA)
        engines = [_cached(t, table, rows[t], tiers[0].policy, below[0], len(tables)) for t, table in enumerate(tables)]
        return Front(tables, engines, below)
    except BaseException:
        for tier in below:
            tier.close()
        raise


def _below(tables: Sequence[TableConfig], tiers: Sequence[Any]) -> list[BackTier]:
    """The tiers below the first, opened, nearest first."""
    last = tiers[-1]
    chain: list[BackTier] = [RowStore() if isinstance(last, Ram) else last]
    chain[0].open(tables)
    try:
        for tier in reversed(tiers[1:-1]):
            middle = Middle(tier.split(tables, ROW_EXTRA), tier.policy, chain[0])
            middle.open(tables)
            chain.insert(0, middle)
    except BaseException:
        for tier in chain:
            tier.close()
        raise
    return chain


def _whole(tables: Sequence[TableConfig], kernels: ModuleType) -> list[DirectTable | HotTable]:
    """Engines of tables with no tier below."""
    free = available_bytes()
    direct = direct_tables(tables, free)
    return [
        DirectTable(table, kernels) if t in direct else _growing(t, table, free, len(tables))
        for t, table in enumerate(tables)
    ]


def direct_tables(tables: Sequence[TableConfig], free: int | None) -> set[int]:
    """Tables that lie whole in memory under ``[Ram()]``, as far as ``free`` bytes go: the largest are hashed first."""
    sizes = {t: table.num_embeddings * table.row_bytes for t, table in enumerate(tables) if table.num_embeddings}
    direct = {t for t in sizes if tables[t].admission is None and tables[t].expiry is None}
    while free is not None and sum(sizes[t] for t in direct) > free:
        direct.remove(max(direct, key=lambda t: (sizes[t], t)))
    return direct


def _growing(t: int, table: TableConfig, free: int | None, tables: int) -> HotTable:
    overflow = _overflow(table, tables)
    rows = min(MOST_SLOTS - overflow, table.num_embeddings or MOST_SLOTS)
    if free is not None:
        rows = max(1, min(rows, free // table.row_bytes))
    return _reserved(t, table, rows, overflow, None, None)


def _cached(t: int, table: TableConfig, rows: int, policy: Any, below: BackTier, tables: int) -> HotTable:
    rows = min(rows, table.num_embeddings or rows)
    return _reserved(t, table, rows, min(_overflow(table, tables), MOST_SLOTS - rows), policy, below)


def _overflow(table: TableConfig, tables: int) -> int:
    most = min(OVERFLOW_BYTES, OVERFLOW_TOTAL // tables) // table.row_bytes
    return max(1, min(OVERFLOW_ROWS, most, table.num_embeddings or most))


def _reserved(t: int, table: TableConfig, rows: int, overflow: int, policy: Any, below: BackTier | None) -> HotTable:
    """With as large an overflow extent as the system gives address space for."""
    while True:
        try:
            return HotTable(t, table, rows, overflow, policy, below)
        except OSError:
            if overflow == 1:
                raise
            overflow = max(1, overflow // 2)
