"""Tables that are split by column: every rank that holds some columns of a table updates all rows of a step, and what
rules need of whole rows is exchanged between them.

Ids reach every holder in the same order and gradients come in blocks of columns, which plans of pieces see to. Here is
what is left: sums over whole rows before a rule is applied (``embcache.rowparts``), and rows that lookups shorten to
``max_norm``, which only a requester has whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import options
from ..config import TableConfig
from .plan import Piece

__all__ = ["ColumnSums", "Shortening", "split_tables"]


def split_tables(pieces: Sequence[Piece]) -> dict[int, list[int]]:
    """Of each table that is split by column its pieces, in column order."""
    found: dict[int, list[int]] = {}
    for p, piece in enumerate(pieces):
        found.setdefault(piece.table, []).append(p)
    return {t: sorted(mine, key=lambda p: pieces[p].columns[0]) for t, mine in found.items() if len(mine) > 1}


class ColumnSums:
    """What ``RowParts.exchange`` is with ranks: collective, on lane ``grads``; of each row every holder of some columns
    sends what these add to the holders of the others, 4 bytes a number. Sizes are known: all holders of a table update
    the same rows."""

    def __init__(self, pieces: Sequence[Piece], lanes: Any) -> None:
        self._pieces, self._lane, self._rank, self._world = list(pieces), lanes.grads, lanes.rank, lanes.world
        self._of = split_tables(pieces)
        self._holders = {t: {pieces[p].rank for p in mine} for t, mine in self._of.items()}

    def __call__(self, what: str, mine: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """[parts, n, k] of each piece's table, from [n, k] of each piece; n is 0 where this rank holds none of it."""
        held = self._own(mine)
        send = [self._message(rank, held) for rank in range(self._world)]
        coming = [self._expected(rank, mine, held) for rank in range(self._world)]
        sizes = [4 * sum(rows * mine[p].shape[1] for p, rows in blocks) for blocks in coming]
        answer = self._lane.all_to_all(send, sizes).view(torch.float32)
        at, parts = 0, dict(held)
        for blocks in coming:
            for p, rows in blocks:
                size = rows * mine[p].shape[1]
                parts[p] = answer[at : at + size].view(rows, mine[p].shape[1])
                at += size
        return {p: self._stacked(p, mine, held, parts) for p in mine}

    def _own(self, mine: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return {p: sums.contiguous() for p, sums in mine.items() if self._pieces[p].rank == self._rank}

    def _message(self, rank: int, held: Mapping[int, Tensor]) -> Tensor:
        """For another rank: of the tables that both hold columns of, this one's pieces in order."""
        wanted = [] if rank == self._rank else [p for p in sorted(held) if rank in self._holders[self._pieces[p].table]]
        return torch.cat([torch.empty(0), *(held[p].reshape(-1) for p in wanted)])

    def _expected(self, rank: int, mine: Mapping[int, Tensor], held: Mapping[int, Tensor]) -> list[tuple[int, int]]:
        """(piece, rows) of what another rank sends, in order."""
        rows = {self._pieces[p].table: sums.shape[0] for p, sums in held.items()}
        return [
            (p, rows[self._pieces[p].table])
            for p in sorted(mine)
            if rank != self._rank and self._pieces[p].rank == rank and self._pieces[p].table in rows
        ]

    def _stacked(
        self, p: int, mine: Mapping[int, Tensor], held: Mapping[int, Tensor], parts: Mapping[int, Tensor]
    ) -> Tensor:
        every = self._of[self._pieces[p].table]
        if p not in held:
            return torch.zeros(len(every), *mine[p].shape)
        return torch.stack([parts[q] for q in every])


class Shortening:
    """Rows longer than their table's ``max_norm``, of tables that are split by column, as a lookup gets them."""

    def __init__(self, pieces: Sequence[Piece], tables: Sequence[TableConfig]) -> None:
        self._pieces = list(pieces)
        self._of = {t: mine for t, mine in split_tables(pieces).items() if tables[mine[0]].max_norm is not None}
        self._tables = list(tables)

    def __call__(self, slabs: Sequence[Tensor], counts: Mapping[int, int]) -> None:
        """Shorten rows in place: ``slabs`` by piece, of which ``counts`` rows by piece were received."""
        for mine in self._of.values():
            n, table = counts[mine[0]], self._tables[mine[0]]
            if not n:
                continue
            blocks = [slabs[p][:n].view(torch.float32) for p in mine]
            assert table.max_norm is not None
            whole = options.renormalised(torch.cat(blocks, 1), table.max_norm, table.norm_type)
            for block, short in zip(blocks, whole.split([block.shape[1] for block in blocks], 1), strict=True):
                block.copy_(short)

    def __bool__(self) -> bool:
        return bool(self._of)


def rows_received(order: Sequence[int], rows: np.ndarray) -> dict[int, int]:
    """Rows by piece, of a matrix [W, P] in wire order."""
    return {p: int(n) for p, n in zip(order, rows.sum(0), strict=True)}
