"""ColumnCache: preprocessed data on disk, opened by memory mapping.

A folder of raw little-endian arrays and ``manifest.json``. Dense values and single ids are matrices of whole
rows (a shuffled batch reads rows); a bag feature has values and offsets of its own. Nothing in it can run code.

=================  ================================  ==============================================
file               dtype, shape                      what
=================  ================================  ==============================================
dense.bin          float32 ``[rows, n_dense]``       transformed numbers
labels.bin         float32 ``[rows]``                labels in [0, 1]
ids.bin            int32 or int64 ``[rows, S]``      one id for each feature that is not a bag
bag_K.values.bin   as ids.bin ``[ids]``              ids of bag feature K (its place among the features)
bag_K.offsets.bin  int64 ``[rows + 1]``              where each row's bag begins
split_NAME.bin     int64 ``[n]``                     rows of a split that is not a range
vocab_K.bin        int64 ``[rows of table - 2]``     key of row ``2 + i`` of table K (vocabularies only)
=================  ================================  ==============================================

The manifest names the format and its version, shape and CRC-32 of every file, and its own CRC-32. It is written
last and renamed into place, so a folder with a manifest is complete.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.batch import ClickBatch
from dlrm.data.errors import CacheVersion, CorruptCache
from dlrm.data.gather import RowGather
from dlrm.data.schema import Schema

FORMAT, VERSION, MANIFEST = "dlrm-column-cache", 1, "manifest.json"
Split = range | np.ndarray


@dataclass
class ColumnCache:
    """Preprocessed rows, on disk or in memory.

    ``dense`` float32 ``[rows, n_dense]``; ``labels`` float32 ``[rows]``; ``ids`` int32/int64 ``[rows, S]``, one column
    for each feature that is not a bag, in feature order; ``bags``: feature -> (values, offsets int64 ``[rows + 1]``).
    ``num_embeddings``: feature -> rows of its table, or None where the id is any int64.
    ``splits``: name -> a range of rows, or an int64 array of them. ``info``: counts and settings, plain data.
    """

    schema: Schema
    dense: np.ndarray
    labels: np.ndarray
    ids: np.ndarray
    splits: dict[str, Split]
    num_embeddings: dict[str, int | None]
    bags: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    vocabularies: dict[str, np.ndarray] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    @property
    def rows(self) -> int:
        """Number of samples, all splits together."""
        return int(self.labels.shape[0])

    @property
    def n_dense(self) -> int:
        """Number of dense features."""
        return int(self.dense.shape[1])

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the sparse features, in the order batches hold them."""
        return self.schema.features

    @property
    def tables(self) -> dict[str, str]:
        """The table of each feature; features that share one have the same number of rows."""
        return dict(zip(self.schema.features, self.schema.tables, strict=True))

    def gather(self, rows: np.ndarray) -> ClickBatch:
        """The batch of these rows (int64 ``[B]``)."""
        return self._gather(rows)

    @cached_property
    def _gather(self) -> RowGather:
        return RowGather(self.features, self.dense, self.labels, self.ids, self.bags)

    @classmethod
    def open(cls, path: str | Path, verify: bool = False) -> ColumnCache:
        """Map a cache folder. ``verify`` reads every byte and compares the checksums; sizes are always checked.

        Raises :class:`CorruptCache` (foreign, torn or altered) or :class:`CacheVersion` (newer format).
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        arrays = {name: _map(folder, name, entry, verify) for name, entry in manifest["arrays"].items()}
        schema = Schema.from_dict(manifest["schema"])
        bags = {f: (arrays[f"bag_{k}.values"], arrays[f"bag_{k}.offsets"])
                for k, (f, bag) in enumerate(zip(schema.features, schema.bags, strict=True)) if bag}  # fmt: skip
        names = list(dict.fromkeys(schema.tables))
        vocabularies = {t: arrays[f"vocab_{k}"] for k, t in enumerate(names) if f"vocab_{k}" in arrays}
        splits: dict[str, Split] = {
            name: range(*where) if where is not None else arrays[f"split_{name}"]
            for name, where in manifest["splits"].items()
        }
        return cls(schema, arrays["dense"], arrays["labels"], arrays["ids"], splits, manifest["num_embeddings"],
                   bags, vocabularies, manifest["info"], folder)  # fmt: skip

    def save(self, path: str | Path) -> ColumnCache:
        """Write this cache to a new folder and open it there."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=False)
        arrays = {"dense": self.dense, "labels": self.labels, "ids": self.ids}
        for k, f in enumerate(self.features):
            if f in self.bags:
                arrays[f"bag_{k}.values"], arrays[f"bag_{k}.offsets"] = self.bags[f]
        for k, t in enumerate(dict.fromkeys(self.schema.tables)):
            if t in self.vocabularies:
                arrays[f"vocab_{k}"] = self.vocabularies[t]
        splits: dict[str, list[int] | None] = {}
        for name, rows in self.splits.items():
            splits[name] = [rows.start, rows.stop] if isinstance(rows, range) else None
            if not isinstance(rows, range):
                arrays[f"split_{name}"] = rows
        entries = {}
        for name, array in arrays.items():
            data = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            with (folder / f"{name}.bin").open("wb") as file:
                file.write(data.data.cast("B") if data.size else b"")
                file.flush()
                os.fsync(file.fileno())
            entries[name] = array_entry(data.dtype, data.shape, zlib.crc32(data.data.cast("B") if data.size else b""))
        write_manifest(folder, self.schema, entries, splits, self.num_embeddings, self.info)
        return ColumnCache.open(folder)


def array_entry(dtype: Any, shape: tuple[int, ...], crc: int) -> dict[str, Any]:
    """What the manifest says of one file."""
    return {"dtype": np.dtype(dtype).newbyteorder("<").str, "shape": list(shape), "crc32": crc}


def write_manifest(
    folder: Path,
    schema: Schema,
    arrays: dict[str, dict[str, Any]],
    splits: dict[str, list[int] | None],
    num_embeddings: dict[str, int | None],
    info: dict[str, Any],
) -> None:
    """Write ``manifest.json``: to a temporary name, synced, then renamed."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "schema": schema.to_dict(),
        "arrays": dict(sorted(arrays.items())),
        "splits": splits,
        "num_embeddings": num_embeddings,
        "info": info,
    }
    body["checksum"] = _checksum(body)
    write_atomically(folder / MANIFEST, json.dumps(body, indent=1).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a cache folder, after its own checks."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CorruptCache(f"{folder}: no {MANIFEST}; not a column cache, or preprocessing did not finish")
    try:
        body = json.loads(path.read_bytes())
        if body.get("format") != FORMAT:
            raise CorruptCache(f"{path}: format {body.get('format')!r}, expected {FORMAT!r}")
        version = int(body["version"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCache(f"{path}: not a manifest ({error})") from None
    if version > VERSION:
        raise CacheVersion(f"{path}: format version {version}, this code reads up to {VERSION}")
    if body.pop("checksum", None) != _checksum(body):
        raise CorruptCache(f"{path}: checksum does not match, the file was altered or torn")
    return body


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a small file in one step that survives a crash."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _map(folder: Path, name: str, entry: dict[str, Any], verify: bool) -> np.ndarray:
    path, dtype, shape = folder / f"{name}.bin", np.dtype(entry["dtype"]), tuple(entry["shape"])
    need = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    have = path.stat().st_size if path.is_file() else -1
    if have != need:
        raise CorruptCache(f"{path}: {'missing' if have < 0 else f'{have} bytes'}, expected {need} bytes")
    array = np.memmap(path, dtype, "r", shape=shape) if need else np.empty(shape, dtype)
    if verify and crc32_file(path) != entry["crc32"]:
        raise CorruptCache(f"{path}: checksum does not match, the file was altered")
    return array


def crc32_file(path: Path, block: int = 1 << 24) -> int:
    """CRC-32 of a whole file, read in blocks."""
    crc = 0
    with path.open("rb") as f:
        while data := f.read(block):
            crc = zlib.crc32(data, crc)
    return crc


def with_splits(cache: ColumnCache, **splits: Split) -> ColumnCache:
    """The same rows under other splits (in memory only)."""
    return dataclasses.replace(cache, splits={**cache.splits, **splits})
