"""A front beside a plain dict of rows, both taken through the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embcache import kernels
from embcache.cache import Front, open_chain
from embcache.config import TableConfig
from embcache.errors import StorageFull
from embcache.kernels.initial import InitialRows
from embcache.tiers.rows import RowStore

Ids = Sequence[Sequence[int] | np.ndarray]


def batch(per_table: Ids) -> tuple[Tensor, Tensor, Tensor]:
    """(features, values, offsets): one feature of one bag a table."""
    sizes = [len(ids) for ids in per_table]
    values = np.concatenate([np.empty(0, dtype=np.int64), *(np.asarray(ids, dtype=np.int64) for ids in per_table)])
    features = torch.tensor([[t, 0, t, 1, 0, 0, 0] for t in range(len(sizes))], dtype=torch.int64).view(-1, 7)
    return features, torch.from_numpy(values), torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int64)


class Twin:
    """``front`` and, per table, ``model``: id → row bytes of every row that was written."""

    def __init__(self, tables: Sequence[TableConfig], tiers: Sequence[Any], backend: str = "auto") -> None:
        self.tables = list(tables)
        self.front: Front = open_chain(self.tables, tiers, kernels.get(backend))  # type: ignore[arg-type]
        self.model: list[dict[int, np.ndarray]] = [{} for _ in tables]
        self.initial = [InitialRows(table) for table in tables]
        self.steps = 0

    def expected(self, t: int, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """uint8 [n, row_bytes]."""
        keys = np.asarray(ids, dtype=np.int64)
        rows = np.zeros((len(keys), self.tables[t].row_bytes), dtype=np.uint8)
        self.initial[t].fill(rows, None, keys)
        for k, key in enumerate(keys.tolist()):
            if key in self.model[t]:
                rows[k] = self.model[t][key]
        return rows

    def stage(self, per_table: Ids, training: bool = True, overflow: bool = True) -> Any:
        return self.front.stage(*batch(per_table), training, overflow=overflow)

    def check(self, lease: Any, per_table: Ids) -> list[np.ndarray]:
        """The slots of a lease hold the rows of its ids; returns them by table."""
        slots, out, at = self.front.slots(lease), [], 0
        for t, ids in enumerate(per_table):
            mine = slots[at : at + len(ids)].to(torch.int64)
            at += len(ids)
            arena = self.front.arenas[t]
            if not self.front.direct(t):
                assert arena.slot_ids[mine].tolist() == np.asarray(ids, dtype=np.int64).tolist()
            assert np.array_equal(arena.slab[mine].numpy(), self.expected(t, ids))
            out.append(mine.numpy())
        return out

    def update(self, lease: Any, per_table: Ids, frozen: frozenset[int] = frozenset()) -> None:
        """Change the rows of a lease, there and in the model."""
        self.steps += 1
        slots = self.check(lease, per_table)
        for t, ids in enumerate(per_table):
            if t in frozen or not len(ids):
                continue
            keys, first = np.unique(np.asarray(ids, dtype=np.int64), return_index=True)
            rows = self.expected(t, keys)
            rows[:, :4] = rows[:, :4] * 31 + self.steps % 251 + (keys[:, None] & 7).astype(np.uint8)
            self.front.arenas[t].slab[torch.from_numpy(slots[t][first])] = torch.from_numpy(rows)
            arena = self.front.arenas[t]
            if arena.written.numel():  # the update kernel keeps these
                np.bitwise_or.at(arena.written.numpy(), keys >> 3, (1 << (keys & 7)).astype(np.uint8))
            self.model[t].update(zip(keys.tolist(), rows, strict=True))
        self.front.stepped([lease], frozen, [self.steps] * len(self.tables))

    def train(self, per_table: Ids) -> None:
        lease = self.stage(per_table)
        self.update(lease, per_table)
        self.front.release(lease)

    def evaluate(self, per_table: Ids) -> None:
        lease = self.stage(per_table, training=False)
        self.check(lease, per_table)
        self.front.release(lease)

    def check_all(self) -> None:
        """Every row by every way of asking."""
        for t, rows in enumerate(self.model):
            keys = np.array(sorted(k % 2**64 for k in rows), dtype=np.uint64).view(np.int64)
            for block in (3, 10**6):
                found = list(self.front.written(t, block))
                assert all(0 < len(ids) <= block for ids, _ in found)
                ids = np.concatenate([np.empty(0, dtype=np.int64), *(i.numpy() for i, _ in found)])
                assert np.array_equal(ids, keys)
                for i, block_rows in found:
                    assert np.array_equal(block_rows.numpy(), self.expected(t, i.numpy()))
            assert self.front.count_written(t) == len(keys)
            limit = self.tables[t].num_embeddings
            asked = np.arange(-5 if limit is None else 0, min(limit or 60, 60))[::-1].repeat(2)
            read = self.front.read_rows(t, torch.from_numpy(asked.copy()))
            assert np.array_equal(read.numpy(), self.expected(t, asked))

    def resident(self, t: int) -> dict[int, int]:
        """Id → slot."""
        table = self.front._hot[t]
        keys, slots = table.index.items()
        return dict(zip(keys.tolist(), slots.tolist(), strict=True))


class Failing(RowStore):
    """A last tier that can be told to fail: ``after[call]`` more calls succeed."""

    def __init__(self) -> None:
        super().__init__()
        self.after: dict[str, int] = {}

    def _count(self, call: str) -> None:
        if call in self.after:
            self.after[call] -= 1
            if self.after[call] < 0:
                raise StorageFull(4096, 0, "there") if call == "write" else OSError(f"{call} failed")

    def read(self, table: int, keys: np.ndarray, out: np.ndarray) -> np.ndarray:
        self._count("read")
        assert (np.diff(keys.view(np.uint64).astype(object)) > 0).all()
        return super().read(table, keys, out)

    def write(self, table: int, keys: np.ndarray, rows: np.ndarray) -> None:
        self._count("write")
        assert len(keys)
        assert rows.shape[0] == len(keys)
        assert rows.flags.c_contiguous
        assert (np.diff(keys.view(np.uint64).astype(object)) > 0).all()
        super().write(table, keys, rows)
