"""Whole rows of a store, out and in: what checkpoints are made of.

Only rows that differ from their initial value are given out, in ascending order of ids and bounded blocks; the others
are a function of the seed. Weights come in the table's dtype, optimizer state in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from embcache.init import normal_table, table_key
from embcache.store import EmbeddingStore

__all__ = ["load_rows", "reset_rows", "written_rows"]

BITMAP_BLOCK = 1 << 20


def written_rows(store: EmbeddingStore, t: int, block: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(ids int64 [n], weights [n, D], state fp32 [n, W]) of a table's written rows; copies, n <= ``block``."""
    weights, state = store.weight(store.names[t]), store.state(store.names[t])
    held: list[Tensor] = []
    count = 0
    for ids in _written_ids(store, t):
        held.append(ids)
        count += len(ids)
        while count >= block:
            joined = torch.cat(held)
            yield _rows(joined[:block], weights, state)
            held, count = [joined[block:]], len(joined) - block
    if count:
        yield _rows(torch.cat(held), weights, state)


def load_rows(store: EmbeddingStore, t: int, ids: Tensor, weight: Tensor, state: Tensor) -> None:
    """Replace rows by id and note them as written."""
    store.weight(store.names[t])[ids] = weight
    store.state(store.names[t])[ids] = state
    bits = store.front.arenas[t].written.numpy()
    at = ids.numpy()
    np.bitwise_or.at(bits, at >> 3, (1 << (at & 7)).astype(np.uint8))
    store.version += 1


def reset_rows(store: EmbeddingStore, t: int) -> None:
    """Every row of a table reads as its initial value again."""
    table, arena = store.tables[t], store.front.arenas[t]
    code, p0, p1 = table.init.code(table.num_embeddings or 0, table.embedding_dim)
    initial = torch.tensor(table.optimizer.initial_state(table.embedding_dim), dtype=torch.float32)
    key = table_key(table.seed, table.name)
    place = (table.embedding_dim, table.dtype_code, table.state_offset)
    for ids in _written_ids(store, t):
        store.kernels.init_rows(arena.slab, ids, ids, 0, *place, code, p0, p1, key, initial, normal_table())
    if table.padding_idx is not None:
        store.weight(table.name)[table.padding_idx] = 0
    arena.written.zero_()
    store.steps[t] = 0
    store.version += 1


def count_written(store: EmbeddingStore, t: int) -> int:
    """Rows of a table that differ from their initial value."""
    return int(np.bitwise_count(store.front.arenas[t].written.numpy()).sum())


def _written_ids(store: EmbeddingStore, t: int) -> Iterator[Tensor]:
    bits = store.front.arenas[t].written.numpy()
    rows = store.tables[t].num_embeddings or 0
    for start in range(0, len(bits), BITMAP_BLOCK):
        ids = np.flatnonzero(np.unpackbits(bits[start : start + BITMAP_BLOCK], bitorder="little")) + 8 * start
        if len(ids):
            yield torch.from_numpy(ids[ids < rows])


def _rows(ids: Tensor, weights: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return ids.contiguous(), weights[ids].contiguous(), state[ids].contiguous()
