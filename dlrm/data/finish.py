"""From committed chunks to the finished folder: vocabularies and ids, splits, and at last the manifest."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dlrm.data.arrays import ArrayFile
from dlrm.data.cache import array_entry, crc32_file, write_atomically, write_manifest
from dlrm.data.chunks import ChunkLog, ItemReader
from dlrm.data.ids import FIRST_ROW, MISSING
from dlrm.data.ingest import State
from dlrm.data.job import INT32_ROWS, Job
from dlrm.data.splits import NAMES, last_ranges, random_splits, time_splits
from dlrm.data.vocabulary import Vocabularies, apply_rows, count_chunk, each_table

R = TypeVar("R")


class Finish:
    """From committed chunks to the finished folder."""

    def __init__(self, job: Job, state: State) -> None:
        self.job, self.state = job, state
        self.entries: dict[str, dict[str, Any]] = {}
        self.rows_of: dict[str, int | None] = {}

    def run(self) -> None:
        """All stages after reading."""
        job, s = self.job, self.state
        schema = job.schema
        self._entry("dense", "<f4", (s.rows, len(schema.dense_features)))
        self._entry("labels", "<f4", (s.rows,))
        self.index = job.chunks.index(len(schema.features), schema.bags.count(True))
        if job.ids.kind == "vocab":
            self._vocabularies()
        else:
            self._entry("ids", job.layout.id_dtype, (s.rows, schema.bags.count(False)))
            for k, items in zip(job.layout.bag_places, s.bag_items or [0] * len(job.layout.bag_places), strict=True):
                self._entry(f"bag_{k}.values", job.layout.id_dtype, (items,))
            for t in job.tables:
                self.rows_of[t] = job.ids.table_size(t) if job.ids.kind == "hash" else None
        for k in job.layout.bag_places:
            self._entry(f"bag_{k}.offsets", "<i8", (s.rows + 1,))
        splits = self._splits()
        info = {"rows": s.rows, "bad_rows": s.bad, "bad_examples": s.reports, "job": job.identity,
                "click_rate": s.label_units / 2**24 / s.rows if s.rows else None}  # fmt: skip
        tables = dict(zip(schema.features, schema.tables, strict=True))
        write_manifest(job.out, schema, self.entries, splits, {f: self.rows_of[t] for f, t in tables.items()}, info)

    def _entry(self, name: str, dtype: str, shape: tuple[int, ...], crc: int | None = None) -> None:
        self.entries[name] = array_entry(dtype, shape, self.state.arrays[name][1] if crc is None else crc)

    # ------------------------------------------------------------------------------------------------ vocabularies

    def _vocabularies(self) -> None:
        job, schema, threads = self.job, self.job.schema, self.job.limits.threads
        keys = ItemReader(job.work / "keys.bin", "<i8")
        self._count()
        counts = ItemReader(job.work / "counts.bin", "<u4")
        groups = [[f for f, t in enumerate(schema.tables) if t == table] for table in job.tables]
        words = Vocabularies(self.index, groups, keys, counts, job.ids.min_count, job.limits.memory_bytes // threads,
                             job.work)  # fmt: skip
        files = [job.out / f"vocab_{k}.bin" for k in range(len(groups))]
        lock, done = threading.Lock(), [0]

        def order(table: int) -> None:
            if not files[table].exists():
                words.order(table, files[table])
            with lock:
                done[0] += 1
                job.progress("order", self.state.rows, done[0] / len(groups))

        each_table(order, len(groups), threads)
        for table, (name, path) in enumerate(zip(job.tables, files, strict=True)):
            size = path.stat().st_size // 8
            self.rows_of[name] = size + FIRST_ROW
            self._entry(f"vocab_{table}", "<i8", (size,), crc32_file(path))
        dtype = "<i4" if max((r or 0 for r in self.rows_of.values()), default=0) <= INT32_ROWS else "<i8"
        self._map(words, files, dtype)
        self._write_ids(dtype)
        keys.close()
        counts.close()

    def _read_codes(
        self, c: int, codes: ItemReader, bag_codes: list[ItemReader]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        a, b, width = int(self.index.rows[c]), int(self.index.rows[c + 1]), self.job.schema.bags.count(False)
        bags = [
            r(int(self.index.bag_items[k, c]), int(self.index.bag_items[k, c + 1])) for k, r in enumerate(bag_codes)
        ]
        return codes(a * width, b * width).reshape(b - a, width), bags

    def _code_readers(self) -> tuple[ItemReader, list[ItemReader]]:
        work = self.job.work
        return ItemReader(work / "codes.bin", "<i4"), [
            ItemReader(work / f"bag_{k}.codes.bin", "<i4") for k in self.job.layout.bag_places
        ]

    def _count(self) -> None:
        job, final = self.job, self.job.work / "counts.bin"
        if final.exists():
            return
        codes, bag_codes = self._code_readers()
        offsets = [ItemReader(job.out / f"bag_{k}.offsets.bin", "<i8") for k in job.layout.bag_places]

        def count(c: int) -> np.ndarray:
            a, b = int(self.index.rows[c]), int(self.index.rows[c + 1])
            train = self._split_of(a, b) == 0
            sizes = [np.diff(r(a, b + 1)) for r in offsets]
            return count_chunk(self.index, c, *self._read_codes(c, codes, bag_codes), job.schema.bags, train, sizes)

        out = ArrayFile(job.work / "counts.bin.tmp", "<u4")
        for c, counts in enumerate(_ahead(count, self.index.count, job.limits.threads)):
            out.append(counts)
            job.progress("count", int(self.index.rows[c + 1]), (c + 1) / self.index.count)
        out.sync()
        out.close()
        os.replace(job.work / "counts.bin.tmp", final)

    def _map(self, words: Vocabularies, files: list[Path], dtype: str) -> None:
        job, done = self.job, self.job.work / "map.done"
        if done.exists():
            return
        kind = np.dtype(dtype)
        with (job.work / "map.bin").open("w+b") as f:

            def write(place: int, rows: np.ndarray) -> None:
                data = np.ascontiguousarray(rows, kind).view(np.uint8).data
                at = place * kind.itemsize
                while len(data):
                    n = os.pwrite(f.fileno(), data, at)
                    data, at = data[n:], at + n

            each_table(lambda t: words.map(t, files[t], write), len(files), job.limits.threads)
            os.fsync(f.fileno())
        job.progress("map", self.state.rows, 1.0)
        write_atomically(done, b"")

    def _write_ids(self, dtype: str) -> None:
        job, index = self.job, self.index
        log = ChunkLog(job.work / "written")
        first = log.count()
        names = ["ids", *(f"bag_{k}.values" for k in job.layout.bag_places)]
        states = log.read(first - 1) if first else dict.fromkeys(names, (0, 0))
        files = [ArrayFile(job.out / f"{n}.bin", dtype, tuple(states[n])) for n in names]
        codes, bag_codes = self._code_readers()
        rows_of = ItemReader(job.work / "map.bin", dtype)
        bags = np.array(job.schema.bags, np.bool_)

        def translate(step: int) -> list[np.ndarray]:
            c = first + step
            base = index.keys[c] - index.keys[c, 0]
            mapped = rows_of(int(index.keys[c, 0]), int(index.keys[c, -1]))
            single, bag = self._read_codes(c, codes, bag_codes)
            out = np.empty(single.shape, dtype)
            apply_rows(single, base[:-1][~bags], mapped, MISSING, out)
            return [out, *(mapped[base[k] + b] for k, b in zip(job.layout.bag_places, bag, strict=True))]

        for step, arrays in enumerate(_ahead(translate, index.count - first, job.limits.threads)):
            for f, array in zip(files, arrays, strict=True):
                f.append(array)
                f.sync()
            log.commit(first + step, {n: f.state for n, f in zip(names, files, strict=True)})
            job.progress("write", int(index.rows[first + step + 1]), (first + step + 1) / index.count)
        self._entry("ids", dtype, (self.state.rows, job.schema.bags.count(False)), files[0].crc)
        for n, f in zip(names[1:], files[1:], strict=True):
            self._entry(n, dtype, (f.items,), f.crc)
        for f in files:
            f.close()

    # ------------------------------------------------------------------------------------------------ splits

    def _split_of(self, a: int, b: int) -> np.ndarray:
        """uint8 ``[b - a]``: the split (place in NAMES) of rows ``a..b``."""
        job, spec = self.job, self.job.split
        if spec.kind == "random":
            return random_splits(a, b - a, spec)
        if spec.kind == "time":
            reader = ItemReader(job.work / "times.bin", "<i8")
            out = time_splits(reader(a, b), self.state.last_day, spec)
            reader.close()
            return out
        rows = np.arange(a, b)
        if spec.kind == "last":
            ranges = last_ranges(self.state.rows, spec.valid, spec.test)
            return np.searchsorted([ranges["valid"].start, ranges["test"].start], rows, "right").astype(np.uint8)
        file = np.searchsorted(self.state.file_rows, rows, "right") - 1
        return np.array(job.input_splits, np.uint8)[file]

    def _splits(self) -> dict[str, list[int] | None]:
        """Write the rows of each split that is not a range; empty splits are left out."""
        step, rows = 1 << 20, self.state.rows
        files = {n: ArrayFile(self.job.out / f"split_{n}.bin", "<i8") for n in NAMES}
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for a in range(0, rows, step):
            split = self._split_of(a, min(a + step, rows))
            for k, n in enumerate(NAMES):
                found = np.flatnonzero(split == k) + a
                if found.size:
                    first.setdefault(n, int(found[0]))
                    last[n] = int(found[-1])
                files[n].append(found)
        out: dict[str, list[int] | None] = {}
        for n, f in files.items():
            f.sync()
            f.close()
            if n in first and last[n] - first[n] + 1 != f.items:
                out[n] = None
                self._entry(f"split_{n}", "<i8", (f.items,), f.crc)
                continue
            f.path.unlink()
            if n in first or (n == "train" and rows == 0):
                out[n] = [first.get(n, 0), last.get(n, -1) + 1]
        return out


def _ahead(work: Callable[[int], R], count: int, threads: int) -> Iterator[R]:
    """Results of ``work(0..count)`` in order, computed a little ahead by threads."""
    with ThreadPoolExecutor(threads, thread_name_prefix="dlrm-finish") as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for i in range(count):
                waiting.append(pool.submit(work, i))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
