"""Reading the input: blocks are parsed by threads and committed in order, one chunk at a time.

A commit appends to the arrays, syncs them and then renames one small file into place, which holds the position in the
input and the length and checksum of every array. A run that is killed goes on from the last commit; what it had
appended beyond is cut off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.arrays import ArrayFile
from dlrm.data.chunks import ChunkLog
from dlrm.data.errors import MalformedRow, ResumeMismatch
from dlrm.data.hashing import hashed_row
from dlrm.data.ids import RAW_MISSING, IdSpec
from dlrm.data.parsed import BadCell, Coded, Parsed, encode
from dlrm.data.schema import Schema
from dlrm.data.sources import Input, RawBlock
from embcache.kernels.jit import kernel

Progress = Callable[[str, int, float], None]
KEPT_REPORTS = 10


@dataclass
class State:
    """What a commit holds. ``at``: position in input file ``file`` after the chunk; ``line``: number of its next line;
    ``file_rows``: the first row of each file so far."""

    file: int = 0
    at: int = 0
    line: int = 0
    rows: int = 0
    bad: int = 0
    label_units: int = 0
    last_day: int = -(2**62)
    file_rows: list[int] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    arrays: dict[str, tuple[int, int]] = field(default_factory=dict)
    bag_items: list[int] = field(default_factory=list)
    parts: list[list[int]] = field(default_factory=list)


@dataclass
class Layout:
    """Which arrays a job writes while it reads: final ones in ``out``, the others in ``work``."""

    out: Path
    work: Path
    schema: Schema
    ids: IdSpec
    id_dtype: str

    @property
    def bag_places(self) -> list[int]:
        """Place of each bag feature among the features."""
        return [k for k, bag in enumerate(self.schema.bags) if bag]

    def files(self) -> dict[str, tuple[Path, str]]:
        """Name -> (path, dtype)."""
        coded = self.ids.kind == "vocab"
        files = {"dense": (self.out, "<f4"), "labels": (self.out, "<f4")}
        files["codes" if coded else "ids"] = (self.work, "<i4") if coded else (self.out, self.id_dtype)
        if self.schema.time is not None:
            files["times"] = (self.work, "<i8")
        if coded:
            files["keys"] = (self.work, "<i8")
        for k in self.bag_places:
            files[f"bag_{k}.offsets"] = (self.out, "<i8")
            name = f"bag_{k}.codes" if coded else f"bag_{k}.values"
            files[name] = (self.work, "<i4") if coded else (self.out, self.id_dtype)
        return {name: (folder / f"{name}.bin", dtype) for name, (folder, dtype) in files.items()}


class Ingest:
    """Reads all inputs into the arrays of a layout."""

    def __init__(self, inputs: list[Input], layout: Layout, chunks: ChunkLog, max_bad_rows: int, progress: Progress
                 ) -> None:  # fmt: skip
        self.inputs, self.layout, self.chunks = inputs, layout, chunks
        self.max_bad_rows, self.progress = max_bad_rows, progress
        done = chunks.count()
        self.state = State(**chunks.read(done - 1)) if done else State()
        if self.state.bad > max_bad_rows:
            raise ResumeMismatch(f"{layout.out}: {self.state.bad} malformed rows so far, more than {max_bad_rows}; "
                                 f"the first: {self.state.reports[0]}")  # fmt: skip
        self._next_chunk = done
        # The files of one run are few and small next to the input; their sizes tell how far a run is.
        self._sizes = [i.path.stat().st_size for i in inputs]

    def run(self, threads: int, chunk_bytes: int) -> State:
        """Read what is left; returns the last commit's state."""
        files = {n: ArrayFile(path, dtype, tuple(self.state.arrays.get(n, (0, 0))))  # type: ignore[arg-type]
                 for n, (path, dtype) in self.layout.files().items()}  # fmt: skip
        for k in self.layout.bag_places:
            if files[f"bag_{k}.offsets"].bytes == 0:
                files[f"bag_{k}.offsets"].append(np.zeros(1, np.int64))
        try:
            for file, end, parsed, coded in self._results(threads, chunk_bytes):
                self._commit(files, file, end, parsed, coded)
        finally:
            for f in files.values():
                f.close()
        self.state.arrays = {n: f.state for n, f in files.items()}
        return self.state

    def _results(self, threads: int, chunk_bytes: int) -> Iterator[tuple[int, int, Parsed, Coded | list[np.ndarray]]]:
        waiting: deque[tuple[int, int, Future[tuple[Parsed, Any]]]] = deque()
        pool = ThreadPoolExecutor(threads, thread_name_prefix="dlrm-parse")
        try:
            for file, block in self._blocks(chunk_bytes):
                waiting.append((file, block.end, pool.submit(self._work, file, block)))
                if len(waiting) > threads:
                    f, end, result = waiting.popleft()
                    yield f, end, *result.result()
            while waiting:
                f, end, result = waiting.popleft()
                yield f, end, *result.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _blocks(self, chunk_bytes: int) -> Iterator[tuple[int, RawBlock]]:
        first, start = self.state.file, self.state.at
        for file in range(first, len(self.inputs)):
            for block in self.inputs[file].blocks(start if file == first else 0, chunk_bytes):
                yield file, block

    def _work(self, file: int, block: RawBlock) -> tuple[Parsed, Coded | list[np.ndarray]]:
        parsed, ids = self.inputs[file].parse(block), self.layout.ids
        schema = self.layout.schema
        if ids.kind == "vocab":
            return parsed, encode(parsed, schema)
        return parsed, _direct_ids(parsed, schema, ids, self.layout.id_dtype)

    def _commit(self, files: dict[str, ArrayFile], file: int, end: int, parsed: Parsed,
                coded: Coded | list[np.ndarray]) -> None:  # fmt: skip
        s = self.state
        while len(s.file_rows) <= file:
            s.file_rows.append(s.rows)
            s.line = self.inputs[file].first_line
        self._tolerate(file, parsed)
        files["dense"].append(parsed.dense)
        files["labels"].append(parsed.labels)
        if "times" in files:
            files["times"].append(parsed.times)
            s.last_day = max(s.last_day, int(parsed.times.max()) // 86400 if parsed.rows else s.last_day)
        parts = coded.codes if isinstance(coded, Coded) else coded[0]
        files["codes" if isinstance(coded, Coded) else "ids"].append(parts)
        bags = coded.bag_codes if isinstance(coded, Coded) else coded[1:]
        kind = "codes" if isinstance(coded, Coded) else "values"
        for k, values, sizes in zip(self.layout.bag_places, bags, parsed.bag_sizes, strict=True):
            files[f"bag_{k}.offsets"].append(files[f"bag_{k}.{kind}"].items + np.cumsum(sizes))
            files[f"bag_{k}.{kind}"].append(values)
        s.bag_items = [files[f"bag_{k}.{kind}"].items for k in self.layout.bag_places]
        if isinstance(coded, Coded):
            for dictionary in coded.dictionaries:
                files["keys"].append(dictionary)
            s.parts = coded.parts.tolist()
        for f in files.values():
            f.sync()
        s.file, s.at, s.line, s.rows = file, end, s.line + parsed.lines, s.rows + parsed.rows
        s.label_units += int(np.rint(parsed.labels.astype(np.float64) * 2**24).astype(np.int64).sum())
        s.arrays = {n: f.state for n, f in files.items()}
        self.chunks.commit(self._next_chunk, vars(s))
        self._next_chunk += 1
        share = (sum(self._sizes[:file]) + self.inputs[file].consumed) / max(sum(self._sizes), 1)
        self.progress("read", s.rows, min(share, 1.0))

    def _tolerate(self, file: int, parsed: Parsed) -> None:
        s = self.state
        s.bad += parsed.n_bad
        reports = [self._error(file, bad) for bad in parsed.bad]
        if s.bad > self.max_bad_rows:
            # The row that is one too many, if its report was kept; else the last one that was.
            place = self.max_bad_rows - (s.bad - parsed.n_bad)
            raise reports[min(place, len(reports) - 1)]
        s.reports += [str(r) for r in reports[: KEPT_REPORTS - len(s.reports)]]

    def _error(self, file: int, bad: BadCell) -> MalformedRow:
        return MalformedRow(
            str(self.inputs[file].path), self.state.line + bad.line, bad.column, bad.expected, bad.found
        )


def _direct_ids(parsed: Parsed, schema: Schema, ids: IdSpec, dtype: str) -> list[np.ndarray]:
    # The ids themselves where no vocabulary is needed: [n, S], then the values of each bag.
    out = np.empty((parsed.rows, parsed.keys.shape[0]), dtype)
    bags: list[np.ndarray] = []
    single = 0
    for table, is_bag in zip(schema.tables, schema.bags, strict=True):
        size = ids.table_size(table) if ids.kind == "hash" else 0
        if is_bag:
            keys = parsed.bag_keys[len(bags)]
            bags.append(np.empty(keys.shape[0], dtype))
            _hash_keys(keys, np.zeros(0, np.bool_), size, bags[-1])
        else:
            _hash_keys(parsed.keys[single], parsed.missing[single], size, out[:, single])
            single += 1
    return [out, *bags]


@kernel
def _hash_keys(keys: np.ndarray, missing: np.ndarray, size: int, out: np.ndarray) -> None:
    # size 0: the key as it is.
    for i in range(keys.shape[0]):
        if missing.shape[0] > 0 and missing[i]:
            out[i] = 0 if size > 0 else RAW_MISSING
        else:
            out[i] = hashed_row(keys[i], size) if size > 0 else keys[i]
