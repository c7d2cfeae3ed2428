"""Rows of one table from ranks that hold them in one layout to ranks that hold them in another, in blocks.

Every rank reads *streams*: rows of a piece by ascending id. In a round all ranks agree on a bound, the least id up to
which every stream has been read; rows up to there go to whoever holds them in the new layout, which joins columns that
come from several ranks. So memory is bounded by some blocks, and what a rank receives ascends too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..config import TableConfig
from ..errors import CorruptStore
from ..kernels.buckets import bucket_of
from .layout import Columns, Piece, cut, join, narrowed, payload_bytes
from .peers import Peers

__all__ = ["ID_BYTES", "Block", "Moved", "Stream", "move"]

Block = tuple[Tensor, Tensor]  # ids int64 [n], rows uint8 [n, row_bytes of the piece's form]
ID_BYTES = 8
_END = 2**64 - 1
_HEAD = struct.Struct("<??Q")  # failed, something is left, bound


@dataclass
class Moved:
    """What a move took: ``rows`` and ``bytes`` that came to ranks which did not hold them; ``wire``: bytes of these
    that travelled, because no rank read them that also got them."""

    rows: int = 0
    bytes: int = 0
    wire: int = 0

    def __iadd__(self, other: Moved) -> Moved:
        self.rows, self.bytes, self.wire = self.rows + other.rows, self.bytes + other.bytes, self.wire + other.wire
        return self


class Stream:
    """Rows of one piece as one rank of the old layout held them.

    Args:
        source: that rank.
        piece: index of the piece.
        blocks: its rows, ids ascending as unsigned numbers.
        resident: whether they lie in this rank's own store, where what it holds in the new layout too may stay.
    """

    def __init__(self, source: int, piece: int, blocks: Iterable[Block], resident: bool = False) -> None:
        self.source, self.piece, self.resident = source, piece, resident
        self._blocks = iter(blocks)
        self._ids, self._rows = np.zeros(0, np.uint64), torch.zeros(0, 0, dtype=torch.uint8)
        self.ended = False

    def fill(self) -> None:
        """Read on where nothing is left."""
        while not self.ended and not len(self._ids):
            block = next(self._blocks, None)
            if block is None:
                self.ended = True
            else:
                self._ids, self._rows = block[0].numpy().view(np.uint64), block[1]

    @property
    def bound(self) -> int:
        """Up to which id everything there is has been read."""
        return _END if self.ended else int(self._ids[-1])

    def take(self, bound: int) -> Block:
        """What was read up to there."""
        n = int(np.searchsorted(self._ids, np.uint64(bound), side="right"))
        taken = torch.from_numpy(self._ids[:n].view(np.int64)), self._rows[:n]
        self._ids, self._rows = self._ids[n:], self._rows[n:]
        return taken


@dataclass
class _Route:
    """From a piece of the old layout to one of the new: the columns they share."""

    old: int
    new: int
    columns: Columns
    form: TableConfig
    width: int = field(init=False)

    def __post_init__(self) -> None:
        self.width = payload_bytes(self.form)


class _Move:
    def __init__(
        self,
        peers: Peers,
        table: TableConfig,
        old: Sequence[Piece],
        new: Sequence[Piece],
        staying: Sequence[bool],
        readers: Sequence[int],
    ) -> None:
        self.peers, self.table, self.old, self.new = peers, table, old, new
        self.staying, self.readers = staying, readers
        self.moved = Moved()
        self.routes: list[_Route] = []
        for i, a in enumerate(old):
            for j, b in enumerate(new):
                first, last = max(a.columns[0], b.columns[0]), min(a.columns[1], b.columns[1])
                if first < last:
                    self.routes.append(_Route(i, j, (first, last), narrowed(table, (first, last))))

    def message(
        self, streams: Sequence[Stream], bound: int, left: Callable[[Stream, Tensor], None]
    ) -> list[np.ndarray]:
        """What goes to each rank in a round: rows of each route, ids and rows of each."""
        parts: list[list[list[Block]]] = [[[] for _ in self.routes] for _ in range(self.peers.world)]
        for stream in streams:
            ids, rows = stream.take(bound)
            if not len(ids):
                continue
            mine = self._held(stream, ids)
            if stream.resident:
                left(stream, ids[~(self._kept(stream, ids) & torch.from_numpy(mine))])
            for r, route in enumerate(self.routes):
                if route.old == stream.piece:
                    for rank, chosen in self._wanted(stream, route, ids, mine):
                        part = cut(self.table, self.old[route.old].columns, rows[chosen], route.columns)
                        parts[rank][r].append((ids[chosen], part))
                        self._count(stream, route, rank, len(part))
        return [self._packed(mine) for mine in parts]

    def _held(self, stream: Stream, ids: Tensor) -> np.ndarray:
        """bool [n]: which ids are the source's; a rank may hold leftovers of others, which are none."""
        piece = self.old[stream.piece]
        if piece.replicated:
            return np.full(len(ids), stream.source in piece.ranks)
        return piece.owners(ids.numpy()) == stream.source

    def _kept(self, stream: Stream, ids: Tensor) -> Tensor:
        """bool [n]: which ids this rank holds afterwards as well, in the same columns."""
        piece, rank = self.old[stream.piece], self.peers.rank
        same = next((b for b in self.new if (b.name, b.columns) == (piece.name, piece.columns)), None)
        if same is None:
            return torch.zeros(len(ids), dtype=torch.bool)
        if same.replicated:
            return torch.full((len(ids),), rank in same.ranks)
        return torch.from_numpy(same.owners(ids.numpy()) == rank)

    def _wanted(self, stream: Stream, route: _Route, ids: Tensor, mine: np.ndarray) -> list[tuple[int, Tensor]]:
        """(rank, positions) of what this stream gives to each rank on a route."""
        old, new = self.old[route.old], self.new[route.new]
        owners = None if new.replicated else new.owners(ids.numpy())
        found = []
        for rank in new.ranks:
            chosen = mine if owners is None else mine & (owners == rank)
            if old.replicated:
                chosen = chosen & (self._replica(old, rank, ids) == stream.source)
            if self._stays(stream.source, rank, old, new):
                continue
            at = np.flatnonzero(chosen)
            if len(at):
                found.append((rank, torch.from_numpy(at)))
        return found

    def _replica(self, old: Piece, rank: int, ids: Tensor) -> np.ndarray:
        """Which of the ranks that hold a replica gives it to ``rank``: itself if it can, else one read there."""
        near = [source for source in old.ranks if source == rank] or [s for s in old.ranks if self.readers[s] == rank]
        if near:
            return np.full(len(ids), near[0])
        return np.asarray(old.ranks, np.int64)[bucket_of(ids.numpy(), len(old.ranks))]

    def _stays(self, source: int, rank: int, old: Piece, new: Piece) -> bool:
        same = (old.name, old.columns) == (new.name, new.columns)
        return same and source == rank and self.staying[rank]

    def _count(self, stream: Stream, route: _Route, rank: int, n: int) -> None:
        size = n * (ID_BYTES + route.width)
        if stream.source != rank:
            self.moved += Moved(n, size)
        if self.peers.rank != rank:
            self.moved.wire += size

    def _packed(self, parts: Sequence[Sequence[Block]]) -> np.ndarray:
        counts = np.array([sum(len(ids) for ids, _ in part) for part in parts], np.int64)
        out = [counts.view(np.uint8)]
        for route, part in zip(self.routes, parts, strict=True):
            out += [ids.numpy().view(np.uint8) for ids, _ in part]
            out += [rows[:, : route.width].contiguous().numpy().reshape(-1) for _, rows in part]
        return np.concatenate(out)

    def unpacked(self, received: Sequence[np.ndarray]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(piece of the new layout, ids ascending, rows) of what came in a round."""
        parts: dict[int, dict[Columns, list[Block]]] = {}
        for data in received:
            at = 8 * len(self.routes)
            for n, route in zip(data[:at].view(np.int64).tolist(), self.routes, strict=True):
                if not n:
                    continue
                ids = data[at : at + 8 * n].copy().view(np.int64)
                rows = torch.zeros(n, route.form.row_bytes, dtype=torch.uint8)
                at += 8 * n
                rows[:, : route.width] = torch.from_numpy(data[at : at + n * route.width].reshape(n, route.width))
                at += n * route.width
                parts.setdefault(route.new, {}).setdefault(route.columns, []).append((torch.from_numpy(ids), rows))
        for j, columns in sorted(parts.items()):
            yield j, *self._joined(j, columns)

    def _joined(self, j: int, columns: dict[Columns, list[Block]]) -> Block:
        sorted_parts = {at: _ascending(blocks) for at, blocks in columns.items()}
        ids = next(iter(sorted_parts.values()))[0]
        covered = sum(last - first for first, last in sorted_parts)
        first, last = self.new[j].columns
        if covered != last - first or any(not torch.equal(other, ids) for other, _ in sorted_parts.values()):
            raise CorruptStore(f"table {self.table.name!r}: column shards hold different rows")
        return ids, join(self.table, (first, last), {at: rows for at, (_, rows) in sorted_parts.items()})


def _ascending(blocks: Sequence[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    ids, rows = torch.cat([ids for ids, _ in blocks]), torch.cat([rows for _, rows in blocks])
    order = torch.from_numpy(np.argsort(ids.numpy().view(np.uint64), kind="stable"))
    return ids[order], rows[order]


def move(
    peers: Peers,
    table: TableConfig,
    old: Sequence[Piece],
    new: Sequence[Piece],
    streams: Sequence[Stream],
    sink: Callable[[int, Tensor, Tensor], None],
    *,
    readers: Sequence[int],
    staying: Sequence[bool],
) -> tuple[Moved, dict[int, list[Tensor]]]:
    """Give ``sink`` (piece of the new layout, ids, rows) of everything this rank holds there and has not where it is.

    Args:
        streams: what this rank reads; all ranks together every piece of every rank of the old layout.
        readers: which rank reads those of each rank of the old layout.
        staying: of each rank, whether what its ``resident`` streams have and it holds in both layouts stays there.

    Returns this rank's counts, and by piece of the old layout the ids in resident streams that it holds no longer.
    What goes wrong on one rank is raised by all.
    """
    moving, gone = _Move(peers, table, old, new, staying, readers), dict[int, list[Tensor]]()
    problem: Exception | None = None

    def left(stream: Stream, ids: Tensor) -> None:
        if len(ids):
            gone.setdefault(stream.piece, []).append(ids)

    while True:
        try:
            if problem is None:
                for stream in streams:
                    stream.fill()
        except Exception as error:  # told to all in this round
            problem = error
        bound = min((stream.bound for stream in streams), default=_END) if problem is None else _END
        more = problem is None and not all(stream.ended for stream in streams)
        said = [_HEAD.unpack(data) for data in peers.gather(_HEAD.pack(problem is not None, more, bound))]
        if any(failed for failed, _, _ in said) or not any(more for _, more, _ in said):
            break
        try:
            out = moving.message(streams, min(bound for _, _, bound in said), left)
        except Exception as error:
            problem, out = error, [np.zeros(8 * len(moving.routes), np.uint8)] * peers.world
        received = peers.exchange(out)
        try:
            if problem is None:
                for j, ids, rows in moving.unpacked(received):
                    sink(j, ids, rows)
        except Exception as error:
            problem = error
    peers.agree(problem)
    return moving.moved, gone
