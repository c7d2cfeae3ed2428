"""From descriptions of tiers to what holds the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

from ..config import TableConfig
from ..errors import BadConfig
from ..kernels.memory import address_space, available_bytes
from ..tiers.base import BackTier
from ..tiers.ram import Ram
from ..tiers.rows import RowStore
from ..tiers.unplaced import Unplaced
from .direct import DirectTable
from .front import Front
from .hot import HotTable
from .middle import Middle
from .slots import SlotArrays
from .unplaced import UnplacedFront

MOST_SLOTS = 2**31 - 2  # the index holds a slot + 1 in 31 bits
OVERFLOW_ROWS = 2**27
ROW_EXTRA = SlotArrays.BYTES + 32  # bytes of a cached row besides itself: index 24, score 8
OVERFLOW_BYTES = 64 << 30
OVERFLOW_TOTAL = 4 << 40  # bytes of address space for the overflow extents of all tables


def check_chain(tiers: Sequence[Any]) -> None:
    """BadConfig unless the tiers can follow each other as they do."""
    if not isinstance(tiers, Sequence):
        raise BadConfig(f"tiers = {tiers!r}, must be a list of tiers, fastest first")
    if not tiers:
        raise BadConfig("tiers = [], must have at least one tier")
    for k, tier in enumerate(tiers[:-1]):
        if not isinstance(tier, Ram):
            raise BadConfig(f"tiers[{k}] = {tier!r}: every tier but the last is a cache, Ram(rows=...)")
        if not tier.bounded:
            raise BadConfig(f"tiers[{k}] = {tier!r}: over another tier it needs rows= or bytes=")
    last = tiers[-1]
    if not isinstance(last, Ram) and not hasattr(last, "scan"):
        raise BadConfig(f"tiers[{len(tiers) - 1}] = {last!r}: the last tier holds every row, Ram() or Lmdb(path)")
    if isinstance(last, Ram) and last.bounded:
        raise BadConfig(
            f"tiers[{len(tiers) - 1}] = {last!r}: rows=, bytes= and policy= are for a cache over a tier below"
        )
    if len(tiers) == 1 and not isinstance(last, Ram):
        raise BadConfig(
            f"tiers = [{last!r}]: lookups read memory, so the first tier is Ram(rows=...) or Ram(bytes=...)"
        )


def open_chain(tables: Sequence[TableConfig], tiers: Sequence[Any], kernels: ModuleType) -> Front:
    """The front of a chain of tiers, all of them opened.

    ``[Ram()]``: bounded tables lie whole in memory, unless they do not fit; unbounded ones, and those, are hashed and
    grow. A longer chain begins with bounded ``Ram(rows=...)`` or ``Ram(bytes=...)``; its last tier holds every row.
    """
    if isinstance(tiers, Sequence) and len(tiers) == 1 and isinstance(tiers[0], Unplaced):
        return cast(Front, UnplacedFront(tables))
    check_chain(tiers)
    if len(tiers) == 1:
        return _whole(tables, kernels, tiers[0].whole)
    below = _below(tables, tiers)
    try:
        rows = cached_rows(tiers[0], tables)
        return _fitting(
            lambda part: Front(
                tables,
                [
                    _cached(t, table, rows[t], _overflow(table, len(tables), part), tiers[0].policy, below[0])
                    for t, table in enumerate(tables)
                ],
                below,
            )
        )
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
            middle = Middle(cached_rows(tier, tables), tier.policy, chain[0])
            middle.open(tables)
            chain.insert(0, middle)
    except BaseException:
        for tier in chain:
            tier.close()
        raise
    return chain


def cached_rows(tier: Ram, tables: Sequence[TableConfig]) -> list[int]:
    """Rows that a cache keeps of each table."""
    rows = [min(n, t.num_embeddings or n) for n, t in zip(tier.split(tables, ROW_EXTRA), tables, strict=True)]
    for n, table in zip(rows, tables, strict=True):
        if n >= MOST_SLOTS:
            raise BadConfig(f"{tier!r}: a cache of {n:,} rows of table {table.name!r}, at most {MOST_SLOTS - 1:,} fit")
    return rows


def _fitting(build: Callable[[int], Front]) -> Front:
    """``build(part)`` with the smallest ``part`` by which what is only reserved must be divided for the system to give
    so much address space."""
    part = 1
    while True:
        try:
            return build(part)
        except OSError:
            if part >= OVERFLOW_ROWS:
                raise
            part *= 8


def _whole(tables: Sequence[TableConfig], kernels: ModuleType, names: frozenset[str] | None) -> Front:
    """A front with no tier below; only tables of these ``names`` (None: any) lie whole in memory."""
    free = available_bytes()
    whole = {t for t, table in enumerate(tables) if names is None or table.name in names}
    chosen = direct_tables([tables[t] for t in sorted(whole)], free)
    direct = {t: DirectTable(tables[t], kernels) for t in (sorted(whole)[k] for k in sorted(chosen))}
    return _fitting(
        lambda part: Front(
            tables,
            [
                direct[t]
                if t in direct
                else _growing(t, table, free, len(tables), _overflow(table, len(tables), part), part)
                for t, table in enumerate(tables)
            ],
            [],
        )
    )


def direct_tables(tables: Sequence[TableConfig], free: int | None) -> set[int]:
    """Tables that lie whole in memory under ``[Ram()]``, as far as ``free`` bytes go: the largest are hashed first."""
    sizes = {t: table.num_embeddings * table.row_bytes for t, table in enumerate(tables) if table.num_embeddings}
    direct = {t for t in sizes if tables[t].admission is None and tables[t].expiry is None}
    while free is not None and sum(sizes[t] for t in direct) > free:
        direct.remove(max(direct, key=lambda t: (sizes[t], t)))
    return direct


def _growing(t: int, table: TableConfig, free: int | None, tables: int, overflow: int, part: int) -> HotTable:
    rows = min(MOST_SLOTS - overflow, table.num_embeddings or MOST_SLOTS)
    most = address_space() // 4 // tables if free is None else min(free, address_space() // 4 // tables)
    rows = max(1, min(rows, most // table.row_bytes) // part)
    return HotTable(t, table, rows, overflow, None, None)


def _cached(t: int, table: TableConfig, rows: int, overflow: int, policy: Any, below: BackTier) -> HotTable:
    return HotTable(t, table, rows, min(overflow, MOST_SLOTS - rows), policy, below)


def _overflow(table: TableConfig, tables: int, part: int) -> int:
    most = min(OVERFLOW_BYTES, OVERFLOW_TOTAL // tables, address_space() // 4 // tables) // table.row_bytes
    return max(1, min(OVERFLOW_ROWS, most, table.num_embeddings or most) // part)
