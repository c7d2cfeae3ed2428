"""All rows in memory, slot = id: no index, initial rows made when the store is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from .. import init
from ..config import TableConfig
from ..errors import BadConfig, NotSupported, TableTooLarge
from ..kernels.memory import available_bytes, huge_empty
from .base import Arena


class Ram:
    """Rows in main memory.

    ``Ram()`` holds every row of bounded tables at slot = id, on huge pages where the system has them, and notes in a
    bitmap which rows differ from their initial value. ``rows``, ``bytes`` and ``policy`` describe a bounded cache over
    a lower tier.

    >>> Ram(rows=1000)
    Traceback (most recent call last):
    ...
    embcache.errors.NotSupported: tiers.Ram(rows=...): a bounded cache needs a tier below it, which this version lacks
    """

    def __init__(self, rows: int | None = None, bytes: int | None = None, policy: str | None = None) -> None:
        for what, value in (("rows", rows), ("bytes", bytes), ("policy", policy)):
            if value is not None:
                raise NotSupported(
                    f"tiers.Ram({what}=...): a bounded cache needs a tier below it, which this version lacks"
                )
        self.arenas: list[Arena] = []

    def fresh(self) -> Ram:
        """An unopened tier of the same description."""
        return Ram()

    def open(self, tables: Sequence[TableConfig], kernels: ModuleType) -> None:
        """Allocate and initialise every row of ``tables``."""
        if self.arenas:
            raise BadConfig("this Ram() already serves another store; give each store its own")
        need = 0
        for table in tables:
            if table.num_embeddings is None:
                raise NotSupported(
                    f"table {table.name!r}: an unbounded table (num_embeddings=None) needs a hashed tier"
                )
            need += table.num_embeddings * table.row_bytes
        free = available_bytes()
        if free is not None and need > free:
            raise TableTooLarge(need, free, [table.name for table in tables])
        self.arenas = [self._arena(table, kernels) for table in tables]

    @staticmethod
    def _arena(table: TableConfig, kernels: ModuleType) -> Arena:
        rows = table.num_embeddings
        assert rows is not None
        slab = huge_empty(rows * table.row_bytes).view(rows, table.row_bytes)
        code, p0, p1 = table.init.code(rows, table.embedding_dim)
        kernels.init_rows(
            slab,
            None,
            None,
            0,
            table.embedding_dim,
            table.dtype_code,
            table.state_offset,
            code,
            p0,
            p1,
            init.table_key(table.seed, table.name),
            torch.tensor(table.optimizer.initial_state(table.embedding_dim), dtype=torch.float32),
            init.normal_table(),
        )
        return Arena(slab, torch.zeros((rows + 7) // 8, dtype=torch.uint8))

    def stage(self, features: Tensor, values: Tensor, offsets: Tensor | None, training: bool) -> Tensor:
        """Every row is resident: the lease is the ids themselves."""
        return values

    def slots(self, lease: Tensor) -> Tensor:
        return lease

    def relax(self, lease: Tensor) -> None:
        return

    def release(self, lease: Tensor) -> None:
        return

    def read(self, table: int, keys: Tensor, out: Tensor) -> Tensor:
        """Copy rows by id; all are there."""
        torch.index_select(self.arenas[table].slab, 0, keys, out=out)
        return torch.ones(keys.numel(), dtype=torch.bool)

    def write(self, table: int, keys: Tensor, rows: Tensor) -> None:
        """Replace rows by id."""
        arena = self.arenas[table]
        arena.slab[keys] = rows
        arena.written.bitwise_or_(_bits(keys, arena.written.numel()))

    def scan(self, table: int, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, rows) of all rows; the rows are views of the arena."""
        slab = self.arenas[table].slab
        for start in range(0, slab.shape[0], block):
            stop = min(start + block, slab.shape[0])
            yield torch.arange(start, stop), slab[start:stop]

    def close(self) -> None:
        self.arenas = []


def _bits(keys: Tensor, size: int) -> Tensor:
    flags = torch.zeros(size * 8, dtype=torch.uint8)
    flags[keys] = 1
    return (flags.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
