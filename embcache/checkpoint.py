"""Checkpoints: numbered generations, each complete or absent, committed by one rename.

A folder holds ``manifest.json`` and a folder for each generation it lists. A generation has ``state.json`` and
``state.safetensors`` (dense weights, optimizers, random state, data position: whatever the caller gives) and, for each
embedding table, its *written* rows: ids, weights and optimizer state, in ``rows-*.safetensors`` of about
``PART_BYTES``. A row that was never written is a function of the seed and costs nothing. Files carry checksums; the
manifest is written last, fsynced and renamed, and is the only commit point: a generation it does not list does not
exist and is swept by the next save.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from embcache import statefile
from embcache.errors import CorruptStore, FormatVersion, SchemaMismatch
from embcache.lock import FolderLock
from embcache.rows import load_rows, reset_rows, written_rows
from embcache.store import EmbeddingStore

__all__ = ["Checkpoints", "Generation"]

FORMAT, VERSION = "embcache-checkpoint", 1
MANIFEST = "manifest.json"
PART_BYTES = 32 << 20
_ROW = ("ids", "weight", "state")
_NAME = re.compile(r"generation-\d{8,}$")


@dataclass(frozen=True)
class Generation:
    """One committed checkpoint: its number, the caller's notes (plain JSON), and whether it is the best so far."""

    number: int
    notes: dict[str, Any]
    best: bool
    check: int

    @property
    def name(self) -> str:
        return f"generation-{self.number:08d}"


class Checkpoints:
    """The generations in a folder.

    Args:
        folder: made by the first ``save``.
        keep: newest generations kept; the best is kept besides.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = Checkpoints(folder)
    ...     _ = saved.save({"weight": torch.ones(2)}, notes={"step": 7})
    ...     state = Checkpoints(folder).load()
    >>> state
    {'weight': tensor([1., 1.])}
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep = {keep}, must be at least 1")
        self.folder = Path(folder)
        self.keep = keep
        self.generations: list[Generation] = self._read_manifest()
        self._lock: FolderLock | None = None

    def claim(self) -> None:
        """Keep other processes from writing here until this object is gone; StoreLocked if one does already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock.take(self.folder)
        self.generations = self._read_manifest()

    @property
    def latest(self) -> Generation | None:
        """The newest generation."""
        return self.generations[-1] if self.generations else None

    @property
    def best(self) -> Generation | None:
        """The generation last saved with ``best=True``."""
        return next((g for g in reversed(self.generations) if g.best), None)

    def save(
        self,
        state: Any,
        stores: Sequence[EmbeddingStore] = (),
        *,
        notes: dict[str, Any] | None = None,
        best: bool = False,
    ) -> Generation:
        """Commit a new generation and drop those no longer kept.

        Args: ``state``: nested plain values and tensors; ``stores``: embedding stores without pending gradients;
        ``notes``: shown by ``generations`` without reading the state; ``best``: this is now the best generation.
        Raises: StorageFull with everything committed before intact; RuntimeError when gradients wait for a step.
        """
        for store in stores:
            if store.pending_tables():
                raise RuntimeError("a checkpoint between backward and step would lose gradients: save after step()")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        number = self.generations[-1].number + 1 if self.generations else 1
        generation = Generation(number, notes or {}, best, 0)
        folder = self.folder / generation.name
        folder.mkdir()
        try:
            check = self._write(folder, state, stores)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._commit(Generation(number, notes or {}, best, check))
        self._sweep()
        return self.generations[-1]

    def load(self, stores: Sequence[EmbeddingStore] = (), which: str = "latest") -> Any:
        """Read a generation ("latest" or "best") into the stores and return its state.

        Everything is checked before the first row changes: CorruptStore (torn, foreign, altered), FormatVersion
        (newer), SchemaMismatch (other tables, listing both).
        """
        generation = self.best if which == "best" else self.latest
        if generation is None:
            raise FileNotFoundError(f"{self.folder} holds no checkpoint")
        folder = self.folder / generation.name
        content = self._content(folder, generation)
        saved = [table["schema"] for table in content["tables"]]
        declared = [table.schema() for store in stores for table in store.tables]
        if saved != json.loads(json.dumps(declared)):
            raise SchemaMismatch(f"tables of {folder}", *_differing(saved, declared))
        for part in content["rows"]:
            statefile.read_checked(folder, part["file"])
        state = statefile.unpack(content["state"], statefile.read_tensors(folder, content["tensors"]))
        places = _places(stores)
        for (store, t), table in zip(places, content["tables"], strict=True):
            store.discard()
            reset_rows(store, t)
            store.steps[t] = int(table["step"])
        for part in content["rows"]:
            rows = statefile.read_tensors(folder, part["file"])
            for k in part["tables"]:
                load_rows(*places[k], *(rows[f"{k}.{what}"] for what in _ROW))
        return state

    def _write(self, folder: Path, state: Any, stores: Sequence[EmbeddingStore]) -> int:
        """Write a generation's files; returns the checksum of its table of contents."""
        plain, tensors = statefile.pack(state)
        rows = [
            {"tables": list(tables), "file": statefile.write_tensors(folder, f"rows-{i:05d}.safetensors", part)}
            for i, (tables, part) in enumerate(_parts(stores))
        ]
        content = {
            "format": FORMAT,
            "version": VERSION,
            "state": plain,
            "tensors": statefile.write_tensors(folder, "state.safetensors", tensors),
            "tables": [{"schema": s.tables[t].schema(), "step": n} for s in stores for t, n in enumerate(s.steps)],
            "rows": rows,
        }
        entry = statefile.write_json(folder, "state.json", content)
        statefile.sync_folder(folder)
        statefile.sync_folder(self.folder)
        return int(entry["crc32"])

    def _commit(self, new: Generation) -> None:
        kept = [Generation(g.number, g.notes, g.best and not new.best, g.check) for g in self.generations] + [new]
        best = next((g for g in reversed(kept) if g.best), None)
        generations = [g for g in kept if g in kept[-self.keep :] or g is best]
        listed = [{"number": g.number, "notes": g.notes, "best": g.best, "check": g.check} for g in generations]
        body = {"format": FORMAT, "version": VERSION, "generations": listed}
        statefile.replace_json(self.folder, MANIFEST, {**body, "check": _check(body)})
        self.generations = generations

    def _sweep(self) -> None:
        """Remove what the manifest does not list: older generations, and those a crash left half written."""
        listed = {g.name for g in self.generations}
        for path in self.folder.iterdir():
            if _NAME.match(path.name) and path.name not in listed:
                shutil.rmtree(path)

    def _read_manifest(self) -> list[Generation]:
        path = self.folder / MANIFEST
        if not path.exists():
            return []
        manifest = _parsed(path, path.read_bytes())
        body = {key: value for key, value in manifest.items() if key != "check"}
        if manifest.get("check") != _check(body):
            raise CorruptStore(f"{path}: the checksum does not match")
        return [Generation(g["number"], g["notes"], g["best"], g["check"]) for g in manifest["generations"]]

    def _content(self, folder: Path, generation: Generation) -> dict[str, Any]:
        path = folder / "state.json"
        if not path.exists():
            raise CorruptStore(f"{path} is missing")
        data = path.read_bytes()
        if zlib.crc32(data) != generation.check:
            raise CorruptStore(f"{path}: the checksum does not match")
        return _parsed(path, data)


def _parts(stores: Sequence[EmbeddingStore]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """(tables, their written rows) in files of about PART_BYTES: big tables are cut, small ones share a file."""
    tables: list[int] = []
    part: dict[str, Tensor] = {}
    for k, (store, t) in enumerate(_places(stores)):
        for rows in written_rows(store, t, max(1, PART_BYTES // (8 + store.tables[t].row_bytes))):
            full = sum(map(_bytes, [*part.values(), *rows])) > PART_BYTES
            if part and (full or k in tables):
                yield tables, part
                tables, part = [], {}
            tables.append(k)
            part.update({f"{k}.{what}": tensor for what, tensor in zip(_ROW, rows, strict=True)})
    if part:
        yield tables, part


def _places(stores: Sequence[EmbeddingStore]) -> list[tuple[EmbeddingStore, int]]:
    """Every table: its store and its index there."""
    return [(store, t) for store in stores for t in range(len(store.names))]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise CorruptStore(f"{path} is not JSON") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise CorruptStore(f"{path} is not a checkpoint of this library")
    if value.get("version", 0) > VERSION:
        raise FormatVersion(str(path), value["version"], VERSION)
    return value


def _check(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _differing(saved: Sequence[dict[str, Any]], declared: Sequence[dict[str, Any]]) -> tuple[object, object]:
    """Only what differs of two lists of schemas, so that the message can be read."""
    if [t["name"] for t in saved] != [t["name"] for t in declared]:
        return [t["name"] for t in saved], [t["name"] for t in declared]
    pairs = [(s, d) for s, d in zip(saved, declared, strict=True) if s != d]
    keys = ["name", *{k: None for s, d in pairs for k in {**s, **d} if s.get(k) != d.get(k)}]
    return [{k: s.get(k) for k in keys} for s, _ in pairs], [{k: d.get(k) for k in keys} for _, d in pairs]
