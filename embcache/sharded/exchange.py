"""Which id goes where, over plain arrays: distinct ids, their owners, their places on the wire.

Counts are matrices int64 [ranks, pieces] whose columns stand in *wire order*: pieces by ascending dimension, those that
every rank holds last within one dimension. Read row after row, such a matrix lists the blocks of a message buffer in
their order: peer after peer, piece after piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..kernels.buckets import bucket
from ..kernels.index import home
from ..kernels.jit import kernel
from .plan import ALL, HASH, Piece

__all__ = ["Routed", "WireOrder", "distinct", "moved_slots", "pack_ids", "route", "union", "unpack_ids"]


@kernel
def _distinct(
    ids: np.ndarray,
    ranges: np.ndarray,
    ends: np.ndarray,
    table: np.ndarray,
    unique: np.ndarray,
    counts: np.ndarray,
    positions: np.ndarray,
) -> int:
    base, i = 0, 0
    for g in range(counts.shape[0]):
        n = 0
        for r in range(ends[g], ends[g + 1]):
            n += ranges[r, 1] - ranges[r, 0]
        capacity = 16
        while capacity < 2 * n:
            capacity *= 2
        table[:capacity] = -1
        u = 0
        for r in range(ends[g], ends[g + 1]):
            for at in range(ranges[r, 0], ranges[r, 1]):
                key = ids[at]
                e = home(key, capacity)
                while table[e] >= 0 and unique[base + table[e]] != key:
                    e += 1
                    if e == capacity:
                        e = 0
                if table[e] < 0:
                    table[e] = u
                    unique[base + u] = key
                    u += 1
                positions[i] = table[e]
                i += 1
        counts[g] = u
        base += u
    return base


def distinct(ids: np.ndarray, ranges: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct ids of each group, in the order in which they first occur.

    ``ranges`` int64 [R, 2] are stretches of ``ids``, those of group g ``ranges[ends[g] : ends[g + 1]]``. Returns
    (unique int64, group after group; counts int64 [G]; for each id of the ranges its position within its group).

    >>> unique, counts, positions = distinct(
    ...     np.array([5, 7, 5, 7, 7]), np.array([[0, 3], [3, 5]]), np.array([0, 1, 2]))
    >>> unique.tolist(), counts.tolist(), positions.tolist()
    ([5, 7, 7], [2, 1], [0, 1, 0, 0, 0])
    """
    sizes = ranges[:, 1] - ranges[:, 0]
    n, groups = int(sizes.sum()), len(ends) - 1
    largest = int(np.add.reduceat(np.append(sizes, 0), ends[:-1])[np.diff(ends) > 0].max(initial=0)) if groups else 0
    table = np.empty(max(16, 1 << (2 * largest).bit_length()), dtype=np.int32)
    unique, positions = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int32)
    counts = np.zeros(groups, dtype=np.int64)
    used = _distinct(ids, ranges, ends, table, unique, counts, positions)
    return unique[:used], counts, positions


@kernel
def _owners(
    unique: np.ndarray,
    counts: np.ndarray,
    hashed: np.ndarray,
    ranks: np.ndarray,
    owners: np.ndarray,
    owned: np.ndarray,
) -> None:
    """owners[k] and owned[rank, g] += 1; ``hashed[g]``: -1 by bucket, else the rank."""
    buckets, k = np.uint64(ranks.shape[0]), 0
    for g in range(counts.shape[0]):
        for _ in range(counts[g]):
            rank = ranks[bucket(unique[k], buckets)] if hashed[g] < 0 else hashed[g]
            owners[k] = rank
            owned[rank, g] += 1
            k += 1


@kernel
def _place(
    unique: np.ndarray,
    counts: np.ndarray,
    owners: np.ndarray,
    wire_at: np.ndarray,
    slot_at: np.ndarray,
    wire: np.ndarray,
    slots: np.ndarray,
) -> None:
    """Ids to their places on the wire, and the slots their rows will have; both [rank, g] are advanced."""
    k = 0
    for g in range(counts.shape[0]):
        for _ in range(counts[g]):
            rank = owners[k]
            wire[wire_at[rank, g]] = unique[k]
            wire_at[rank, g] += 1
            slots[k] = slot_at[rank, g]
            slot_at[rank, g] += 1
            k += 1


@kernel
def spread(
    ranges: np.ndarray, ends: np.ndarray, counts: np.ndarray, positions: np.ndarray, slots: np.ndarray, out: np.ndarray
) -> None:
    """out[at] = the slot of the distinct id at each ``at`` of the ranges."""
    base, i = 0, 0
    for g in range(counts.shape[0]):
        for r in range(ends[g], ends[g + 1]):
            for at in range(ranges[r, 0], ranges[r, 1]):
                out[at] = slots[base + positions[i]]
                i += 1
        base += counts[g]


@kernel
def _pack(ids: np.ndarray, counts: np.ndarray, widths: np.ndarray, narrow: np.ndarray, wide: np.ndarray) -> None:
    """Ids block after block as 4 or 8 bytes; ``narrow`` and ``wide`` are the same memory in units of 4 and 1 bytes."""
    k, at = 0, 0
    for b in range(counts.shape[0]):
        for _ in range(counts[b]):
            narrow[at] = np.uint32(ids[k] & 0xFFFFFFFF)
            at += 1
            if widths[b] == 8:
                narrow[at] = np.uint32((ids[k] >> 32) & 0xFFFFFFFF)
                at += 1
            k += 1


@kernel
def _unpack(narrow: np.ndarray, counts: np.ndarray, widths: np.ndarray, ids: np.ndarray) -> None:
    k, at = 0, 0
    for b in range(counts.shape[0]):
        for _ in range(counts[b]):
            value = np.int64(narrow[at])
            at += 1
            if widths[b] == 8:
                value |= np.int64(narrow[at]) << 32
                at += 1
            ids[k] = value
            k += 1


def pack_ids(ids: np.ndarray, counts: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """uint8: ids of blocks ``counts`` [W, P], those of piece p in ``widths[p]`` bytes (4 or 8).

    >>> packed = pack_ids(np.array([1, 2**32 - 1, -1]), np.array([[2, 1]]), np.array([4, 8]))
    >>> packed.nbytes, unpack_ids(packed, np.array([[2, 1]]), np.array([4, 8])).tolist()
    (16, [1, 4294967295, -1])
    """
    every = np.broadcast_to(widths, counts.shape).ravel()
    blocks = np.ascontiguousarray(counts).ravel()
    narrow = np.empty(int((blocks * every).sum()) // 4, dtype=np.uint32)
    _pack(ids, blocks, every, narrow, narrow.view(np.uint8))
    return narrow.view(np.uint8)


def unpack_ids(packed: np.ndarray, counts: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """int64: what ``pack_ids`` was given."""
    blocks = np.ascontiguousarray(counts).ravel()
    ids = np.empty(int(blocks.sum()), dtype=np.int64)
    _unpack(packed.view(np.uint32), blocks, np.broadcast_to(widths, counts.shape).ravel(), ids)
    return ids


def starts_of(counts: np.ndarray) -> np.ndarray:
    """Where each block begins, blocks one after the other in the matrix's order."""
    flat = counts.ravel()
    return (np.cumsum(flat) - flat).reshape(counts.shape)


class WireOrder:
    """The order of pieces on the wire, the same on every rank.

    Attributes:
        pieces: in wire order.
        order: number of each of them among the local tables.
        classes: (dimension, slice of the wire order) of each dimension.
        widths: int64 [P], bytes of an id.
        dims: int64 [P].
        everywhere: bool [P], whether every rank holds the piece.
    """

    def __init__(self, pieces: Sequence[Piece], limits: Sequence[int | None], world: int, rank: int) -> None:
        self.world, self.rank = world, rank
        self.order = sorted(range(len(pieces)), key=lambda p: (pieces[p].dim, pieces[p].route == ALL, p))
        self.pieces = [pieces[p] for p in self.order]
        fits = [limits[piece.table] is not None and limits[piece.table] <= 2**32 for piece in self.pieces]  # type: ignore[operator]
        self.widths = np.array([4 if fit else 8 for fit in fits], dtype=np.int64)
        self.dims = np.array([piece.dim for piece in self.pieces], dtype=np.int64)
        self.everywhere = np.array([piece.route == ALL for piece in self.pieces], dtype=np.bool_)
        self.classes: list[tuple[int, slice]] = []
        for dim in sorted({piece.dim for piece in self.pieces}):
            mine = np.flatnonzero(self.dims == dim)
            self.classes.append((dim, slice(int(mine[0]), int(mine[-1]) + 1)))
        of_table: dict[int, list[int]] = {}
        for j, piece in enumerate(self.pieces):
            of_table.setdefault(piece.table, []).append(j)
        self.of_table = of_table

    def __len__(self) -> int:
        return len(self.pieces)

    def rows_out(self, received: np.ndarray) -> np.ndarray:
        """Rows to send to each rank that has asked for ``received`` ids: of its own copies a rank asks nobody."""
        rows = received.copy()
        others = np.arange(self.world) != self.rank
        rows[np.ix_(others, self.everywhere)] = 0
        return rows

    rows_in = rows_out  # the same of ids sent


@dataclass
class Routed:
    """The distinct ids of a request.

    Attributes:
        sent: int64 [W, P], ids for each rank.
        ids: int64, in wire order.
        rows: int64 [W, P], rows that will come back from each rank.
        begin: int64 [W, P], where those begin among the rows of their dimension.
        slots: for each id of the request, where its row is: among the rows of the dimension for pieces routed by
            bucket, else among those of the piece.
    """

    sent: np.ndarray
    ids: np.ndarray
    rows: np.ndarray
    begin: np.ndarray
    slots: np.ndarray


def begins_of(wire: WireOrder, rows: np.ndarray) -> np.ndarray:
    """Where the rows of each (rank, piece) begin among those of their dimension."""
    begin = np.empty_like(rows)
    for _, columns in wire.classes:
        begin[:, columns] = starts_of(np.ascontiguousarray(rows[:, columns]))
    return begin


def route(
    wire: WireOrder, ranks: np.ndarray, tables: Sequence[int], ids: np.ndarray, ranges: np.ndarray, ends: np.ndarray,
    training: bool,
) -> Routed:  # fmt: skip
    """Distinct ids of ``tables`` (the groups of the ranges) to the ranks that hold them: ``ranks`` int32 by bucket.

    Ids of replicated tables go to every rank in training, whose replicas will need them, and nowhere else otherwise.
    """
    world, groups = wire.world, len(tables)
    unique, counts, positions = distinct(ids, ranges, ends)
    first = [wire.of_table[t][0] for t in tables]
    where = np.array([_rank_of(wire, wire.pieces[j]) for j in first], dtype=np.int64)
    owners, owned = np.empty(len(unique), dtype=np.int32), np.zeros((world, groups), dtype=np.int64)
    _owners(unique, counts, where, ranks, owners, owned)
    sent = np.zeros((world, len(wire)), dtype=np.int64)
    sent[:, first] = owned
    copies = _copies(wire, tables, training)
    for g, j, rank in copies:
        sent[rank, j] = counts[g]
    rows = wire.rows_in(sent)
    wire_at, begin = starts_of(sent), begins_of(wire, rows)
    hashed = where < 0
    slot_at = np.where(hashed[None, :], begin[:, first], 0)
    out_ids, slots = np.empty(int(sent.sum()), dtype=np.int64), np.empty(len(unique), dtype=np.int32)
    _place(unique, counts, owners, wire_at[:, first], slot_at, out_ids, slots)
    at = np.cumsum(counts) - counts
    for g, j, rank in copies:
        out_ids[wire_at[rank, j] : wire_at[rank, j] + counts[g]] = unique[at[g] : at[g] + counts[g]]
    spread_slots = np.zeros(len(ids), dtype=np.int32)
    spread(ranges, ends, counts, positions, slots, spread_slots)
    return Routed(sent, out_ids, rows, begin, spread_slots)


def _rank_of(wire: WireOrder, piece: Piece) -> int:
    """-1 by bucket, else the rank that answers."""
    return -1 if piece.route == HASH else wire.rank if piece.route == ALL else piece.rank


def _copies(wire: WireOrder, tables: Sequence[int], training: bool) -> list[tuple[int, int, int]]:
    """(group, piece, rank) of the further places that a table's ids go to, all of them."""
    found = []
    for g, t in enumerate(tables):
        for k, j in enumerate(wire.of_table[t]):
            piece = wire.pieces[j]
            if piece.route == ALL:
                found += [(g, j, rank) for rank in range(wire.world) if rank != wire.rank and training]
            elif k:
                found.append((g, j, piece.rank))
    return found


def union(
    lists: Sequence[tuple[np.ndarray, np.ndarray]], active: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of (ids in wire order, their counts [W, P]) each: the distinct ids of every rank and piece in wire order, in the
    order in which they first occur; their counts; and for each id given its place among those of its rank and piece.
    Ids of pieces that are not ``active`` [P] count as absent."""
    world = lists[0][1].shape[0]
    sizes = np.stack([counts.ravel() for _, counts in lists], axis=1)  # by block and list
    firsts = np.stack([starts_of(counts).ravel() for _, counts in lists], axis=1)
    firsts += np.cumsum([0] + [len(ids) for ids, _ in lists[:-1]])
    sizes = np.where(np.tile(active, world)[:, None], sizes, 0)
    ranges = np.stack([firsts.ravel(), (firsts + sizes).ravel()], axis=1)
    ends = np.arange(len(sizes) + 1) * len(lists)
    every = np.concatenate([ids for ids, _ in lists])
    unique, counts, positions = distinct(every, ranges, ends)
    places = np.zeros(len(every), dtype=np.int32)
    within = np.arange(len(unique)) - np.repeat(np.cumsum(counts) - counts, counts)
    spread(ranges, ends, counts, positions, within.astype(np.int32), places)
    return unique, counts.reshape(world, -1), places


def moved_slots(
    wire: WireOrder,
    rows: np.ndarray,
    old_begin: np.ndarray,
    new_begin: np.ndarray,
    places: np.ndarray,
    spans: Mapping[int, Sequence[tuple[int, int]]],
    slots: np.ndarray,
) -> np.ndarray:
    """``slots`` of a request whose ``rows`` [W, P] have ``places`` among those of their rank and piece in a union; the
    blocks of the request begin at ``old_begin``, those of the union at ``new_begin``."""
    counts = rows.ravel()
    within = np.arange(len(places)) - np.repeat(starts_of(rows).ravel(), counts)
    piece = np.repeat(np.tile(np.arange(len(wire)), wire.world), counts)
    hashed = np.array([p.route == HASH for p in wire.pieces], dtype=np.bool_)[piece]
    old = np.where(hashed, within + np.repeat(old_begin.ravel(), counts), within)
    new = np.where(hashed, places + np.repeat(new_begin.ravel(), counts), places)
    out = slots.copy()
    for t, stretches in spans.items():
        mine = np.flatnonzero(piece == wire.of_table[t][0])
        to = np.zeros(int(old[mine].max(initial=-1)) + 1, dtype=np.int32)
        to[old[mine]] = new[mine]
        for first, last in stretches:
            out[first:last] = to[slots[first:last]]
    return out
