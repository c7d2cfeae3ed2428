"""Which rank holds which rows and columns of a table, apart from how that came about; rows cut into columns and joined.

A table is one ``Piece`` or several: a range of columns, and the ranks that hold it, each id on one of them or all ids
on all. So every placement is of one form, and what must move between two of them is a matter of comparing pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import records
from ..config import TableConfig
from ..errors import CorruptStore
from ..kernels.buckets import bucket_of
from .plan import ALL, HASH

__all__ = ["Columns", "Layout", "Piece", "cut", "join", "layout_of", "narrowed", "payload_bytes"]

Columns = tuple[int, int]  # from, to


@dataclass(frozen=True)
class Piece:
    """Some columns of a table.

    Attributes:
        name: of the table in the local stores of the ranks that hold it.
        columns: which.
        ranks: who holds them: one rank, or with ``buckets`` each id on one of these, or else every id on all of these.
        buckets: the rank of each hash bucket, or None.

    >>> spread = Piece("user", (0, 8), (0, 1), (0, 1, 0, 1))
    >>> spread.owners(np.array([0, 1, -1])).tolist(), spread.replicated
    ([1, 0, 1], False)
    """

    name: str
    columns: Columns
    ranks: tuple[int, ...]
    buckets: tuple[int, ...] | None = None

    @property
    def replicated(self) -> bool:
        """Whether several ranks hold every id."""
        return self.buckets is None and len(self.ranks) > 1

    def owners(self, ids: np.ndarray) -> np.ndarray:
        """int64 [n]: the rank that holds each id; of replicas one of them, ids spread evenly."""
        if self.buckets is not None:
            return np.asarray(self.buckets, np.int64)[bucket_of(ids, len(self.buckets))]
        if self.replicated:
            return np.asarray(self.ranks, np.int64)[bucket_of(ids, len(self.ranks))]
        return np.full(len(ids), self.ranks[0], np.int64)


Layout = Mapping[str, Sequence[Piece]]  # of each table, by name


def layout_of(plan: Any, tables: Sequence[TableConfig]) -> dict[str, list[Piece]]:
    """The pieces of a ``ShardingPlan``, by table."""
    everyone, spread = tuple(range(plan.world)), tuple(int(rank) for rank in plan.map)
    found: dict[str, list[Piece]] = {table.name: [] for table in tables}
    for piece in plan.pieces(tables):
        mine = found[tables[piece.table].name]
        if piece.route == HASH:
            mine.append(Piece(piece.name, piece.columns, everyone, spread))
        else:
            mine.append(Piece(piece.name, piece.columns, everyone if piece.route == ALL else (piece.rank,)))
    return found


def narrowed(table: TableConfig, columns: Columns) -> TableConfig:
    """The form of rows of ``table`` that have these columns only; what belongs to a whole row stays."""
    return table.part(*columns)


def payload_bytes(table: TableConfig) -> int:
    """Bytes of a row without those that only fill it up."""
    return table.meta_offset + table.meta_bytes


def cut(table: TableConfig, held: Columns, rows: Tensor, columns: Columns) -> Tensor:
    """Rows with columns ``held``, uint8 [n, row_bytes of that form], as rows with fewer ``columns``."""
    if held == columns:
        return rows
    return records.cut(narrowed(table, held), narrowed(table, columns), rows)


def join(table: TableConfig, columns: Columns, parts: Mapping[Columns, Tensor]) -> Tensor:
    """Rows with ``columns`` from parts that cover them, rows of the same ids in the same order; what belongs to a whole
    row comes from the first part. CorruptStore where that differs in the others."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    pieces = [(narrowed(table, at), parts[at]) for at in sorted(parts)]
    wholes = [[_bits(records.states(form, rows)[:, table.optimizer.wide_states * form.embedding_dim :]),
               _bits(records.metas(form, rows)) if table.meta_bytes else None] for form, rows in pieces]  # fmt: skip
    for kind in range(2):
        first, *others = (whole[kind] for whole in wholes)
        if first is not None and any(other is None or not torch.equal(other, first) for other in others):
            raise CorruptStore(f"table {table.name!r}: column shards disagree on what they hold of whole rows")
    return records.glue(narrowed(table, columns), pieces)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)
