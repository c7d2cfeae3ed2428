"""A row as bytes and as its parts: weights, optimizer state, and for tables that expire rows, when it was last updated
and how often."""

from __future__ import annotations

from collections.abc import Sequence

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


def cut(table: TableConfig, part: TableConfig, rows: Tensor) -> Tensor:
    """Whole rows of ``part``, which is ``table.part(first, last)``, from those of ``table``.

    >>> table = TableConfig("t", num_embeddings=4, embedding_dim=5)
    >>> rows = join(table, torch.arange(10.0).view(2, 5))
    >>> pieces = [(p, cut(table, p, rows)) for p in (table.part(0, 2), table.part(2, 5))]
    >>> weights(*pieces[1]).tolist(), torch.equal(glue(table, pieces), rows)
    ([[2.0, 3.0, 4.0], [7.0, 8.0, 9.0]], True)
    """
    first, width = part.first_column - table.first_column, part.embedding_dim
    state, meta = states(table, rows), metas(table, rows) if table.meta_bytes else None
    wide = table.optimizer.wide_states
    blocks = [state[:, k * table.embedding_dim :][:, first : first + width] for k in range(wide)]
    blocks.append(state[:, wide * table.embedding_dim :])  # of the whole row: the same in every part
    return join(part, weights(table, rows)[:, first : first + width], torch.cat(blocks, 1), meta)


def glue(table: TableConfig, parts: Sequence[tuple[TableConfig, Tensor]]) -> Tensor:
    """Whole rows of ``table`` from those of all its parts (table of some columns, rows of the same ids), by their
    first column. What belongs to a whole row, as a row-wise accumulator does, is that of the first part."""
    split_states = [states(part, rows) for part, rows in parts]
    blocks = [
        state[:, k * part.embedding_dim : (k + 1) * part.embedding_dim]
        for k in range(table.optimizer.wide_states)
        for (part, _), state in zip(parts, split_states, strict=True)
    ]
    first, rows = parts[0]
    blocks.append(split_states[0][:, table.optimizer.wide_states * first.embedding_dim :])
    weight = torch.cat([weights(part, piece) for part, piece in parts], 1)
    return join(table, weight, torch.cat(blocks, 1), metas(first, rows) if table.meta_bytes else None)
