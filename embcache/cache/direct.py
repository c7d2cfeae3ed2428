"""A bounded table that lies whole in memory: slot = id, no index, initial rows made when it is opened."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from .. import init
from ..config import TableConfig
from ..kernels.memory import huge_empty

BITMAP_BLOCK = 1 << 20


class DirectTable:
    """Attributes: ``slab`` uint8 [rows, row_bytes]; ``written`` uint8 [ceil(rows / 8)], a bit per row that differs from
    its initial value, kept by the update kernel."""

    def __init__(self, table: TableConfig, kernels: ModuleType) -> None:
        self.table, self.rows = table, table.num_embeddings or 0
        self.slab: Tensor = huge_empty(self.rows * table.row_bytes).view(self.rows, table.row_bytes)
        self.written = torch.zeros((self.rows + 7) // 8, dtype=torch.uint8)
        self._bits = self.written.numpy()
        self._kernels = kernels
        self._fill(None)

    def _fill(self, ids: Tensor | None) -> None:
        """Rows become initial; ``ids`` None: all."""
        table = self.table
        if ids is not None:
            self.slab[ids] = 0  # the bytes between and behind weights and state too
        code, p0, p1 = table.init.code(table.num_embeddings, table.whole_dim)
        self._kernels.init_rows(
            self.slab,
            ids,
            ids,
            0,
            table.embedding_dim,
            table.dtype_code,
            table.state_offset,
            code,
            p0,
            p1,
            init.table_key(table.seed, table.random_name),
            torch.tensor(table.optimizer.initial_state(table.embedding_dim), dtype=torch.float32),
            init.normal_table(),
            table.first_column,
        )
        padding = table.padding_idx
        if padding is not None and (ids is None or bool((ids == padding).any())):
            self.slab.view(table.dtype)[padding, : table.embedding_dim] = 0

    def read_rows(self, ids: Tensor) -> Tensor:
        """Copies uint8 [n, row_bytes]."""
        return self.slab[ids]

    def load_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Replace rows and note them as written."""
        self.slab[ids] = rows
        at = ids.numpy()
        np.bitwise_or.at(self._bits, at >> 3, (1 << (at & 7)).astype(np.uint8))

    def delete(self, ids: Tensor) -> None:
        """Rows read as initial."""
        self._fill(ids)
        at = ids.numpy()
        np.bitwise_and.at(self._bits, at >> 3, (~(1 << (at & 7))).astype(np.uint8))

    def reset(self) -> None:
        """All rows read as initial."""
        for ids in self._written_ids():
            self._fill(ids)
        self.written.zero_()

    def written_rows(self, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, rows) of written rows, ids ascending."""
        held = torch.empty(0, dtype=torch.int64)
        for ids in self._written_ids():
            held = torch.cat([held, ids])
            while held.numel() >= block:
                yield held[:block].clone(), self.slab[held[:block]]
                held = held[block:]
        if held.numel():
            yield held, self.slab[held]

    def count_written(self) -> int:
        """Rows that differ from their initial value."""
        whole = self.rows // 8
        last = int(self._bits[whole]) & ((1 << self.rows % 8) - 1) if self.rows % 8 else 0
        return int(np.bitwise_count(self._bits[:whole]).sum()) + last.bit_count()

    def _written_ids(self) -> Iterator[Tensor]:
        for start in range(0, len(self._bits), BITMAP_BLOCK):
            ids = np.flatnonzero(np.unpackbits(self._bits[start : start + BITMAP_BLOCK], bitorder="little")) + 8 * start
            if len(ids):
                yield torch.from_numpy(ids[ids < self.rows])
