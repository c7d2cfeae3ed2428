"""Rows by id, wherever they live: reading, replacing, deleting, walking. Every call is collective: all ranks make it,
each with its own ids (or none), in the same order as the others."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import records
from ..kernels.buckets import bucket_of
from ..store import EmbeddingStore
from .meeting import meet
from .plan import ALL, HASH, Piece

ROWS_AT_ONCE = 65536


class RemoteRows:
    """What a remote front offers besides batches. Whole rows are uint8 [n, row_bytes] as their table has them."""

    pieces: list[Piece]
    local: EmbeddingStore
    lanes: Any
    world: int
    rank: int
    _map: np.ndarray

    def of_table(self, t: int) -> list[int]:
        """The pieces of a table, in column order."""
        return [p for p, piece in enumerate(self.pieces) if piece.table == t]

    def cut(self, p: int, rows: Tensor) -> Tensor:
        """Piece ``p``'s part of whole rows of its table."""
        part = self.local.tables[p]
        return rows if part.columns is None else records.cut(part.whole(), part, rows)

    def paste(self, t: int, parts: Sequence[Tensor]) -> Tensor:
        """Whole rows of a table from those of its pieces."""
        if len(parts) == 1:
            return parts[0]
        tables = [self.local.tables[p] for p in self.of_table(t)]
        return records.glue(tables[0].whole(), list(zip(tables, parts, strict=True)))

    # exchanges ----------------------------------------------------------------------------------------------------

    def _order(self, p: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(order that groups ids by the rank that holds them, how many each has)."""
        piece = self.pieces[p]
        if piece.route == HASH:
            owners = self._map[bucket_of(ids, len(self._map))]
        else:
            owners = np.full(len(ids), self.rank if piece.route == ALL else piece.rank, dtype=np.int32)
        return np.argsort(owners, kind="stable"), np.bincount(owners, minlength=self.world).astype(np.int64)

    def _swap(
        self, what: str, p: int, counts: np.ndarray, send: np.ndarray, width: int, error: Exception | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(how many came from each rank, the bytes): ``counts`` items of ``width`` bytes for each."""
        found, answer = meet(
            self.lanes.rows,
            zlib.crc32(what.encode(), p),
            error,
            lambda heads: (torch.from_numpy(send.reshape(-1).view(np.uint8)), counts * width, heads[:, -1] * width),
            counts[:, None],
        )
        return found[:, 0], answer.numpy()

    def read_rows(self, t: int, ids: Tensor) -> Tensor:
        """Collective. uint8 [n, row_bytes]: rows as they are now."""
        return self.paste(t, [self._read_piece(p, ids.numpy()) for p in self.of_table(t)])

    def _read_piece(self, p: int, ids: np.ndarray) -> Tensor:
        order, counts = self._order(p, ids)
        asked, keys = self._swap("read ids", p, counts, ids[order], 8)
        error, rows = None, np.empty((0, self.local.tables[p].row_bytes), dtype=np.uint8)
        try:
            if len(keys):
                rows = self.local.front.read_rows(p, torch.from_numpy(keys.view(np.int64))).numpy()
        except Exception as problem:
            error = problem
        _, answer = self._swap("read rows", p, asked, np.ascontiguousarray(rows), rows.shape[1], error)
        out = np.empty((len(ids), rows.shape[1]), dtype=np.uint8)
        out[order] = answer.reshape(len(ids), -1)
        return torch.from_numpy(out)

    def load_rows(self, t: int, ids: Tensor, rows: Tensor) -> None:
        """Collective. Replace rows; where several ranks give one id, the last rank's counts."""
        for p in self.of_table(t):
            mine = self.cut(p, rows).contiguous().numpy()
            keys, came = self._to_holders("load", p, ids.numpy(), mine)
            self._agreed(p, lambda p=p, keys=keys, came=came: self._put(p, keys, came))

    def _put(self, p: int, keys: np.ndarray, rows: np.ndarray) -> None:
        if len(keys):
            self.local.put_raw_rows(p, torch.from_numpy(keys), torch.from_numpy(rows))

    def delete(self, t: int, ids: Tensor) -> None:
        """Collective. The ids of all ranks read as initial."""
        for p in self.of_table(t):
            nothing = np.empty((ids.numel(), 0), dtype=np.uint8)
            keys, _ = self._to_holders("delete", p, ids.numpy(), nothing)
            self._agreed(p, lambda p=p, keys=keys: self.local.front.delete(p, torch.from_numpy(keys).unique()))

    def _to_holders(self, what: str, p: int, ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids, rows) that all ranks have for this one, in rank order."""
        order, counts = self._order(p, ids)
        width = 8 + rows.shape[1]
        packed = np.concatenate([ids[order].view(np.uint8).reshape(-1, 8), rows[order]], axis=1)
        if self.pieces[p].route == ALL:
            counts = np.full(self.world, len(ids), dtype=np.int64)
            packed = np.tile(packed, (self.world, 1))
        _, answer = self._swap(what, p, counts, packed, width)
        came = answer.reshape(-1, width)
        return np.ascontiguousarray(came[:, :8]).view(np.int64).reshape(-1), np.ascontiguousarray(came[:, 8:])

    def _agreed(self, p: int, action: Any) -> None:
        error = None
        try:
            action()
        except Exception as problem:
            error = problem
        meet(self.lanes.rows, zlib.crc32(b"done", p), error)

    def reset(self, t: int) -> None:
        """Every row of a table reads as initial; each rank does its own."""
        for p in self.of_table(t):
            self.local.front.reset(p)

    # walking ------------------------------------------------------------------------------------------------------

    def count_written(self, t: int) -> int:
        """Collective. Rows that differ from their initial value."""
        p = self.of_table(t)[0]
        mine = np.full((self.world, 1), self.local.front.count_written(p), dtype=np.int64)
        found, _ = meet(self.lanes.rows, zlib.crc32(b"count", p), None, None, mine)
        return int(found[self.rank, 0] if self.pieces[p].route == ALL else found.sum())

    def written(self, t: int, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Collective, to its end. (ids, rows), copies, of every row that differs from its initial value, on all ranks,
        ids ascending as unsigned numbers."""
        walks = [self._written(p, block) for p in self.of_table(t)]
        for blocks in zip(*walks, strict=True):
            yield blocks[0][0], self.paste(t, [rows for _, rows in blocks])

    def _written(self, p: int, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        if self.pieces[p].route == ALL:
            yield from self.local.front.written(p, block)
            return
        share, width = max(1, block // self.world), 8 + self.local.tables[p].row_bytes
        walk, held, more = self.local.front.written(p, share), np.empty((0, width), dtype=np.uint8), True
        while True:
            while more and len(held) < share:
                found = next(walk, None)
                more = found is not None
                if found is not None:
                    keys = found[0].numpy().view(np.uint8).reshape(-1, 8)
                    held = np.concatenate([held, np.concatenate([keys, found[1].numpy()], axis=1)])
            part = held[:share]
            whole = not more and len(part) == len(held)
            counts = np.full((self.world, 2), len(part), dtype=np.int64)
            counts[:, 0] = whole
            heads, answer = meet(
                self.lanes.rows,
                zlib.crc32(b"written", p),
                None,
                lambda heads, part=part: (  # type: ignore[misc]
                    torch.from_numpy(np.tile(part, (self.world, 1)).reshape(-1)),
                    np.full(self.world, part.size),
                    heads[:, -1] * width,
                ),
                counts,
            )
            rows = answer.numpy().reshape(-1, width)
            came = _keys(rows)
            ends = np.cumsum(heads[:, 1])
            bounds = [came[end - 1] for end, done in zip(ends, heads[:, 0], strict=True) if not done]
            good = came <= min(bounds) if bounds else np.ones(len(came), dtype=np.bool_)
            order = np.argsort(came[good], kind="stable")
            if len(order):
                chosen = np.ascontiguousarray(rows[good][order])
                yield torch.from_numpy(came[good][order].view(np.int64)), torch.from_numpy(chosen[:, 8:].copy())
            if not bounds:
                return
            held = held[np.count_nonzero(_keys(part) <= min(bounds)) :]


def _keys(packed: np.ndarray) -> np.ndarray:
    """uint64 [n]: the ids in front of packed rows."""
    return np.ascontiguousarray(packed[:, :8]).view(np.uint64).reshape(-1)
