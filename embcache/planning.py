"""What tables and tiers will take, in bytes, before anything is allocated.

>>> from embcache.config import TableConfig
>>> from embcache.tiers import Ram
>>> table = TableConfig("user", num_embeddings=1000, embedding_dim=16)
>>> plan([table], [Ram()]).memory
64125
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from .cache.admission import admission_bytes
from .cache.chain import cached_rows, check_chain, direct_tables
from .cache.policy import ScoreKeeper
from .cache.slots import SlotArrays
from .config import TableConfig, check_tables
from .errors import BadConfig
from .kernels.bloom import filter_bytes
from .kernels.index import ENTRY_BYTES, SMALLEST
from .kernels.memory import available_bytes
from .kernels.segments import stride_of
from .tiers import Lmdb, Ram

__all__ = ["MemoryPlan", "PlanItem", "base_bytes", "plan"]

PAGE = 4096
PAGE_HEAD, NODE_HEAD, KEY, POINTER = 16, 8, 8, 2
MOST_INLINE = 2038  # bytes of a node (head, key, value) that stays in its leaf
FILL = 0.69  # of a leaf's room in use, where rows arrive in no order
SEGMENT_TIMES = 32  # bytes of segments per byte of the overlay's index at which a merge begins
MERGED_ROWS = 50_000  # rows of a merge's transaction: each may touch a page
FEW_PAGES = 12  # of meta data
OVERLAY_ENTRY = 20  # bytes of the overlay's index a row, between two growths
WHERE = {"held": "", "batch": ", staged", "commit": ", commits", "growth": ", moments"}


@dataclass(frozen=True)
class PlanItem:
    """One structure: of which tier (its place in the chain) and table, on disk or in memory, and for how long.

    ``when``: "held" once it is full; "batch": while batches are staged; "commit": for as many
    rows as a commit has copied; "growth": for a moment, while it grows.
    """

    tier: int
    name: str
    table: str
    structure: str
    bytes: int
    disk: bool = False
    when: str = "held"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by tier, table and structure. ``str()`` gives a table to read.

    ``notes`` say what a number depends on.
    """

    items: tuple[PlanItem, ...]
    notes: tuple[str, ...] = ()

    def bytes(
        self, *, tier: int | None = None, table: str | None = None, structure: str | None = None, disk: bool = False
    ) -> int:
        """Sum over the items that match; None matches all."""
        return sum(
            item.bytes
            for item in self.items
            if item.disk == disk
            and tier in (None, item.tier)
            and table in (None, item.table)
            and structure in (None, item.structure)
        )

    @property
    def memory(self) -> int:
        """Bytes of memory held once caches are full, without what is there for moments."""
        return sum(item.bytes for item in self.items if not item.disk and item.when == "held")

    @property
    def peak(self) -> int:
        """Bytes of memory at most: ``memory``, rows that staged batches need beyond the cache, copies of all cached
        rows in a commit, and the largest of the structures that grow, twice."""
        moments = [item.bytes for item in self.items if not item.disk and item.when == "growth"]
        return self.memory + sum(i.bytes for i in self.items if i.when in ("batch", "commit")) + max(moments, default=0)

    @property
    def disk(self) -> int:
        """Bytes on disk."""
        return sum(item.bytes for item in self.items if item.disk)

    def __str__(self) -> str:
        sums: dict[tuple[int, str, str, bool, str], list[int]] = {}
        for item in self.items:
            sums.setdefault((item.tier, item.name, item.structure, item.disk, item.when), []).append(item.bytes)
        rows = [("tier", "structure", "where", "tables", "bytes")]
        for (tier, name, structure, disk, when), parts in sorted(sums.items(), key=lambda kv: kv[0][0]):
            where = ("disk" if disk else "memory") + WHERE[when]
            rows.append((f"{tier} {name}", structure, where, str(len(parts)), human(sum(parts))))
        widths = [max(len(row[k]) for row in rows) for k in range(5)]
        aligned = [
            [cell.rjust(w) if k > 2 else cell.ljust(w) for k, (cell, w) in enumerate(zip(r, widths, strict=True))]
            for r in rows
        ]
        free = available_bytes()
        last = f"memory {human(self.memory)}, at most {human(self.peak)}" + (f" of {human(free)} free" if free else "")
        lines = ["  ".join(row).rstrip() for row in aligned]
        return "\n".join([*lines, last, f"disk   {human(self.disk)}", *self.notes])


def plan(
    tables: Sequence[TableConfig],
    tiers: Sequence[Any],
    *,
    batch_size: int | None = None,
    depth: int = 1,
    ids_per_sample: float | Mapping[str, float] = 1.0,
    expected: int | Mapping[str, int] | None = None,
) -> MemoryPlan:
    """What ``EmbeddingStore(tables, tiers)`` will take. Allocates nothing; a pure function but for the notes, which
    look at free memory.

    Args:
        batch_size: samples a batch; None: batches are left out.
        depth: of look-ahead: depth + 1 batches are staged at once.
        ids_per_sample: mean ids a sample of each feature, or by feature.
        expected: rows that will ever be used of each table, or by table; None: all of a bounded table. An unbounded
            table that is not told counts with nothing, and a note says what a row of it takes.

    Raises BadConfig as the store would.
    """
    tables = check_tables(tables)
    check_chain(tiers)
    used = _expected(tables, expected)
    staged = _staged(tables, batch_size, depth, ids_per_sample)
    items: list[PlanItem] = []
    notes: list[str] = []
    for table in tables:
        if table.admission is not None:
            size = admission_bytes(table.admission)
            items.append(PlanItem(0, "Ram", table.name, "admission counts", size))
    if len(tiers) == 1 and isinstance(tiers[0], Ram):
        whole, told = _whole(tables, used, staged)
        return MemoryPlan((*items, *whole), (*told, *_unbounded_notes(tables, used, tiers[0])))
    for k, tier in enumerate(tiers):
        if isinstance(tier, Ram) and tier.bounded and k < len(tiers) - 1:
            over_disk = k == len(tiers) - 2 and isinstance(tiers[-1], Lmdb)
            items += _cache(k, tables, tier, staged if k == 0 else None, over_disk)
        elif isinstance(tier, Ram):
            items += [
                item for table, n in zip(tables, used, strict=True) for item in _hashed(k, table, n, held_twice=True)
            ]
        elif isinstance(tier, Lmdb):
            items += _disk(k, tables, tier, used)
            notes += _disk_notes(tables, used)
        else:
            raise BadConfig(f"plan: tiers[{k}] = {tier!r} is neither Ram nor Lmdb")
    return MemoryPlan(tuple(items), (*notes, *_unbounded_notes(tables, used, tiers[-1])))


# the first tier --------------------------------------------------------------------------------------------------


def _whole(tables: list[TableConfig], used: list[int | None], staged: list[int]) -> tuple[list[PlanItem], list[str]]:
    items: list[PlanItem] = []
    notes: list[str] = []
    direct = direct_tables(tables, available_bytes())
    for t, table in enumerate(tables):
        if t in direct:
            rows = table.num_embeddings or 0
            items.append(PlanItem(0, "Ram", table.name, "rows", rows * table.row_bytes))
            items.append(PlanItem(0, "Ram", table.name, "written bits", (rows + 7) // 8))
            continue
        items += _hashed(0, table, used[t], slot_bytes=SlotArrays.BYTES)
        items.append(_overflow(0, table, staged[t]))
        if table.num_embeddings is not None and table.admission is None and table.expiry is None:
            notes.append(f"table {table.name!r} does not fit whole: it is hashed, and only rows in use take memory")
    return items, notes


def _hashed(
    tier: int, table: TableConfig, rows: int | None, *, slot_bytes: int = 0, held_twice: bool = False
) -> list[PlanItem]:
    """All used rows of a table by key. ``held_twice``: growing copies them."""
    rows = rows or 0
    index = ENTRY_BYTES * _grown(rows)
    size = rows * table.row_bytes
    items = [PlanItem(tier, "Ram", table.name, "rows", size), PlanItem(tier, "Ram", table.name, "index", index)]
    if slot_bytes:
        items.append(PlanItem(tier, "Ram", table.name, "slot data", rows * slot_bytes))
    moment = 2 * index // 3 + (2 * size // 3 if held_twice else 0)
    return [*items, PlanItem(tier, "Ram", table.name, "growing", moment, when="growth")]


def _grown(rows: int) -> int:
    """Entries of an index that has grown to ``rows`` keys."""
    capacity = SMALLEST
    while capacity * 3 // 4 < rows:
        capacity = capacity * 3 // 2
    return capacity


def _cache(tier: int, tables: list[TableConfig], ram: Ram, staged: list[int] | None, over_disk: bool) -> list[PlanItem]:
    items: list[PlanItem] = []
    for t, (table, rows) in enumerate(zip(tables, cached_rows(ram, tables), strict=True)):
        entries = max(SMALLEST, 2 * rows)
        for structure, size in (
            ("rows", rows * table.row_bytes),
            ("index", ENTRY_BYTES * entries),
            ("slot data", rows * SlotArrays.BYTES),
            ("scores", ScoreKeeper.bytes_for(cast(Any, ram.policy), rows)),
        ):
            items.append(PlanItem(tier, "Ram", table.name, structure, size))
        if over_disk:  # where every row is dirty
            copies = PlanItem(tier, "Ram", table.name, "copies of rows", rows * table.row_bytes, when="commit")
            items.append(copies)
        if staged is None or not staged[t]:
            continue
        # the worst case: none of the rows that are staged ahead has a place in the cache, or all of it is pinned
        items.append(_overflow(tier, table, staged[t]))
        if rows + staged[t] > entries * 3 // 4:
            grown = _grown_from(entries, rows + staged[t])
            items.append(PlanItem(tier, "Ram", table.name, "index", ENTRY_BYTES * (grown - entries), when="batch"))
            items.append(PlanItem(tier, "Ram", table.name, "growing", 2 * ENTRY_BYTES * grown // 3, when="growth"))
    return items


def _grown_from(capacity: int, rows: int) -> int:
    while capacity * 3 // 4 < rows:
        capacity = capacity * 3 // 2
    return capacity


def _overflow(tier: int, table: TableConfig, rows: int) -> PlanItem:
    size = rows * (table.row_bytes + SlotArrays.BYTES)
    return PlanItem(tier, "Ram", table.name, "overflow", size, when="batch")


# disk ------------------------------------------------------------------------------------------------------------


def base_bytes(rows: int, row_bytes: int, fill: float = FILL) -> int:
    """Bytes of LMDB pages that hold ``rows`` rows; ``fill`` 1.0: merged in the order of their keys.

    A row costs 18 bytes besides its own, and whole rows share a 4 KiB page: 1,024 bytes fit three times, 1,002 four
    times. From 2,023 bytes on a row has pages of its own.

    >>> [base_bytes(1_000_000, n, 1.0) // 1_000_000 for n in (64, 768, 1002, 1024, 2048)]
    [83, 822, 1028, 1371, 4122]
    """
    if not rows:
        return 0
    node = NODE_HEAD + KEY + row_bytes
    own = 0
    if node > MOST_INLINE:
        own = -(-(PAGE_HEAD + row_bytes) // PAGE) * PAGE
        node = NODE_HEAD + KEY + 8
    per_leaf = max(1.0, fill * ((PAGE - PAGE_HEAD) // (node + node % 2 + POINTER)))
    leaves = pages = math.ceil(rows / per_leaf)
    per_branch = fill * ((PAGE - PAGE_HEAD) // (NODE_HEAD + KEY + POINTER))
    while leaves > 1:
        leaves = math.ceil(leaves / per_branch)
        pages += leaves
    return pages * PAGE + rows * own


def _disk(tier: int, tables: list[TableConfig], lmdb: Lmdb, used: list[int | None]) -> list[PlanItem]:
    items: list[PlanItem] = []
    waiting = lmdb.overlay_bytes // OVERLAY_ENTRY  # rows, over all tables, before a merge begins
    total = sum(n or 0 for n in used)
    for table, n in zip(tables, used, strict=True):
        rows = n or 0
        part = min(rows, waiting * rows // total) if total else 0
        stride = stride_of(table.row_bytes)
        segments = min(part * stride, SEGMENT_TIMES * lmdb.overlay_bytes)
        items.append(PlanItem(tier, "Lmdb", table.name, "overlay index", ENTRY_BYTES * _grown(part)))
        items.append(PlanItem(tier, "Lmdb", table.name, "segments", segments, disk=True))
        items.append(PlanItem(tier, "Lmdb", table.name, "base", base_bytes(rows, table.row_bytes), disk=True))
    size = filter_bytes(total)  # read into memory whole; a merge writes it anew beside the old one
    items.append(PlanItem(tier, "Lmdb", "", "filter of keys", size))
    items.append(PlanItem(tier, "Lmdb", "", "filter of keys", 2 * size, disk=True))
    base = sum(item.bytes for item in items if item.structure == "base")
    rewritten = min(base, MERGED_ROWS * PAGE) + FEW_PAGES * PAGE  # a merge copies pages before it frees the old ones
    items.append(PlanItem(tier, "Lmdb", "", "base, free pages", rewritten, disk=True))
    items.append(PlanItem(tier, "Lmdb", "", "changed keys", min(lmdb.changes_bytes, 8 * total), disk=True))
    return items


def _disk_notes(tables: list[TableConfig], used: list[int | None]) -> list[str]:
    full = sum(base_bytes(n or 0, t.row_bytes, 1.0) for t, n in zip(tables, used, strict=True))
    return [f"disk: with every row used that is counted; pages 69 % full, {human(full)} where rows arrive in order"]


# numbers ---------------------------------------------------------------------------------------------------------


def _expected(tables: list[TableConfig], expected: int | Mapping[str, int] | None) -> list[int | None]:
    if isinstance(expected, Mapping):
        unknown = sorted(set(expected) - {table.name for table in tables})
        if unknown:
            raise BadConfig(f"plan: expected names {unknown}, tables are {[table.name for table in tables]}")
        told = [expected.get(table.name) for table in tables]
    else:
        told = [expected] * len(tables)
    for n in told:
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 0):
            raise BadConfig(f"plan: expected = {n!r}, must be an integer >= 0")
    return [
        table.num_embeddings if n is None else min(n, table.num_embeddings or n)
        for n, table in zip(told, tables, strict=True)
    ]


def _staged(
    tables: list[TableConfig], batch_size: int | None, depth: int, ids_per_sample: float | Mapping[str, float]
) -> list[int]:
    """Ids of each table in the batches that are staged at once."""
    for what, value in (("batch_size", batch_size), ("depth", depth)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise BadConfig(f"plan: {what} = {value!r}, must be an integer >= 0")
    out = []
    for table in tables:
        by = [
            ids_per_sample.get(f, 1.0) if isinstance(ids_per_sample, Mapping) else ids_per_sample
            for f in table.feature_names
        ]
        ids = math.ceil((batch_size or 0) * sum(by)) * (depth + 1)
        out.append(min(ids, table.num_embeddings or ids))
    return out


def _unbounded_notes(tables: list[TableConfig], used: list[int | None], last: Any) -> list[str]:
    notes = []
    for table, n in zip(tables, used, strict=True):
        if n is None:
            disk = isinstance(last, Lmdb)
            each = base_bytes(100_000, table.row_bytes) // 100_000 if disk else table.row_bytes + 2 * ENTRY_BYTES
            where = "disk" if disk else "memory"
            notes.append(f"table {table.name!r} has no bound: about {each:,} bytes of {where} for each id used")
    return notes


def human(size: int) -> str:
    """``1.5 GiB`` and the like.

    >>> human(0), human(1023), human(3 << 29)
    ('0 B', '1023 B', '1.5 GiB')
    """
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{size} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
