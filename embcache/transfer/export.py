"""Rows out: what a store has committed, whole or as the difference to an earlier export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import BadConfig, NotSupported
from ..kernels.buckets import BUCKETS
from ..store import EmbeddingStore
from ..tiers.base import DurableTier
from .manifest import Manifest, State
from .writer import MEMORY, ExportWriter

__all__ = ["export_store"]

BLOCK_BYTES = 16 << 20


def export_store(
    store: EmbeddingStore,
    folder: str | Path,
    *,
    since: str | Path | int | None = None,
    buckets: int = BUCKETS,
    memory: int = MEMORY,
) -> Manifest:
    """Write the rows of every table that differ from their initial values as Parquet files by hash bucket.

    Args:
        store: with everything trained committed, as after ``commit()`` or opened read-only; or a store in memory.
        folder: new or empty.
        since: None: everything. The folder of an earlier export of this store, or the number of a generation that it
            still keeps: only rows changed or deleted since, to be imported on top of that.
        buckets: files a table, 1 to 512.
        memory: bytes of rows held back; 8 bytes for each changed row of a table come on top where ``since`` is given.

    Returns the export's table of contents. The export exists once this returns; a crash leaves a folder that the next
    export to the same place clears. Raises BadConfig (rows are not committed, the folder is in use, changes since then
    are no longer known, ``since`` is of another store), NotSupported (delta of a store in memory), StorageFull. Nothing
    may be trained meanwhile on another thread.
    """
    state = _state_of(store)
    parent = None if since is None else _parent(store, since)
    extra = store.extra_state()
    if parent is None:
        with ExportWriter(folder, buckets=buckets, memory=memory) as out:
            for t, table in enumerate(store.tables):
                out.table(table, store.steps[t], store.raw_rows(t, _block(table.row_bytes)))
            return out.finish(state, None, extra)
    changes = [_changes(store, t, parent) for t in range(len(store.tables))]
    with ExportWriter(folder, buckets=buckets, memory=memory) as out:
        for change, table, step in zip(changes, store.tables, store.steps, strict=True):
            out.table(table, step, change.rows(), change.deleted())
        return out.finish(state, parent, extra)


class _Changes:
    """Rows of one table by key, and, after they were walked, the keys that have none (any more)."""

    def __init__(self, store: EmbeddingStore, tier: DurableTier, t: int, keys: np.ndarray) -> None:
        self._store, self._tier, self._t, self._keys = store, tier, t, keys
        self._table = store.tables[t]
        self._absent: list[np.ndarray] = []

    def rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        block = _block(self._table.row_bytes)
        for start in range(0, len(self._keys), block):
            keys = self._keys[start : start + block]
            out = np.zeros((len(keys), self._table.row_bytes), dtype=np.uint8)
            found = self._tier.read(self._t, keys, out)
            found &= ~self._store.front.over(self._t, out)
            self._absent.append(keys[~found])
            yield torch.from_numpy(keys[found]), torch.from_numpy(out[found])

    def deleted(self) -> Iterator[Tensor]:
        yield from (torch.from_numpy(keys) for keys in self._absent if len(keys))
        if self._table.expiry is not None:
            yield from self._expired()

    def _expired(self) -> Iterator[Tensor]:
        """Rows that have expired where they lie are no change that a tier sees: it is walked to the end."""
        for keys, rows in self._tier.scan(self._t, _block(self._table.row_bytes)):
            over = keys[self._store.front.over(self._t, rows)]
            over = over[~np.isin(over, self._keys, assume_unique=True)]
            if len(over):
                yield torch.from_numpy(over)


def _changes(store: EmbeddingStore, t: int, parent: State) -> _Changes:
    tier = store.durable
    if tier is None:
        raise NotSupported("a delta of a store in memory: only a store on disk has generations to start from")
    keys = tier.changed_since(t, parent.generation)
    if keys is None:
        raise BadConfig(f"changes since {parent} are no longer known: export in full")
    return _Changes(store, tier, t, keys)


def _state_of(store: EmbeddingStore) -> State:
    if store.pending_tables():
        raise BadConfig("gradients are waiting for step(): export after it")
    if store.durable is None:
        return State(store.lineage, 0, 0)
    store.checkpoints.wait()
    if store.unsaved or not store.generation:
        raise BadConfig("an export holds what is committed: call commit() first")
    return State(store.lineage, store.generation, store.checkpoints.find(store.generation).check)


def _parent(store: EmbeddingStore, since: str | Path | int) -> State:
    if store.durable is None:
        raise NotSupported("a delta of a store in memory: only a store on disk has generations to start from")
    if isinstance(since, int):
        return State(store.lineage, since, store.checkpoints.find(since).check)
    parent = Manifest.read(Path(since)).state
    listed = {g.number: g.check for g in store.checkpoints.generations}
    other = listed.get(parent.generation, parent.check) != parent.check  # a copy of this store, trained differently
    if parent.lineage != store.lineage or parent.generation > store.generation or other:
        here = f"generation {store.generation} of {store.lineage}"
        raise BadConfig(f"{since} holds {parent}, which {here} does not continue: name an export of this store")
    return parent


def _block(row_bytes: int) -> int:
    return max(1, BLOCK_BYTES // row_bytes)
