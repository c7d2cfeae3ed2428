"""Vocabularies in bounded memory: from the chunks' dictionaries to rows by frequency, then value.

Every chunk left its distinct keys, in 32 parts by hash, and codes into them. Three steps, none of which holds more
than the memory budget: ``count`` the codes of training rows; for every table add up its keys' counts, part by part if
they do not fit together, and ``order`` the frequent ones (by an external sort if need be); ``map`` each dictionary to
rows. The outcome does not depend on chunks, threads or budget.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dlrm.data.chunks import ChunkIndex, ItemReader
from dlrm.data.errors import MemoryBudgetExceeded
from dlrm.data.hashing import mix64
from dlrm.data.ids import FIRST_ROW
from dlrm.data.keytable import KeyTable, TableFull, keys_within
from dlrm.data.parsed import PART_SHIFT, PARTS
from embcache.kernels.jit import kernel

SORT_BYTES = 64  # a row being sorted: key, count, their order and copies
SAMPLE = 256


def count_chunk(
    index: ChunkIndex, chunk: int, codes: np.ndarray, bag_codes: list[np.ndarray], bags: tuple[bool, ...],
    train: np.ndarray, bag_sizes: list[np.ndarray],
) -> np.ndarray:  # fmt: skip
    """uint32 counts of a chunk's dictionary entries in training rows (bool ``[n]``), in the order of keys.bin."""
    base = index.keys[chunk] - index.keys[chunk, 0]
    out = np.zeros(int(base[-1]), np.uint32)
    single = bag = 0
    for f, is_bag in enumerate(bags):
        part = out[base[f] : base[f + 1]]
        if is_bag:
            _count(bag_codes[bag], np.repeat(train, bag_sizes[bag]), part)
            bag += 1
        else:
            _count(codes[:, single], train, part)
            single += 1
    return out


class Vocabularies:
    """Orders and maps the tables of one job.

    ``groups``: for every table the features (places in the schema) that use it. ``keys``, ``counts``: readers of
    keys.bin and counts.bin.
    """

    def __init__(self, index: ChunkIndex, groups: list[list[int]], keys: ItemReader, counts: ItemReader,
                 min_count: int, memory_bytes: int, work: Path) -> None:  # fmt: skip
        self.index, self.groups, self.keys, self.counts = index, groups, keys, counts
        self.min_count, self.limit, self.work = min_count, keys_within(memory_bytes), work
        self.sort_rows = max(SAMPLE, memory_bytes // SORT_BYTES)

    def order(self, table: int, out: Path) -> None:
        """Write a table's keys (int64) in row order; the file appears complete or not at all."""
        passes = 1
        while True:
            try:
                runs = [self._frequent(table, p, passes) for p in range(passes)]
                break
            except TableFull:
                passes *= 2
                if passes > PARTS:
                    raise MemoryBudgetExceeded(
                        f"a vocabulary of more than {self.limit * PARTS} keys: raise the memory budget"
                    ) from None
        temporary = out.with_name(out.name + ".tmp")
        with temporary.open("wb") as f:
            for keys in _merge(runs, self.sort_rows):
                f.write(keys.astype("<i8").data)
            f.flush()
            os.fsync(f.fileno())
        for run in runs:
            run.remove()
        os.replace(temporary, out)

    def _slices(self, table: int, low: int, high: int) -> Iterator[tuple[int, int]]:
        for chunk in range(self.index.count):
            for f in self.groups[table]:
                yield self.index.part(chunk, f, low, high)

    def _frequent(self, table: int, this: int, passes: int) -> Run:
        low, high = PARTS * this // passes, PARTS * (this + 1) // passes
        sums = KeyTable(self.limit)
        for start, stop in self._slices(table, low, high):
            sums.add(self.keys(start, stop), self.counts(start, stop))
        keys, counts = sums.at_least(self.min_count)
        del sums
        order = by_count_then_key(keys, counts)
        run = Run(keys[order], counts[order])
        return run if passes == 1 else run.spill(self.work / f"run_{table}_{this}")

    def map(self, table: int, vocabulary: Path, write: Callable[[int, np.ndarray], None]) -> None:
        """Call ``write(place in keys.bin, rows int64)`` for all dictionary entries of a table."""
        size, passes = vocabulary.stat().st_size // 8, 1
        while size > self.limit * passes * 0.8 and passes < PARTS:
            passes *= 2
        reader = ItemReader(vocabulary, "<i8")
        for this in range(passes):
            low, high = PARTS * this // passes, PARTS * (this + 1) // passes
            rows = KeyTable(1 << 62)
            for start in range(0, size, 1 << 18):
                keys = reader(start, min(start + (1 << 18), size))
                places = np.arange(start, start + keys.shape[0], dtype=np.int64) + FIRST_ROW
                rows.add(keys, places if passes == 1 else np.where(_within(keys, low, high), places, 0))
            for start, stop in self._slices(table, low, high):
                write(start, rows.get(self.keys(start, stop)))
        reader.close()


class Run:
    """Keys and counts, the most frequent first, equal counts by key; in memory or spilled to two files."""

    def __init__(self, keys: np.ndarray, counts: np.ndarray, path: Path | None = None) -> None:
        self.keys, self.counts, self.path = keys, counts, path

    def spill(self, path: Path) -> Run:
        """Write the run out and map it."""
        if self.keys.size == 0:
            return self
        for name, array in (("keys", self.keys), ("counts", self.counts)):
            array.tofile(path.with_suffix(f".{name}"))
        return Run(np.memmap(path.with_suffix(".keys"), np.int64, "r"),
                   np.memmap(path.with_suffix(".counts"), np.int64, "r"), path)  # fmt: skip

    def before(self, key: int, count: int) -> int:
        """Number of entries that come before ``(count, key)``."""
        low, high = _first_below(self.counts, count + 1), _first_below(self.counts, count)
        return low + int(np.searchsorted(self.keys[low:high], key))

    def remove(self) -> None:
        """Delete the files."""
        if self.path is not None:
            self.path.with_suffix(".keys").unlink()
            self.path.with_suffix(".counts").unlink()


def by_count_then_key(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Places (int64) in order of falling count, equal counts by key."""
    by_key = np.argsort(keys)
    below = counts.max(initial=0) - counts[by_key]
    if below.max(initial=0) < 1 << 16:  # numpy sorts 16-bit numbers by radix
        below = below.astype(np.uint16)
    return by_key[np.argsort(below, kind="stable")]


def _first_below(counts: np.ndarray, bound: int) -> int:
    # First place of a descending array whose value is < bound.
    low, high = 0, counts.shape[0]
    while low < high:
        middle = (low + high) // 2
        if counts[middle] >= bound:
            low = middle + 1
        else:
            high = middle
    return low


def _merge(runs: list[Run], most: int) -> Iterator[np.ndarray]:
    """Keys of all runs in one order, in pieces of about ``most`` rows: every run is cut at splitters from samples."""
    if len(runs) == 1:
        yield runs[0].keys
        return
    total = sum(r.keys.shape[0] for r in runs)
    step = max(1, min(most, total) // (4 * max(len(runs), 1)))
    keys = np.concatenate([np.asarray(r.keys[::step]) for r in runs])
    counts = np.concatenate([np.asarray(r.counts[::step]) for r in runs])
    order = by_count_then_key(keys, counts)
    cuts = order[:: max(1, most // (2 * step))][1:]
    starts = [0] * len(runs)
    for cut in [*cuts, -1]:
        stops = [r.before(int(keys[cut]), int(counts[cut])) if cut >= 0 else r.keys.shape[0] for r in runs]
        piece = [(r.keys[a:b], r.counts[a:b]) for r, a, b in zip(runs, starts, stops, strict=True)]
        k, c = (np.concatenate([np.asarray(p[i]) for p in piece]) for i in (0, 1))
        yield k[by_count_then_key(k, c)]
        starts = stops


def each_table(work: Callable[[int], None], tables: int, threads: int) -> None:
    """Run ``work(table)`` for all tables in a few threads; the first error is raised."""
    with ThreadPoolExecutor(threads, thread_name_prefix="dlrm-vocabulary") as pool:
        for future in [pool.submit(work, t) for t in range(tables)]:
            future.result()


@kernel
def _count(codes: np.ndarray, train: np.ndarray, out: np.ndarray) -> None:
    for i in range(codes.shape[0]):
        if train[i] and codes[i] >= 0:
            out[codes[i]] += 1


@kernel
def _within(keys: np.ndarray, low: int, high: int) -> np.ndarray:
    out = np.empty(keys.shape[0], np.bool_)
    for i in range(keys.shape[0]):
        part = np.int64(mix64(np.uint64(keys[i])) >> PART_SHIFT)
        out[i] = low <= part < high
    return out


@kernel
def apply_rows(codes: np.ndarray, base: np.ndarray, rows: np.ndarray, missing_row: int, out: np.ndarray) -> None:
    """``out[i, s] = rows[base[s] + codes[i, s]]``, or the missing row where the code is -1."""
    for i in range(codes.shape[0]):
        for s in range(codes.shape[1]):
            code = codes[i, s]
            out[i, s] = missing_row if code < 0 else rows[base[s] + code]
