"""A generation read by other ranks, or under another plan, than those that saved it.

What a rank keeps stays where it is; the rest goes, in blocks, from whoever reads the old rank's folder to the rank that
holds it now. A rank that goes on in its own folder reads its own part; folders of ranks that are no more are read by
one that sees them. Nothing is committed here: until the caller's commit, the old generation is what there is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import schema
from ..checkpoint import Checkpoints, SavedStore
from ..config import TableConfig
from ..errors import CorruptStore, EmbcacheError, NotSupported, SchemaMismatch
from ..kernels.buckets import BUCKETS
from ..store import EmbeddingStore
from ..tiers import Lmdb, Ram
from .layout import Piece, layout_of
from .manifest import GroupGeneration, Part
from .moves import Block, Moved, Stream, move
from .peers import Peers
from .plan import ShardingPlan

__all__ = [
    "Lost",
    "Reader",
    "Resharded",
    "by_number",
    "filters_moved",
    "readers_of",
    "reshard",
    "seen",
    "streams_block",
]

BLOCK_BYTES = 16 << 20
READER_CACHE = 1 << 20  # bytes of a cache that only streams pass by


class Lost(CorruptStore):
    """No rank sees what a generation names; nothing has changed."""


@dataclass
class Resharded:
    """What a move took: rows by table, and the cells of admission filters."""

    rows: dict[str, Moved] = field(default_factory=dict)
    filters: Moved = field(default_factory=Moved)

    def totals(self) -> Moved:
        """Over all tables, of this rank."""
        total = Moved()
        for moved in self.rows.values():
            total += moved
        return total


class Reader:
    """One rank's part of a generation, read from its folder.

    Args:
        folder: of that rank.
        part: what the group's manifest says of it.
        stores: this rank's own, where they have been restored from that part; rows are read from them then.
    """

    def __init__(self, folder: Path, part: Part, stores: Sequence[EmbeddingStore] | None = None) -> None:
        self._saved, self.number = Checkpoints(folder), part.number
        self.described: list[SavedStore] = self._saved.stores(part.number)
        self._own = stores
        self._opened: dict[int, EmbeddingStore] = {}

    def state(self) -> Any:
        """What was saved besides the stores."""
        return self._saved.state(self.number)

    def blocks(self, k: int, name: str, block: int) -> Iterator[Block]:
        """Rows of a local table of store ``k``."""
        store = self.described[k]
        t = [table.name for table in store.tables].index(name)
        if self._own is not None:
            return self._own[k].raw_rows(t, block)
        if store.disk:
            return self._store(k).raw_rows(t, block)
        return self._saved.rows(self.number, sum(len(other.tables) for other in self.described[:k]) + t)

    def _store(self, k: int) -> EmbeddingStore:
        if k not in self._opened:
            tiers = [Ram(bytes=READER_CACHE), Lmdb(self._saved.folder, readonly=True)]
            self._opened[k] = EmbeddingStore(self.described[k].tables, tiers)
            self._opened[k].restore(self.number)
        return self._opened[k]

    def close(self) -> None:
        """Let go of the files."""
        for store in self._opened.values():
            store.close()


def seen(folder: Path, part: Part) -> str | None:
    """What is wrong with a rank's folder, None where it holds the part."""
    place = folder / part.folder
    if not place.is_dir():
        return f"{place} is missing"
    try:
        found = Checkpoints(place)
    except EmbcacheError as error:
        return str(error)
    if found.lineage != part.lineage:
        return f"{place} is of lineage {found.lineage or 'none'}, the group's manifest names {part.lineage}"
    there = {g.number: g.check for g in found.generations}
    if part.number not in there:
        return f"{place} holds generations {sorted(there)}, the group's manifest names {part.number}"
    if there[part.number] != part.check:
        return f"{place}: generation {part.number} is not the one that the group's manifest names"
    return None


def readers_of(peers: Peers, folder: Path, generation: GroupGeneration) -> list[int]:
    """Which rank reads the part of each old rank: its own number where that one sees it, else one that does.
    CorruptStore on all ranks where nobody sees one."""
    mine = peers.together(lambda: [seen(folder, part) for part in generation.ranks])
    said = peers.all_told(mine)
    readers = []
    for source in range(generation.world):
        able = [rank for rank in range(peers.world) if said[rank][source] is None]
        if not able:
            near = source if source < peers.world else 0
            raise Lost(
                f"rank {source} of generation {generation.number}: {said[near][source]}; no rank sees another copy"
            )
        readers.append(source if source in able else able[source % len(able)])
    return readers


def reshard(
    peers: Peers,
    folder: Path,
    generation: GroupGeneration,
    stores: Sequence[Any],
    own: Checkpoints,
    own_folder: str,
) -> tuple[Any, list[Any], Resharded]:
    """Read a generation into sharded stores, whoever held it; (dense state of all ranks, this rank's own state where it
    had one, what moved). Collective; the stores of all ranks are empty or hold the generation afterwards, or an error
    was raised by all, and they hold anything."""
    locals_ = [store.local for store in stores]
    readers = readers_of(peers, folder, generation)
    mine = [source for source, rank in enumerate(readers) if rank == peers.rank]

    def begin() -> tuple[dict[int, Reader], bool]:
        stays = False
        found: dict[int, Reader] = {}
        for source in mine:
            part = generation.ranks[source]
            reader = found[source] = Reader(folder / part.folder, part)
            _check(generation.plans, reader.described, stores)
            if source == peers.rank and part.folder == own_folder and _same_form(reader.described, locals_):
                stays = True
                own.load(locals_, part.number)
                for local in locals_:
                    local.front.purge()
                found[source] = Reader(folder / part.folder, part, locals_)
        if not stays:
            kept = [description for g in own.generations for description in g.disk]
            for local in locals_:
                local.begin_restore(None, kept if local.durable is not None else ())
                local.load_extra_state({})
        return found, stays

    sources: dict[int, Reader] = {}
    try:
        sources, stays = peers.patiently(begin)
        staying = [bool(flag) for flag in peers.all_told(stays)]
        done = Resharded()
        for k, store in enumerate(stores):
            old = layout_of(ShardingPlan.from_dict(generation.plans[k]), store.tables)
            new = layout_of(store.plan, store.tables)
            _reshard_store(_Work(peers, k, store, old, new, sources, readers, staying), done)
        root = readers[0]
        dense = [sources[0].state()] if root == peers.rank else []
        here = sources[peers.rank].state() if peers.rank in sources and generation.world == peers.world else None
        return dense, [here], done
    finally:
        for reader in sources.values():
            reader.close()


@dataclass
class _Work:
    """One store's part of a move."""

    peers: Peers
    k: int  # which store
    store: Any
    old: dict[str, list[Piece]]
    new: dict[str, list[Piece]]
    sources: dict[int, Reader]  # that this rank reads
    readers: Sequence[int]
    staying: Sequence[bool]

    def saved(self) -> dict[int, SavedStore]:
        """What each source says of the store."""
        return {source: reader.described[self.k] for source, reader in self.sources.items()}

    def facts(self) -> tuple[dict[str, int], dict[str, list[int] | None]]:
        """(steps, expiry clocks) of every table, which all ranks must have counted alike."""
        mine = {}
        for source, saved in self.saved().items():
            names = [table.name for table in saved.tables]
            steps = {name: [saved.steps[names.index(p.name)] for p in pieces] for name, pieces in self.old.items()}
            clocks = {name: saved.extra.get(f"{pieces[0].name}.expiry") for name, pieces in self.old.items()}
            mine[source] = steps, {name: None if clock is None else clock.tolist() for name, clock in clocks.items()}
        steps, clocks = self.peers.told(mine.get(0), self.readers[0])

        def check() -> None:
            for source, (theirs, times) in mine.items():
                for name, count in steps.items():
                    if theirs[name] != count or times[name] != clocks[name]:
                        raise CorruptStore(f"rank {source}: table {name!r} is at another step than on rank 0")

        self.peers.together(check)
        return {name: count[0] for name, count in steps.items()}, clocks

    def rows(self, table: TableConfig) -> Moved:
        """Move the rows of a table."""
        local: EmbeddingStore = self.store.local
        old, new = self.old[table.name], self.new[table.name]
        places = [local.index(piece.name) for piece in new]
        size = streams_block(table, self.peers.world)
        streams = [
            Stream(source, i, reader.blocks(self.k, piece.name, size), self._resident(source))
            for source, reader in self.sources.items()
            for i, piece in enumerate(old)
            if source in piece.ranks
        ]
        moved, gone = move(
            self.peers,
            table,
            old,
            new,
            streams,
            lambda j, ids, rows: local.put_raw_rows(places[j], ids, rows),
            readers=self.readers,
            staying=self.staying,
        )

        def forget() -> None:
            for i, ids in gone.items():
                local.delete(old[i].name, torch.cat(ids))

        self.peers.patiently(forget)
        return moved

    def _resident(self, source: int) -> bool:
        return source == self.peers.rank and self.staying[source]

    def filter(self, table: TableConfig) -> tuple[list[Tensor], Moved]:
        """Move what a table's admission has counted."""
        old = self.old[table.name]
        cells = {
            source: saved.extra[f"{old[0].name}.admission"]
            for source, saved in self.saved().items()
            if source in old[0].ranks
        }
        return filters_moved(self.peers, table, old, self.new[table.name], cells, self.readers)


def _reshard_store(work: _Work, done: Resharded) -> None:
    local, tables = work.store.local, work.store.tables
    steps, clocks = work.facts()
    extra: dict[str, Tensor] = {}
    for table in tables:
        done.rows[table.name] = work.rows(table)
        cells: list[Tensor] = []
        if table.admission is not None:
            cells, travelled = work.filter(table)
            done.filters += travelled
        for j, piece in enumerate(work.new[table.name]):
            local.steps[local.index(piece.name)] = steps[table.name]
            if table.expiry is not None:
                extra[f"{piece.name}.expiry"] = torch.tensor(clocks[table.name])
            if table.admission is not None:
                extra[f"{piece.name}.admission"] = cells[j]
    work.peers.together(lambda: local.load_extra_state(extra))
    local.version += 1


def streams_block(table: TableConfig, world: int) -> int:
    """Rows that a stream reads at once."""
    return max(1, BLOCK_BYTES // world // table.row_bytes)


class _ByNumber(Piece):
    """A piece whose keys are the numbers of hash buckets themselves."""

    def owners(self, ids: np.ndarray) -> np.ndarray:
        return np.asarray(self.buckets, np.int64)[ids]


def filters_moved(
    peers: Peers,
    table: TableConfig,
    old: Sequence[Piece],
    new: Sequence[Piece],
    cells: dict[int, Tensor],
    readers: Sequence[int],
) -> tuple[list[Tensor], Moved]:
    """The cells of an admission filter, [64, n], on every rank for each piece of the new layout: those of the buckets
    it holds, zeros elsewhere. ``cells``: by rank of the old layout that this rank reads."""
    shape = torch.tensor([list(part.shape) for part in cells.values()][:1] or [[0, 0]])
    width = max(each[0][1] for each in peers.all_told(shape.tolist()))
    kind = torch.uint8 if table.admission is not None and table.admission.min_count <= 255 else torch.int32
    nbytes = width * kind.itemsize
    form = TableConfig(table.name, BUCKETS, max(1, -(-nbytes // 4)))
    columns = (0, form.embedding_dim)
    ids = torch.arange(BUCKETS)
    found = [torch.zeros(BUCKETS, form.row_bytes, dtype=torch.uint8) for _ in new]
    streams = []
    for source, part in cells.items():
        rows = torch.zeros(BUCKETS, form.row_bytes, dtype=torch.uint8)
        rows[:, :nbytes] = part.contiguous().view(torch.uint8)
        streams.append(Stream(source, 0, [(ids, rows)]))

    def put(j: int, numbers: Tensor, rows: Tensor) -> None:
        found[j][numbers] = rows

    before = [by_number(table, old[0], columns)]
    after = [by_number(table, piece, columns) for piece in new]
    moved, _ = move(
        peers, form, before, after, streams, put, readers=readers, staying=[False] * peers.world
    )  # of old columns the first will do: every shard has counted the same
    return [part[:, :nbytes].contiguous().view(kind) for part in found], moved


def by_number(table: TableConfig, piece: Piece, columns: tuple[int, int]) -> Piece:
    """A piece whose keys are the numbers of the 64 buckets by which ids are counted. NotSupported where ranks share
    one."""
    if piece.buckets is None:
        return Piece(piece.name, columns, piece.ranks) if piece.replicated else _ByNumber(
            piece.name, columns, piece.ranks, (piece.ranks[0],) * BUCKETS
        )  # fmt: skip
    several = len(piece.buckets) // BUCKETS
    owners = [set(piece.buckets[b * several : (b + 1) * several]) for b in range(BUCKETS)]
    if any(len(ranks) > 1 for ranks in owners):
        raise NotSupported(
            f"table {table.name!r} counts ids before it admits them, by {BUCKETS} buckets: a plan that splits one of "
            "these between ranks would admit others than one rank does"
        )
    return _ByNumber(piece.name, columns, piece.ranks, tuple(ranks.pop() for ranks in owners))


def _same_form(saved: Sequence[SavedStore], locals_: Sequence[EmbeddingStore]) -> bool:
    if [s.disk for s in saved] != [local.durable is not None for local in locals_]:
        return False
    with contextlib.suppress(SchemaMismatch):
        for before, local in zip(saved, locals_, strict=True):
            schema.agree(before.tables, local.tables)
        return True
    return False


def _check(plans: Sequence[dict[str, Any]], saved: Sequence[SavedStore], stores: Sequence[Any]) -> None:
    """SchemaMismatch where the rows that were saved are not those of the declared tables."""
    if len(saved) != len(stores):
        raise SchemaMismatch("stores of the group", len(saved), len(stores))
    for plan, before, store in zip(plans, saved, stores, strict=True):
        names = [table.name for table in store.tables]
        if sorted(plan["tables"]) != sorted(names):
            raise SchemaMismatch("tables of the group", sorted(plan["tables"]), sorted(names))
        old = layout_of(ShardingPlan.from_dict(plan), store.tables)
        there = {table.name: table for table in before.tables}
        for table in store.tables:
            for piece in old[table.name]:
                _check_piece(table, piece, there)


def _check_piece(table: TableConfig, piece: Piece, there: dict[str, TableConfig]) -> None:
    found = there.get(piece.name)
    if found is None:
        raise SchemaMismatch(f"table {table.name!r}", sorted(there), piece.name)
    schema.agree([found], [table.part(*piece.columns, name=piece.name)], f"table {table.name!r}")
