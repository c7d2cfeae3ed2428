"""How a batch's features map to tables and to columns of the output, in the form the kernels read; worked out once for
each combination of features and batch sizes.

A *part* is one kernel call: all pooled features of a batch, or all unpooled ones.

* pooled, one batch size B: output [B, sum of D], feature f's columns after those of the features before it;
* pooled, several batch sizes, or unpooled: one-dimensional output, feature after feature, each a [rows, D] block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import POOLING, TableConfig
from .errors import UnknownFeature
from .jagged import KeyedJaggedTensor

TABLE, POOL, FIRST, BAGS, TENSOR, OFFSET, STRIDE = range(7)
SUM, NONE = POOLING["sum"], POOLING["none"]


@dataclass(frozen=True)
class PartLayout:
    """Features of one kernel call.

    Attributes:
        names: of the features, in output order.
        tables, dims: of the features, in output order.
        order: position in ``names`` of each row of ``features`` (rows ascend in the batch's bag order).
        columns: position in the batch's keys, in output order.
        features: int64 [F, 7] in units of the batch's bags; for unpooled parts only good for checking ids.
        pooled: whether bags are pooled.
        shape: of the output, for pooled parts.
    """

    names: tuple[str, ...]
    tables: tuple[int, ...]
    dims: tuple[int, ...]
    order: tuple[int, ...]
    columns: tuple[int, ...]
    features: Tensor
    pooled: bool
    shape: tuple[int, ...]

    def unpooled(self, id_offsets: Sequence[int]) -> tuple[Tensor, list[int]]:
        """(features of a call without offsets, elements of each feature's block in output order)."""
        counts = [id_offsets[i + 1] - id_offsets[i] for i in self.columns]
        sizes = [n * d for n, d in zip(counts, self.dims, strict=True)]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size)
        rows = [
            (self.tables[k], NONE, id_offsets[self.columns[k]], counts[k], 0, starts[k], self.dims[k])
            for k in self.order
        ]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 7), sizes


class LayoutCache:
    """Layouts by (features wanted, keys of the batch, batch sizes)."""

    def __init__(self, tables: Sequence[TableConfig], limit: int = 256) -> None:
        self._tables = list(tables)
        self._owner = {name: t for t, table in enumerate(tables) for name in table.feature_names}
        self._limit = limit
        self._cache: dict[tuple[object, ...], tuple[PartLayout, ...]] = {}
        self.all_features = tuple(self._owner)

    def get(self, wanted: tuple[str, ...], batch: KeyedJaggedTensor) -> tuple[PartLayout, ...]:
        """The parts of a lookup of the features ``wanted``."""
        key = (wanted, tuple(batch.keys()), batch.strides)
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= self._limit:
                self._cache.clear()
            found = self._cache[key] = self._build(wanted, batch)
        return found

    def _build(self, wanted: tuple[str, ...], batch: KeyedJaggedTensor) -> tuple[PartLayout, ...]:
        at = batch.index_per_key()
        for name in wanted:
            if name not in self._owner:
                raise UnknownFeature(f"feature {name!r} belongs to no table; tables have {list(self._owner)}")
            if name not in at:
                table = self._tables[self._owner[name]].name
                raise UnknownFeature(f"table {table!r}: feature {name!r} is not in the batch, which has {batch.keys()}")
        pooled = [name for name in wanted if self._table(name).pooling != "none"]
        unpooled = [name for name in wanted if self._table(name).pooling == "none"]
        groups = [(pooled, True)] * bool(pooled) + [(unpooled, False)] * bool(unpooled)
        return tuple(self._part(names, is_pooled, at, batch) for names, is_pooled in groups)

    def _table(self, feature: str) -> TableConfig:
        return self._tables[self._owner[feature]]

    def _part(self, names: Sequence[str], pooled: bool, at: dict[str, int], batch: KeyedJaggedTensor) -> PartLayout:
        strides, first = batch.strides, batch.lengths_offset_per_key()
        columns = tuple(at[name] for name in names)
        dims = tuple(self._table(name).embedding_dim for name in names)
        bags = [strides[i] for i in columns]
        uniform = len(set(bags)) <= 1
        rows, offset = [], 0
        for name, i, dim in zip(names, columns, dims, strict=True):
            table = self._owner[name]
            stride = sum(dims) if uniform else dim
            pooling = POOLING[self._table(name).pooling] if pooled else SUM  # unpooled: for checks over bags only
            rows.append((table, pooling, first[i], strides[i], 0, offset, stride))
            offset += dim if uniform else dim * strides[i]
        order = tuple(sorted(range(len(names)), key=lambda k: columns[k]))
        return PartLayout(
            names=tuple(names),
            tables=tuple(self._owner[name] for name in names),
            dims=dims,
            order=order,
            columns=columns,
            features=torch.tensor([rows[k] for k in order], dtype=torch.int64).view(-1, 7),
            pooled=pooled,
            shape=(bags[0], sum(dims)) if uniform else (offset,),
        )
