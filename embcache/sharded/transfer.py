"""Exports and imports of a group: the files of ``embcache.transfer``, each written and read by the rank that holds its
rows. For a given state they are the same bytes whatever the number of ranks and the plan.

All functions are collective. The folder must be one that every rank sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .. import schema, statefile
from ..config import TableConfig
from ..errors import BadConfig, NotSupported
from ..kernels.buckets import BUCKETS
from ..store import EmbeddingStore
from ..transfer.export import _Changes
from ..transfer.importing import IMPORTED, read_deleted, read_rows
from ..transfer.manifest import EXTRA, ExportFile, Manifest, State, TableFiles, check_chain, check_file
from ..transfer.writer import MAX_OPEN, MEMORY, BucketFiles, clear, sweep
from .layout import Piece, cut, layout_of
from .moves import Stream, move
from .peers import Peers
from .reshard import by_number, filters_moved, streams_block

if TYPE_CHECKING:
    from .checkpoint import GroupCheckpoints

__all__ = ["apply_exports", "export_group", "import_group", "knows_changes"]


def export_group(
    saved: GroupCheckpoints,
    store: Any,
    folder: str | Path,
    *,
    since: str | Path | int | None = None,
    buckets: int = BUCKETS,
    memory: int = MEMORY,
) -> Manifest:
    """Write the rows of a sharded store that ``saved`` has committed or loaded, and that was not trained since.

    ``since``: an earlier export of this group, or the number of a generation: only what changed since then. Nothing may
    be trained meanwhile. Otherwise as ``embcache.transfer.export_store``, whose errors it raises on every rank.
    """
    peers, folder = saved.peers, Path(folder)
    if not isinstance(buckets, int) or not 1 <= buckets <= MAX_OPEN:
        raise BadConfig(f"export: buckets = {buckets!r}, must be an integer in [1, {MAX_OPEN}]")
    state = saved.state_of(store)
    parent = None if since is None else _parent(saved, since)
    changes = None if parent is None else peers.patiently(lambda: _changes(saved, store, parent))
    peers.together(lambda: _begin(folder, store, peers))
    try:
        tables = []
        for t, table in enumerate(store.tables):
            writers = _writers(store, table, buckets, peers.world)
            whole = Piece("", (0, table.embedding_dim), tuple(range(peers.world)), writers)
            files = _write(peers, store, folder, t, whole, changes, buckets, memory)
            entries = [ExportFile(**file) for part in peers.all_told(list(map(vars, files))) for file in part]
            entries.sort(key=lambda file: (file.deleted, file.bucket))
            step = store.local.steps[store.local.index(layout_of(store.plan, store.tables)[table.name][0].name)]
            tables.append(TableFiles(table, step, tuple(entries)))
        extra = _extra(peers, store)

        def finish() -> Any:
            if peers.rank:
                return None
            entry = statefile.write_tensors(folder, EXTRA, extra) if extra else None
            for path in folder.glob("table-*"):
                statefile.sync_folder(path)
            statefile.sync_folder(folder)
            Manifest(state, parent, buckets, tuple(tables), entry).write(folder)
            return entry

        entry = peers.told(peers.together(finish))
        return Manifest(state, parent, buckets, tuple(tables), entry)
    except BaseException:
        if peers.rank == 0:
            sweep(folder)
        raise


def _begin(folder: Path, store: Any, peers: Peers) -> None:
    if peers.rank == 0:
        clear(folder)
        for t in range(len(store.tables)):
            (folder / f"table-{t:04d}").mkdir()


def _writers(store: Any, table: TableConfig, buckets: int, world: int) -> tuple[int, ...]:
    """Which rank writes each file: the one that holds all its rows, if there is one."""
    pieces = layout_of(store.plan, store.tables)[table.name]
    if len(pieces) == 1 and not pieces[0].replicated:
        owners = pieces[0].buckets or (pieces[0].ranks[0],) * buckets
        if len(owners) >= buckets and not len(owners) % buckets:
            return tuple(owners[b * (len(owners) // buckets)] for b in range(buckets))
        if not buckets % len(owners):
            return tuple(owners[b * len(owners) // buckets] for b in range(buckets))
    return tuple(b % world for b in range(buckets))


def _write(
    peers: Peers,
    store: Any,
    folder: Path,
    t: int,
    whole: Piece,
    changes: dict[str, _Changes] | None,
    buckets: int,
    memory: int,
) -> list[ExportFile]:
    """This rank's files of one table."""
    table: TableConfig = store.tables[t]
    pieces = layout_of(store.plan, store.tables)[table.name]
    part, local = Path(f"table-{t:04d}"), store.local
    block = streams_block(table, peers.world)
    mine = [(i, piece) for i, piece in enumerate(pieces) if peers.rank in piece.ranks]
    streams = []
    for i, piece in mine:
        changed = None if changes is None else changes[piece.name].rows()
        streams.append(Stream(peers.rank, i, local.raw_rows(local.index(piece.name), block) if changed is None
                              else (each for each in changed if len(each[0]))))  # fmt: skip
    with statefile.named_when_full(folder / part), BucketFiles(folder, part, table, False, buckets, memory) as files:
        move(
            peers, table, pieces, [whole], streams, lambda _, ids, rows: files.add(ids, rows),
            readers=list(range(peers.world)), staying=[False] * peers.world,
        )  # fmt: skip
    if changes is None:
        return files.entries
    first = [changes[piece.name] for i, piece in mine if i == 0]
    gone = peers.patiently(lambda: [ids.numpy() for change in first for ids in change.deleted()])
    ids = np.concatenate([np.zeros(0, np.int64), *gone])
    ids = ids[pieces[0].owners(ids) == peers.rank]
    owners = whole.owners(ids)
    came = np.concatenate([p.view(np.int64) for p in peers.exchange(
        [ids[owners == rank].view(np.uint8) for rank in range(peers.world)])])  # fmt: skip
    came = np.unique(came.view(np.uint64)).view(np.int64)
    with statefile.named_when_full(folder / part), BucketFiles(folder, part, table, True, buckets, memory) as dead:
        if len(came):
            dead.add(torch.from_numpy(came), torch.empty(len(came), 0, dtype=torch.uint8))
    return [*files.entries, *dead.entries]


def _changes(saved: GroupCheckpoints, store: Any, parent: State) -> dict[str, _Changes]:
    local: EmbeddingStore = store.local
    tier = local.durable
    if tier is None:
        raise NotSupported("a delta of a store in memory: only a store on disk has generations to start from")
    number = saved.number_of(parent)
    found = {}
    for t, table in enumerate(local.tables):
        keys = None if number is None else tier.changed_since(t, number)
        if keys is None:
            raise BadConfig(f"changes since {parent} are no longer known: export in full")
        found[table.name] = _Changes(local, tier, t, keys)
    return found


def knows_changes(saved: GroupCheckpoints, store: Any, parent: State) -> bool:
    """Whether what changed since then is known on every rank, so that an export may be a delta."""

    def known() -> bool:
        tier, number = store.local.durable, saved.number_of(parent)
        tables = range(len(store.local.tables))
        return tier is not None and number is not None and all(
            tier.changed_since(t, number) is not None for t in tables
        )  # fmt: skip

    return all(saved.peers.all_told(saved.peers.together(known)))


def _parent(saved: GroupCheckpoints, since: str | Path | int) -> State:
    if isinstance(since, int):
        return State(saved.lineage, since, saved.find(since).check)
    found = saved.peers.together(lambda: Manifest.read(Path(since)).state)
    if found.lineage != saved.lineage:
        raise BadConfig(f"{since} holds {found}, which {saved.lineage} does not continue: name an export of this group")
    return found


def _extra(peers: Peers, store: Any) -> dict[str, Tensor]:
    """What admission and expiry remember besides rows, of whole tables, on rank 0."""
    layout, state, found = layout_of(store.plan, store.tables), store.local.extra_state(), {}
    for table in store.tables:
        pieces = layout[table.name]
        if table.admission is not None:
            here = Piece("", (0, 1), (0,))
            mine = {peers.rank: state[f"{pieces[0].name}.admission"]} if peers.rank in pieces[0].ranks else {}
            cells, _ = filters_moved(peers, table, pieces, [here], mine, list(range(peers.world)))
            found[f"{table.name}.admission"] = cells[0]
        if table.expiry is not None:
            found[f"{table.name}.expiry"] = state[f"{pieces[0].name}.expiry"]
    return found


# ---- in


def import_group(saved: GroupCheckpoints, store: Any, *folders: str | Path, state: Any = None) -> State:
    """Make the rows of a sharded store those of an export and commit them, with ``state``; as
    ``embcache.transfer.import_exports``, whose errors it raises on every rank."""
    if not folders:
        raise BadConfig("import: no export was named")
    paths = [Path(folder) for folder in folders]
    held = saved.state_of(store, any_of=True)
    try:
        found = apply_exports(saved.peers, store, paths, held)
        saved.save(state, [store], notes={IMPORTED: vars(found)})
    except BaseException:
        saved.forget(store)
        raise
    return found


def apply_exports(peers: Peers, store: Any, paths: Sequence[Path], held: Sequence[State] = ()) -> State:
    """The import without a commit; ``held``: what the store may be said to hold now."""
    local: EmbeddingStore = store.local

    def check() -> list[Manifest]:
        if store.pending_tables():
            raise BadConfig("gradients are waiting for step(): an import now would mix two states")
        if local.front.pins():
            raise BadConfig(f"{local.front.pins()} rows are pinned: release every handle before an import")
        manifests = [Manifest.read(path) for path in paths]
        known = next((state for state in held if state == manifests[0].parent), held[0] if held else None)
        check_chain(paths, manifests, known)
        for path, manifest in zip(paths, manifests, strict=True):
            schema.agree([part.table for part in manifest.tables], store.tables, f"tables of {path}")
            files = [(file.name, file.bytes, file.crc32) for part in manifest.tables for file in part.files]
            if manifest.extra is not None:
                files.append((EXTRA, manifest.extra["bytes"], manifest.extra["crc32"]))
            for file in files[peers.rank :: peers.world]:
                check_file(path / file[0], *file[1:])
        return manifests

    manifests = peers.patiently(check)
    first = max(k for k, manifest in enumerate(manifests) if k == 0 or manifest.parent is None)

    def apply() -> None:
        for path, manifest in list(zip(paths, manifests, strict=True))[first:]:
            _apply(peers.rank, store, path, manifest)

    peers.patiently(apply)
    store.renewed()
    return manifests[-1].state


def _apply(rank: int, store: Any, folder: Path, manifest: Manifest) -> None:
    """This rank's rows of one export."""
    local: EmbeddingStore = store.local
    layout = layout_of(store.plan, store.tables)
    saved = {} if manifest.extra is None else statefile.read_tensors(folder, manifest.extra)
    extra = {}
    for part in manifest.tables:
        table = part.table
        for piece in layout[table.name]:
            t = local.index(piece.name)
            if manifest.parent is None:
                local.front.reset(t)
            local.steps[t] = part.step
            if table.admission is not None:
                extra[f"{piece.name}.admission"] = _own_cells(rank, table, piece, saved[f"{table.name}.admission"])
            if table.expiry is not None:
                extra[f"{piece.name}.expiry"] = saved[f"{table.name}.expiry"]
        for file in part.files:
            _apply_file(rank, local, layout[table.name], folder, part, file, manifest.buckets)
    local.load_extra_state(extra)
    local.version += 1


def _apply_file(
    rank: int,
    local: EmbeddingStore,
    pieces: Sequence[Piece],
    folder: Path,
    part: TableFiles,
    file: ExportFile,
    buckets: int,
) -> None:
    here = [piece for piece in pieces if _holds(rank, piece, file.bucket, buckets)]
    if not here:
        return
    table = part.table
    blocks: Iterator[tuple[Tensor, Tensor | None]]
    if file.deleted:
        blocks = ((ids, None) for ids in read_deleted(folder, table, file, buckets))
    else:
        blocks = iter(read_rows(folder, table, file, buckets))
    for ids, rows in blocks:
        _apply_block(rank, local, table, here, ids, rows)


def _apply_block(
    rank: int, local: EmbeddingStore, table: TableConfig, here: Sequence[Piece], ids: Tensor, rows: Tensor | None
) -> None:
    for piece in here:
        mine = torch.from_numpy(np.flatnonzero(piece.replicated | (piece.owners(ids.numpy()) == rank)))
        if rows is None:
            local.front.delete(local.index(piece.name), ids[mine])
        else:
            chosen = cut(table, (0, table.embedding_dim), rows[mine], piece.columns)
            local.put_raw_rows(local.index(piece.name), ids[mine], chosen)


def _holds(rank: int, piece: Piece, bucket: int, buckets: int) -> bool:
    """Whether a rank may hold rows of a bucket of an export."""
    if rank not in piece.ranks or piece.buckets is None:
        return rank in piece.ranks
    n = len(piece.buckets)
    first, last = bucket * n // buckets, -(-(bucket + 1) * n // buckets)
    return rank in piece.buckets[first:last]


def _own_cells(rank: int, table: TableConfig, piece: Piece, cells: Tensor) -> Tensor:
    """Of an admission filter, the buckets that a rank holds."""
    if piece.replicated:
        return cells
    owners = by_number(table, piece, (0, 1)).owners(np.arange(BUCKETS))
    return torch.where(torch.from_numpy(owners == rank)[:, None], cells, torch.zeros_like(cells))
