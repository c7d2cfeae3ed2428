"""Rows in: full exports and chains of deltas, verified before the first row changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from .. import columns, schema, statefile
from ..config import TableConfig
from ..errors import BadConfig, CorruptStore, NotSupported
from ..kernels.buckets import bucket_of
from ..store import EmbeddingStore
from .manifest import ExportFile, Manifest, State, check_chain, verify

__all__ = ["import_exports", "read_deleted", "read_rows"]

BLOCK_BYTES = 16 << 20
IMPORTED = "imported"  # in the notes of the generation that an import commits

# of stores in memory, which have no generation to note it in: what was imported, and the version then
_held: weakref.WeakKeyDictionary[EmbeddingStore, tuple[State, int]] = weakref.WeakKeyDictionary()


def import_exports(store: EmbeddingStore, *folders: str | Path) -> State:
    """Make the rows of a store those of an export: a full one, then any number of deltas, each continuing the last.

    A full export replaces every row. Deltas alone may follow on what was imported before, or on the very store they
    were exported from, as long as nothing was trained since. Rows, optimizer state, step counts, and what admission and
    expiry remember come back; dense weights are not part of an export. A store on disk is committed at the end, and
    is as before where anything fails. Memory stays bounded. Returns what the store now holds.

    Raises: CorruptStore (missing, cut, altered), FormatVersion, WrongParent (a gap, another order or another store),
    SchemaMismatch (other tables): all before the first row changes. StorageFull.
    """
    if not folders:
        raise BadConfig("import: no export was named")
    if store.durable is not None and store.durable.readonly:
        raise NotSupported("import into a store that was opened read-only")
    if store.pending_tables():
        raise BadConfig("gradients are waiting for step(): an import now would mix two states")
    if store.durable is not None:
        store.checkpoints.wait()
        if store.front.pins():
            raise BadConfig(f"{store.front.pins()} rows are pinned: release every handle before an import")
    paths = [Path(folder) for folder in folders]
    manifests = [Manifest.read(path) for path in paths]
    check_chain(paths, manifests, held_by(store, manifests[0].parent))
    for path, manifest in zip(paths, manifests, strict=True):
        schema.agree([part.table for part in manifest.tables], store.tables, f"tables of {path}")
    for path in paths:
        verify(path)
    first = max(k for k, manifest in enumerate(manifests) if k == 0 or manifest.parent is None)
    try:
        for path, manifest in list(zip(paths, manifests, strict=True))[first:]:
            _apply(store, path, manifest)
        state = manifests[-1].state
        if store.durable is not None:
            store.commit(notes={IMPORTED: vars(state)})
    except BaseException:
        if store.durable is not None:
            store.restore("latest") if store.generation else store.begin_restore(None)
        raise
    if store.durable is None:
        _held[store] = (state, store.version)
    return state


def held_by(store: EmbeddingStore, wanted: State | None = None) -> State | None:
    """What a store holds: ``wanted`` where that is true (imported before, or committed by itself), else what it was
    last known to hold, None where it has been trained since."""
    if store.durable is None:
        state, version = _held.get(store, (None, -1))
        return state if version == store.version else None
    if store.unsaved or not store.generation:
        return None
    generation = store.checkpoints.find(store.generation)
    own = State(store.lineage, generation.number, generation.check)
    noted = generation.notes.get(IMPORTED)
    return own if noted is None or own == wanted else State(**noted)


def read_rows(folder: Path, table: TableConfig, file: ExportFile, buckets: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, whole rows) of one file of an export, about 16 MiB at a time; CorruptStore where ids are not its."""
    rows = max(1, BLOCK_BYTES // table.row_bytes)
    for batch in columns.batches(folder / file.name, rows=rows):
        ids, block = columns.from_arrow(table, batch)
        _check_ids(folder, table, file, ids, buckets)
        yield ids, block


def read_deleted(folder: Path, table: TableConfig, file: ExportFile, buckets: int) -> Iterator[Tensor]:
    """Ids of one file of deleted ids."""
    for batch in columns.batches(folder / file.name):
        ids = columns.ids_of(table, batch)
        _check_ids(folder, table, file, ids, buckets)
        yield ids


def _apply(store: EmbeddingStore, folder: Path, manifest: Manifest) -> None:
    for t, part in enumerate(manifest.tables):
        if manifest.parent is None:
            store.front.reset(t)
        for file in part.files:
            if file.deleted:
                for ids in read_deleted(folder, part.table, file, manifest.buckets):
                    store.front.delete(t, ids)
            else:
                for ids, rows in read_rows(folder, part.table, file, manifest.buckets):
                    store.put_raw_rows(t, ids, rows)
        store.steps[t] = part.step
    extra = {} if manifest.extra is None else statefile.read_tensors(folder, manifest.extra)
    store.load_extra_state(extra)
    store.version += 1


def _check_ids(folder: Path, table: TableConfig, file: ExportFile, ids: Tensor, buckets: int) -> None:
    limit = table.num_embeddings
    if limit is not None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        raise CorruptStore(f"{folder / file.name}: ids outside [0, {limit})")
    if ids.numel() and (bucket_of(ids.numpy(), buckets) != file.bucket).any():
        raise CorruptStore(f"{folder / file.name}: ids of another bucket than {file.bucket}")
