"""Sections of bench_cache.py below the training step: index probes, and rows moved by each kind of cold storage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _bench import format_table
from _cache_work import PowerLaw, disk_bytes, drop_pages, folder, timed, written_bytes


def index(work: dict[str, Any]) -> dict[str, Any]:
    """Probes of the index by one thread, power law ids, in blocks; beside a dict and a sorted array."""
    from embcache.kernels.index import RowIndex

    records = []
    for rows in work["index_rows"]:
        table = RowIndex(rows)
        table.put(np.arange(rows, dtype=np.int64), np.arange(rows, dtype=np.int32))
        for alpha in (1.05, 1.2):
            law, rng = PowerLaw(rows, alpha), np.random.default_rng(0)
            blocks = [law.draw(rng, work["probe_block"]) for _ in range(max(2, work["probes"] // work["probe_block"]))]
            table.get(blocks[0])

            def probe(blocks: list[np.ndarray] = blocks, table: Any = table) -> None:
                for block in blocks:
                    table.get(block)

            record = {"rows": rows, "alpha": alpha, "bytes_per_row": table.nbytes / rows}
            record["keys_per_s"] = sum(map(len, blocks)) / timed(probe, 5)
            records.append(record)
        plain = dict.fromkeys(range(min(rows, 1_000_000)), 0)
        keys = (np.concatenate(blocks)[:200_000] % len(plain)).tolist()
        records[-1]["dict_keys_per_s"] = len(keys) / timed(lambda keys=keys, plain=plain: [plain[k] for k in keys], 3)  # type: ignore[misc]
        ordered = np.arange(rows)
        some = np.concatenate(blocks)[:1_000_000]
        records[-1]["searchsorted_keys_per_s"] = len(some) / timed(
            lambda ordered=ordered, some=some: np.searchsorted(ordered, some),
            3,  # type: ignore[misc]
        )
    lines = [
        [
            f"{r['rows']:,} rows, power law {r['alpha']}",
            f"{r['keys_per_s'] / 1e6:.0f}",
            f"{r['bytes_per_row']:.1f}",
            *(f"{r[k] / 1e6:.1f}" if k in r else "" for k in ("dict_keys_per_s", "searchsorted_keys_per_s")),
        ]
        for r in records
    ]
    header = ["index probe, one thread", "M keys/s", "B a row", "dict", "searchsorted"]
    return {"table": format_table(header, lines), "records": records}


# rows of cold storage ------------------------------------------------------------------------------------------------

Mover = Callable[[np.ndarray, np.ndarray], None]  # ascending keys, rows [n, row_bytes]: written from, or read into


class Storage:
    """One way to keep rows: ``write`` and ``read`` take ascending unique keys; ``settle`` makes them durable."""

    def __init__(self, path: Path, rows: int, row_bytes: int) -> None:
        self.path, self.rows, self.row_bytes = path, rows, row_bytes

    def settle(self) -> None:
        """Durable, and as reads will find it."""

    def reopen(self, cold: bool) -> None:
        """Close, perhaps drop the system's cached pages, open again."""

    def close(self) -> None:
        """Let go."""


class Ours(Storage):
    """tiers.Lmdb: an overlay of appended records over LMDB, read by a kernel."""

    def __init__(self, path: Path, rows: int, row_bytes: int) -> None:
        super().__init__(path, rows, row_bytes)
        self.number = 0
        self.open()

    def open(self) -> None:
        import embcache as ec

        table = ec.TableConfig("t", self.rows, self.row_bytes // 4)
        assert table.row_bytes == self.row_bytes
        self.tier = ec.tiers.Lmdb(self.path)
        self.tier.open([table])
        if self.number:
            self.tier.restore(self.described)
        else:
            self.tier.restore(None)

    def write(self, keys: np.ndarray, rows: np.ndarray) -> None:
        self.tier.write(0, keys, rows)

    def read(self, keys: np.ndarray, rows: np.ndarray) -> None:
        assert self.tier.read(0, keys, rows).all()

    def settle(self) -> None:
        self.number += 1
        self.described = self.tier.freeze(self.number)
        self.tier.sync()

    def merge(self) -> None:
        self.tier.sealed(self.number, self.number)
        self.tier.merge()
        self.described = self.tier.trimmed(self.described)

    def reopen(self, cold: bool) -> None:
        self.close()
        if cold:
            drop_pages(self.path)
        self.open()

    def close(self) -> None:
        self.tier.close()


class PyLmdb(Storage):
    """A loop over py-lmdb's put and get, integer keys, one transaction a block."""

    def __init__(self, path: Path, rows: int, row_bytes: int) -> None:
        super().__init__(path, rows, row_bytes)
        self.open()

    def open(self) -> None:
        import lmdb

        self.env = lmdb.open(str(self.path), map_size=1 << 38, max_dbs=2, readahead=False, lib_version=0, sync=False)
        self.db = self.env.open_db(b"rows", integerkey=True)

    def write(self, keys: np.ndarray, rows: np.ndarray) -> None:
        with self.env.begin(db=self.db, write=True) as txn:
            for key, row in zip(keys.view("V8"), rows, strict=True):
                txn.put(key.tobytes(), row.data)

    def read(self, keys: np.ndarray, rows: np.ndarray) -> None:
        with self.env.begin(db=self.db, buffers=True) as txn:
            get = txn.get
            for i, key in enumerate(keys.view("V8")):
                rows[i] = np.frombuffer(get(key.tobytes()), np.uint8)

    def settle(self) -> None:
        self.env.sync(True)

    def reopen(self, cold: bool) -> None:
        self.close()
        if cold:
            drop_pages(self.path)
        self.open()

    def close(self) -> None:
        self.env.close()


class Mapped(Storage):
    """np.memmap of all rows of a bounded table, key = row."""

    def __init__(self, path: Path, rows: int, row_bytes: int) -> None:
        super().__init__(path, rows, row_bytes)
        self.file = path / "rows.bin"
        with self.file.open("wb") as file:
            file.truncate(rows * row_bytes)
        self.open()

    def open(self) -> None:
        self.map: Any = np.memmap(self.file, np.uint8, "r+", shape=(self.rows, self.row_bytes))

    def write(self, keys: np.ndarray, rows: np.ndarray) -> None:
        self.map[keys] = rows

    def read(self, keys: np.ndarray, rows: np.ndarray) -> None:
        np.take(self.map, keys, axis=0, out=rows)

    def settle(self) -> None:
        self.map.flush()
        descriptor = os.open(self.file, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)

    def reopen(self, cold: bool) -> None:
        self.close()
        if cold:
            drop_pages(self.path)
        self.open()

    def close(self) -> None:
        self.map = None


class Dict(Storage):
    """A dict of bytes: memory only, for scale."""

    def __init__(self, path: Path, rows: int, row_bytes: int) -> None:
        super().__init__(path, rows, row_bytes)
        self.rows_of: dict[int, bytes] = {}

    def write(self, keys: np.ndarray, rows: np.ndarray) -> None:
        for key, row in zip(keys.tolist(), rows, strict=True):
            self.rows_of[key] = row.tobytes()

    def read(self, keys: np.ndarray, rows: np.ndarray) -> None:
        found = self.rows_of
        for i, key in enumerate(keys.tolist()):
            rows[i] = np.frombuffer(found[key], np.uint8)


STORAGE: dict[str, type[Any]] = {"tiers.Lmdb": Ours, "py-lmdb": PyLmdb, "np.memmap": Mapped, "dict": Dict}


def storage(work: dict[str, Any]) -> dict[str, Any]:
    """Rows a second of each kind of storage: fill, update in random blocks, read warm and cold; bytes written a row.

    Updates of tiers.Lmdb are measured as they go to its overlay, and with the merge into LMDB that follows.
    """
    rows, row_bytes, block = work["storage_rows"], work["row_bytes"], work["storage_block"]
    records = []
    for name, kind in STORAGE.items():
        with folder(work["folder"], "storage") as path:
            place = kind(path, rows, row_bytes)
            records.append({"name": name, **_measure(place, rows, row_bytes, block, path)})
            place.close()
    lines = [
        [
            r["name"],
            *(
                f"{r[k] / 1e3:,.0f}" if r[k] else "-"
                for k in ("fill", "update", "update_settled", "read", "read_recent", "read_cold")
            ),
            f"{r['write_amplification']:.1f}",
            f"{r['bytes_on_disk_per_row']:.0f}",
        ]
        for r in records
    ]
    header = [
        f"{rows:,} rows of {row_bytes} B, k rows/s", "fill", "update", "+ settle", "read", "read new", "read cold",
        "written / changed", "disk B a row",
    ]  # fmt: skip
    return {"table": format_table(header, lines), "records": records}


def _measure(place: Any, rows: int, row_bytes: int, block: int, path: Path) -> dict[str, float]:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 255, (block, row_bytes), dtype=np.uint8)
    out = np.empty((block, row_bytes), np.uint8)

    def fill() -> None:
        for start in range(0, rows, block):
            keys = np.arange(start, min(start + block, rows))
            place.write(keys, data[: len(keys)])
        settle()

    def settle() -> None:
        place.settle()
        if isinstance(place, Ours):
            place.merge()

    result = {"fill": rows / timed(fill)}
    keys = [np.sort(rng.choice(rows, block, replace=False)) for _ in range(8)]
    place.reopen(False)
    for some in keys[:2]:
        place.read(some, out)
    result["read"] = _rate(place.read, keys, out)
    before = written_bytes()
    result["update"] = _rate(place.write, keys, data)
    result["read_recent"] = _rate(place.read, keys, out)
    seconds = len(keys) * block / result["update"] + timed(settle)
    result["update_settled"] = len(keys) * block / seconds
    result["write_amplification"] = (written_bytes() - before) / (len(keys) * block * row_bytes)
    result["bytes_on_disk_per_row"] = disk_bytes(path) / rows
    result["read_cold"] = 0.0
    if not isinstance(place, Dict):
        place.reopen(True)
        result["read_cold"] = _rate(place.read, keys[:3], out)
    return result


def _rate(move: Mover, keys: list[np.ndarray], rows: np.ndarray) -> float:
    start = time.perf_counter()
    for some in keys:
        move(some, rows[: len(some)])
    return sum(map(len, keys)) / (time.perf_counter() - start)
