"""A row as bytes and as its parts: weights, optimizer state, and for tables that expire rows, when it was last updated
and how often."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import TableConfig
from .errors import SchemaMismatch


def _cast(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """A view of rows as numbers; no rows at all may come from numpy with strides that torch cannot view."""
    return (rows if rows.shape[0] else torch.empty(rows.shape, dtype=torch.uint8)).view(dtype)


def weights(table: TableConfig, rows: Tensor) -> Tensor:
    """View [n, D], in the table's dtype, of whole rows uint8 [n, row_bytes]."""
    return _cast(rows, table.dtype)[:, : table.embedding_dim]


def states(table: TableConfig, rows: Tensor) -> Tensor:
    """View fp32 [n, state_floats] of whole rows."""
    if not table.state_floats:
        return torch.empty(rows.shape[0], 0)
    first = table.state_offset // 4
    return _cast(rows, torch.float32)[:, first : first + table.state_floats]


def split(table: TableConfig, rows: Tensor) -> dict[str, Tensor]:
    """Copies of the parts by name: ``weight``, ``state``, and ``meta`` int32 [n, 2] where the table keeps it.

    >>> table = TableConfig("t", num_embeddings=4, embedding_dim=2)
    >>> parts = split(table, torch.zeros(3, table.row_bytes, dtype=torch.uint8))
    >>> {name: list(part.shape) for name, part in parts.items()}
    {'weight': [3, 2], 'state': [3, 0]}
    """
    parts = {"weight": weights(table, rows).contiguous().clone(), "state": states(table, rows).contiguous().clone()}
    if table.meta_bytes:
        parts["meta"] = metas(table, rows).contiguous().clone()
    return parts


def metas(table: TableConfig, rows: Tensor) -> Tensor:
    """View int32 [n, 2] of whole rows: step of the last update, number of updates."""
    first = table.meta_offset // 4
    return _cast(rows, torch.int32)[:, first : first + 2]


def join(table: TableConfig, weight: Tensor, state: Tensor | None = None, meta: Tensor | None = None) -> Tensor:
    """Whole rows uint8 [n, row_bytes] from their parts; ``state`` None: as it begins; ``meta`` None: never updated.

    Raises SchemaMismatch where shapes or the dtype of the weights do not fit the table.
    """
    n = weight.shape[0]
    for what, part, columns in (("weight", weight, table.embedding_dim), ("state", state, table.state_floats)):
        if part is not None and list(part.shape) != [n, columns]:
            raise SchemaMismatch(f"{what} of table {table.name!r}", list(part.shape), [n, columns])
    rows = torch.zeros(n, table.row_bytes, dtype=torch.uint8)
    weights(table, rows).copy_(weight)
    if table.state_floats:
        begin = torch.tensor(table.optimizer.initial_state(table.embedding_dim), dtype=torch.float32)
        states(table, rows).copy_(begin.expand(n, -1) if state is None else state)
    if table.meta_bytes and meta is not None:
        metas(table, rows).copy_(meta)
    return rows
