"""Rows of a table as columns of Parquet files that any tool can read, and back.

======== ======================== =====================================================
column   type                     holds
======== ======================== =====================================================
id       int64                    the key
weight   list of D float32        float16 for fp16 tables; bf16 widened, which is exact
state    list of W float32        optimizer state, where the rule has any
last_step, count  int32           of tables that expire rows
======== ======================== =====================================================

Nothing is ever null. Files are not compressed (trained weights do not shrink), and a row group is small enough to be
read alone, so that a file of any size passes through bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import records
from .config import TableConfig
from .errors import CorruptStore, SchemaMismatch

__all__ = ["WRITER", "arrow", "batches", "from_arrow", "ids_of", "proved", "schema_of", "to_arrow"]

ID, WEIGHT, STATE, META = "id", "weight", "state", ("last_step", "count")
WRITER: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": [ID]}
_ABSENT = "Parquet files need pyarrow: pip install 'embcache[cpu]'"


def arrow() -> tuple[Any, Any]:
    """The modules ``pyarrow`` and ``pyarrow.parquet``; ImportError that says how to get them."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(_ABSENT) from None
    return pyarrow, pyarrow.parquet


def schema_of(table: TableConfig, *, state: bool = True) -> Any:
    """The ``pyarrow.Schema`` of a table's rows; ``state=False``: ids and weights only."""
    pa, _ = arrow()
    kind = pa.float16() if table.dtype == torch.float16 else pa.float32()
    columns = [(ID, pa.int64()), (WEIGHT, _list(kind, table.embedding_dim))]
    if state and table.state_floats:
        columns.append((STATE, _list(pa.float32(), table.state_floats)))
    if state and table.meta_bytes:
        columns += [(name, pa.int32()) for name in META]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


def to_arrow(table: TableConfig, ids: Tensor, rows: Tensor, *, state: bool = True) -> Any:
    """A ``pyarrow.Table`` of ids int64 [n] and whole rows uint8 [n, row_bytes]."""
    pa, _ = arrow()
    schema = schema_of(table, state=state)
    parts = records.split(table, rows)
    weight = parts[WEIGHT].float() if table.dtype == torch.bfloat16 else parts[WEIGHT]
    columns = {ID: ids.contiguous(), WEIGHT: weight, STATE: parts[STATE]}
    if META[0] in schema.names:
        columns.update({name: parts["meta"][:, k].contiguous() for k, name in enumerate(META)})
    arrays = [_array(columns[field.name], field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def from_arrow(table: TableConfig, columns: Any) -> tuple[Tensor, Tensor]:
    """(ids int64 [n], whole rows uint8 [n, row_bytes]) of a ``pyarrow.Table`` or ``RecordBatch`` with the columns of
    ``schema_of``; without ``state`` rows begin as new ones do. SchemaMismatch where types or widths are others."""
    state = STATE in columns.schema.names or META[0] in columns.schema.names
    wanted = schema_of(table, state=state)
    parts = {field.name: _tensor(table, columns, field) for field in wanted}
    saved = parts.get(STATE)
    meta = torch.stack([parts[name] for name in META], dim=1) if META[0] in parts else None
    weight = parts[WEIGHT].to(table.dtype)
    return parts[ID], records.join(table, weight, saved, meta)


def ids_of(table: TableConfig, columns: Any) -> Tensor:
    """int64 [n]: the ids alone."""
    return _tensor(table, columns, schema_of(table, state=False).field(ID))


def proved(table: TableConfig, path: str | Path) -> bool:
    """Whether a file's types alone show that every row in it is whole: lists of the right width, nothing null."""
    pa, pq = arrow()
    try:
        found = pq.read_schema(path)
    except pa.ArrowInvalid as error:
        raise CorruptStore(f"{path}: {error}") from error
    return {ID, WEIGHT} <= set(found.names) and all(
        found.field(field.name).type == field.type and not found.field(field.name).nullable
        for field in schema_of(table)
        if field.name in found.names
    )


def batches(path: str | Path, names: Sequence[str] | None = None, rows: int = 65536) -> Iterator[Any]:
    """A Parquet file, ``names`` only, one ``pyarrow.RecordBatch`` of at most ``rows`` at a time. CorruptStore where it
    is no Parquet file."""
    pa, pq = arrow()
    try:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(rows, columns=None if names is None else list(names))
    except pa.ArrowInvalid as error:
        raise CorruptStore(f"{path}: {error}") from error


def _list(kind: Any, width: int) -> Any:
    pa, _ = arrow()
    return pa.list_(pa.field("element", kind, nullable=False), width)


def _array(values: Tensor, kind: Any) -> Any:
    pa, _ = arrow()
    flat = pa.array(values.reshape(-1).numpy())
    return pa.FixedSizeListArray.from_arrays(flat, type=kind) if pa.types.is_fixed_size_list(kind) else flat


def _tensor(table: TableConfig, columns: Any, field: Any) -> Tensor:
    """A column as a tensor, [n] or [n, width]; SchemaMismatch where it is of another type or has nulls."""
    pa, _ = arrow()
    what = f"column {field.name!r} of table {table.name!r}"
    if field.name not in columns.schema.names:
        raise SchemaMismatch(what, f"columns {columns.schema.names}", str(field.type))
    column = columns.column(field.name)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not _fits(column.type, field.type):
        raise SchemaMismatch(what, str(column.type), str(field.type))
    values, width = column, 1
    if pa.types.is_fixed_size_list(field.type):
        values, width = column.flatten(), field.type.list_size
        if len(values) != width * len(column) or (column.value_lengths().to_numpy() != width).any():
            raise SchemaMismatch(what, "lists of other lengths, or nulls", str(field.type))
    if column.null_count or values.null_count:
        raise SchemaMismatch(what, "nulls", str(field.type))
    flat = torch.from_numpy(values.to_numpy(zero_copy_only=False).copy())
    return flat.view(-1, width) if values is not column else flat


def _fits(found: Any, wanted: Any) -> bool:
    """Whether values of a type can be read as the wanted one: floats of any width, any kind of list."""
    pa, _ = arrow()
    if not pa.types.is_fixed_size_list(wanted):
        return bool(found == wanted)
    kinds = (pa.types.is_fixed_size_list, pa.types.is_list, pa.types.is_large_list)
    return any(kind(found) for kind in kinds) and pa.types.is_floating(found.value_type)
