"""Rows on disk: an overlay of append-only segments over a base in LMDB.

Random updates are what LMDB is slow at, and py-lmdb holds the interpreter, so rows that leave the cache are appended to
segment files (``overlay.py``), found through an index in memory, and merged into the base later, sorted, by a process
in the background (``merge.py``). Reads look into the overlay, then walk the base's pages without LMDB
(``basefile.py``); neither holds the interpreter.

A generation is what ``freeze`` describes: the segments that are not yet merged. The base runs ahead of no generation
that may be asked for (``sealed``'s horizon), and until a merge is whole its segments stay, so a crash needs no repair:
``restore`` of a description gives its rows, bit for bit, whatever had been going on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np

from ..config import TableConfig
from ..errors import BadConfig, CorruptStore, ForkError, NotSupported, StoreLocked
from ..lock import FolderLock
from ..statefile import sync_folder
from . import compact, scanning
from .base import Block, Copying, Moved
from .basefile import FORKED, BaseFile, Snapshot
from .changes import Changes
from .counters import Counters
from .description import described, parsed, trimmed
from .fold import Folds
from .merge import Merger
from .merge_rows import distinct
from .moving import Mover
from .overlay import Overlay
from .segment import Segment
from .spares import Spares

__all__ = ["Lmdb", "StaleDescription"]

_LINEAGE = 10_000  # generation numbers remembered in a description


def _nothing() -> None:  # by name, so that a description can be pickled
    """Nobody waits for merges."""


class StaleDescription(CorruptStore):
    """While a reader opened a generation, the writer went past it: read the manifest and restore again."""


class Lmdb(Copying):
    """Rows in a folder on disk, of any number and any int64 key.

    Args:
        path: the folder; made when it is first opened for writing.
        readonly: look at committed generations, beside a writer or without one; nothing is written.
        overlay_bytes: memory that the index of rows not yet merged may take before a merge begins (about 20 bytes a
            row; rows not yet committed cannot be merged and stay beyond it). A merge also begins when their segments
            take 32 times as much on the disk.
        changes_bytes: disk space for the lists of keys that ``changed_since`` needs.

    After ``open`` the tier is empty until ``restore``. Every method may be called from any thread; a process forked
    from the owner gets ForkError.

    >>> Lmdb("runs/store", overlay_bytes=0)
    Traceback (most recent call last):
    ...
    embcache.errors.BadConfig: tiers.Lmdb: overlay_bytes = 0, must be an integer >= 1
    """

    _writers: ClassVar[WeakValueDictionary[tuple[int, str], Lmdb]] = WeakValueDictionary()

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        readonly: bool = False,
        overlay_bytes: int = 128 << 20,
        changes_bytes: int = 256 << 20,
    ) -> None:
        for what, value in (("overlay_bytes", overlay_bytes), ("changes_bytes", changes_bytes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadConfig(f"tiers.Lmdb: {what} = {value!r}, must be an integer >= 1")
        if not os.fspath(path):
            raise BadConfig("tiers.Lmdb: path = '', must name a folder")
        self.folder = Path(path).absolute()  # the process may change its directory
        self.readonly, self.overlay_bytes, self.changes_bytes = readonly, overlay_bytes, changes_bytes
        self.on_merged: Callable[[], None] = _nothing
        self._merger: Merger | None = None
        self._lock: FolderLock | None = None
        self._reading: compact.ReaderLock | None = None
        self._pid = 0

    def fresh(self) -> Lmdb:
        """An unopened tier of the same description; pickling gives one too."""
        return _make(self.folder, self.readonly, self.overlay_bytes, self.changes_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self.folder, self.readonly, self.overlay_bytes, self.changes_bytes)

    def reader(self) -> Lmdb:
        """An unopened read-only tier on the same folder."""
        return Lmdb(self.folder, readonly=True)

    # -- opening and closing

    def open(self, tables: Sequence[TableConfig]) -> None:
        """Open or make the files. StoreLocked: another process writes here; CorruptStore, FormatVersion: nothing was
        written; BadConfig: the address space is limited too much."""
        if self._merger is not None:
            raise BadConfig(f"this Lmdb({str(self.folder)!r}) already serves another store; give each store its own")
        self._row_bytes = [t.row_bytes for t in tables]
        self._segments = self.folder / "segments"
        self._changes = Changes(self.folder / "changes", self.changes_bytes)
        try:
            base = self._claim()
        except BaseException:
            self._lock = self._reading = None
            raise
        prefix, numbers = f"{time.time_ns():x}", itertools.count()
        self._overlays = [
            Overlay(t, size, lambda t=t: self._segments / f"{t:04d}-{prefix}-{next(numbers):06x}.rows", self._spares)  # type: ignore[misc]
            for t, size in enumerate(self._row_bytes)
        ]
        self._mover = Mover(self._overlays)
        self._counters = Counters(*_COUNTERS)
        self._gate = compact.Gate()
        self._held: Snapshot | None = None
        self._swept, self._generation = False, 0  # these and the next two are guarded by the merger's lock
        self._lineage: list[int] = []
        self._abandoned: list[tuple[int, Path]] = []
        self._pid = os.getpid()
        self._merger = Merger(
            self.folder,
            base,
            self._overlays,
            0,  # nothing is merged before the first restore takes the base over
            self.overlay_bytes,
            self._changes,
            self._spares,
            lambda: self.on_merged(),
            self._counters.add,
        )

    def _claim(self) -> BaseFile:
        """The base, with the folder locked against what must not happen meanwhile."""
        if self.readonly:
            self._reading = compact.ReaderLock(self.folder)
            self._spares = Spares(self.folder, keep=False)
            return BaseFile.open(self.folder, self._row_bytes, create=False)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock.take(self.folder)
        place = os.getpid(), str(self.folder.resolve())
        other = self._writers.get(place)
        if other is not None and other._merger is not None:  # the lock is the process's, not this object's
            raise StoreLocked(str(self.folder), os.getpid(), socket.gethostname())
        # a reader that came before the file which readers lock was there cannot be seen
        seen = (self.folder / compact.ReaderLock.NAME).exists() or not (self.folder / "data.mdb").exists()
        base = BaseFile.open(self.folder, self._row_bytes, create=True)
        self._spares = Spares(self.folder, keep=seen)
        self._spares.sweep()
        self._segments.mkdir(exist_ok=True)
        self._changes.folder.mkdir(exist_ok=True)
        compact.ReaderLock.make(self.folder)
        self._writers[place] = self
        return base

    def _check(self, writing: bool = False) -> Merger:
        merger = self._merger
        if merger is None:
            raise RuntimeError(f"the store in {self.folder} is closed")
        if os.getpid() != self._pid:
            raise ForkError(f"the store in {self.folder} was opened by process {self._pid}: {FORKED}")
        if writing and self.readonly:
            raise NotSupported(f"the store in {self.folder} was opened with readonly=True")
        return merger

    def close(self) -> None:
        """Wait for a merge that runs, and close the files. What was not frozen is gone."""
        merger = self._merger
        if merger is None:
            return
        if os.getpid() == self._pid:
            self.wait()
            if self._held is not None:
                self._held.close()
            for overlay in self._overlays:
                for segment in overlay.segments:
                    segment.close()
                    if segment.generation == 0:
                        segment.path.unlink(missing_ok=True)
            self._spares.relieve()
            if not self.readonly:
                self._spares.sweep()
            merger.base.close()
        self._merger, self._held, self._lock, self._reading = None, None, None, None
        self._overlays = []

    # -- rows

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[Snapshot]:
        if self._held is not None:
            yield self._held
            return
        with self._gate, self._check().base.snapshot() as snapshot:
            yield snapshot

    def read(self, table: int, keys: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Fill ``out`` with the rows that are there; bool [n] says which. CorruptStore if the base is damaged."""
        merger = self._check()
        began = time.perf_counter()
        # first the overlay, then the filter of the base's keys, then a snapshot: what a merge moves from the overlay to
        # the base is seen in one of them, and passes the filter before the base holds it (presence.py)
        ordinals, view = self._overlays[table].look(keys)
        state, found = self._overlays[table].fill(ordinals, view, out)
        if found < len(keys) and merger.base_used:
            asked = merger.presence.screen(table, keys, state)
            if asked:
                with self._snapshot() as snapshot:
                    below = snapshot.fill(table, keys, state, out, asked)
                self._counters.add(rows_asked_base=asked, rows_read_base=below)
                found += below
        self._counters.add(
            rows_read=len(keys),
            rows_found=found,
            bytes_read=found * out.shape[1] if out.ndim == 2 else 0,
            seconds_read=time.perf_counter() - began,
        )
        return state == 1

    def write(self, table: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """Insert or replace rows. StorageFull: nothing of the call is visible."""
        self._check(writing=True)
        if len(keys):
            self._append(table, keys, np.ascontiguousarray(rows))

    def _append(self, table: int, keys: np.ndarray, rows: np.ndarray | None) -> None:
        began = time.perf_counter()
        written = self._overlays[table].append(np.ascontiguousarray(keys, np.int64), rows)
        self._counters.add(rows_written=len(keys), bytes_written=written, seconds_write=time.perf_counter() - began)

    def read_into(self, parts: Sequence[Moved]) -> None:
        """``read`` for several tables, straight into slots."""
        merger = self._check()
        parts = [part for part in parts if len(part.keys)]
        if not merger.base.walking:
            return super().read_into(parts)
        began = time.perf_counter()
        parts = sorted(parts, key=lambda part: part.table)
        read = self._mover.read(parts, merger.presence if merger.base_used else None, self._snapshot)
        self._counters.add(
            rows_read=sum(len(part.keys) for part in parts),
            rows_found=read.found,
            rows_asked_base=read.asked,
            rows_read_base=read.below,
            bytes_read=sum(int(np.count_nonzero(part.found)) * part.slab.shape[1] for part in parts),
            seconds_read=time.perf_counter() - began,
        )

    def write_from(self, parts: Sequence[Moved]) -> None:
        """``write`` for several tables, straight from slots. StorageFull: nothing of the call is visible."""
        self._check(writing=True)
        began = time.perf_counter()
        parts = sorted((part for part in parts if len(part.keys)), key=lambda part: part.table)
        for part in parts:
            part.found[:] = False
        written = self._mover.write(parts)
        for part in parts:
            part.found[:] = True
        rows = sum(len(part.keys) for part in parts)
        self._counters.add(rows_written=rows, bytes_written=written, seconds_write=time.perf_counter() - began)

    def offer(self, table: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """Clean rows are here already."""

    def delete(self, table: int, keys: np.ndarray) -> None:
        """The keys are not there from now on."""
        self._check(writing=True)
        keys = np.ascontiguousarray(keys, np.int64)
        there = self._states(table, keys) == 1
        if there.any():
            self._append(table, keys[there], None)

    def _states(self, table: int, keys: np.ndarray) -> np.ndarray:
        ordinals, view = self._overlays[table].look(keys)
        state, _ = self._overlays[table].fill(ordinals, view, None)
        asked = self._check().presence.screen(table, keys, state)
        if asked:
            with self._snapshot() as snapshot:
                snapshot.fill(table, keys, state, None, asked)
        return state

    def scan(self, table: int, block: int) -> Iterator[Block]:
        """(keys, rows) of all rows as they are when the first block is asked for, ascending as unsigned numbers.

        A read transaction is held meanwhile, so that merges make the file grow until the end of the scan.
        """
        self._check()
        overlay = self._overlays[table]
        entries = overlay.entries()
        with self._snapshot() as snapshot:
            yield from scanning.merged(overlay, entries, snapshot, table, block)

    def count(self, table: int) -> int:
        """Rows that ``scan`` would give."""
        self._check()
        overlay = self._overlays[table]
        keys, ordinals, view = overlay.entries()
        live = int((overlay.fill(ordinals, view, None)[0] == 1).sum())
        with self._snapshot() as snapshot:
            covered = snapshot.fill(table, keys, np.zeros(len(keys), np.uint8), None)
            return snapshot.count(table) - covered + live

    def changed_since(self, table: int, generation: int) -> np.ndarray | None:
        """Keys (int64, ascending as unsigned numbers, each once) written or deleted after ``generation``; a key may be
        among them whose row is the same again. None: not known any more, or not a generation that led to this one."""
        merger = self._check()
        with merger.state:
            known = generation == 0 or generation in self._lineage
            overlay = self._overlays[table]
            with overlay.writing:
                newer = [s for s in overlay.segments if s.generation == 0 or s.generation > generation]
                lists = [s.keys()[0].view(np.uint64) for s in newer]
            merged = merger.merged
        if not known:
            return None
        if generation < merged:
            older = self._changes.since(table, generation, merged)
            if older is None:
                return None
            lists += older
        if not lists:
            return np.zeros(0, np.int64)
        return distinct(np.concatenate(lists)).view(np.int64)

    # -- generations

    def freeze(self, number: int) -> dict[str, Any]:
        """What was written so far is generation ``number``: its description as JSON. Nothing is on the disk for certain
        before ``sync``. The same number may be frozen again, after a commit that failed."""
        self.begin(number, [0] * len(self._overlays))
        return self.describe()

    def begin(self, number: int, late: Sequence[int]) -> None:
        """``freeze`` for a generation to which ``land`` will add so many rows of each table."""
        merger = self._check(writing=True)
        with merger.state:
            for overlay, rows in zip(self._overlays, late, strict=True):
                overlay.freeze(number, rows)
            self._generation = number
            if not self._lineage or self._lineage[-1] != number:
                self._lineage = [*self._lineage[-_LINEAGE:], number]

    def land(self, table: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """The rows of a table that ``begin`` was told of, at once. StorageFull: none of them is visible."""
        self._check(writing=True)
        began = time.perf_counter()
        written = self._overlays[table].land(np.ascontiguousarray(keys, np.int64), rows)
        self._counters.add(rows_written=len(keys), bytes_written=written, seconds_write=time.perf_counter() - began)

    def abandon(self) -> None:
        """What has not landed will not."""
        for overlay in self._overlays:
            overlay.abandon()

    def describe(self) -> dict[str, Any]:
        """The generation frozen last, as JSON."""
        merger = self._check(writing=True)
        with merger.state:
            chain = [s for overlay in self._overlays for s in overlay.segments if s.generation]
            return described(self._generation, merger.merged, self._lineage, [s.describe() for s in chain])

    def sync(self) -> None:
        """Everything frozen is on the disk afterwards. StorageFull where there is no room; it can be tried again."""
        merger = self._check(writing=True)
        with merger.state:
            waiting = [s for o in self._overlays for s in o.segments if s.generation and not s.synced]
        for segment in waiting:
            segment.sync()
        self._spares.fit()
        if waiting:
            sync_folder(self._segments)
            sync_folder(self.folder)

    def sealed(self, number: int, horizon: int, kept: Sequence[int] = ()) -> None:
        """The manifest names ``number``, and nothing before ``horizon`` will be asked for: a merge may begin.

        ``kept``: all numbers that may be asked for. Where an old one among them holds merges back, versions of rows
        that none of them needs are dropped; without it, the disk fills with every version since.
        """
        merger = self._check(writing=True)
        with merger.state:
            merger.horizon, merger.kept = min(horizon, number), tuple(kept)
            gone = [path for last, path in self._abandoned if last < merger.horizon]
            self._abandoned = [(last, path) for last, path in self._abandoned if last >= merger.horizon]
        for path in gone:
            path.unlink(missing_ok=True)
        if merger.failure is not None:
            warnings.warn(f"{self.folder}: the last merge failed and is tried again: {merger.failure}", stacklevel=2)
        if merger.due():
            merger.start(wait=False)

    def trimmed(self, description: dict[str, Any]) -> dict[str, Any]:
        """A description of the segments that hold the same rows now, after merges."""
        short = trimmed(description, self._check().merged)
        return {**short, "segments": Folds(self._segments).resolve(short["segments"])}

    def restore(self, description: dict[str, Any] | None, keep: Sequence[dict[str, Any]] = ()) -> None:
        """The rows are exactly those of a description (None: there were never any).

        ``keep``: descriptions of other generations that may be asked for; the first restore after ``open`` removes
        segments that none of them names. Raises CorruptStore, FormatVersion (the tier stays as it was);
        StaleDescription for a reader.
        """
        merger = self._check()
        merger.wait()
        told = parsed(description, self.folder, len(self._row_bytes))
        snapshot = merger.base.snapshot()
        try:
            seal, merged = snapshot.seal, snapshot.merged
            self._check_base(told, seal, merged)
            chains = self._load(told, merged)
        except BaseException:
            snapshot.close()
            raise
        with merger.state:
            self._leave(chains)
            for overlay, chain in zip(self._overlays, chains, strict=True):
                overlay.replace(chain)
            self._generation = told["generation"]
            merger.horizon, merger.kept, merger.merged, merger.base_used = 0, (), merged, seal > 0
            self._lineage = list(told["lineage"])
            other = self.readonly and not merger.presence.serves(snapshot)
            if other:
                merger.presence.drop()  # no read may ask the next snapshot's filter and then look at this one
            held, self._held = self._held, snapshot if self.readonly else None
            if other:
                merger.presence.load(snapshot)
        if held is not None:
            held.close()
        if not self.readonly:
            snapshot.close()
            if not self._swept:
                merger.owner = merger.base.claim()
                with merger.base.snapshot() as mine:  # nobody else changes the base or its filter from here on
                    merger.presence.load(mine)
                self._sweep([told, *keep], merged)
                self._swept = True

    def _check_base(self, told: dict[str, Any], seal: int, merged: int) -> None:
        number = told["generation"]
        if seal > number:
            error = StaleDescription if self.readonly else CorruptStore
            raise error(
                f"{self.folder}: generation {number} is asked for, but rows up to generation {seal} are merged already"
            )
        if merged < told["merged"]:
            raise CorruptStore(
                f"{self.folder}/data.mdb holds generation {merged}, the manifest expects {told['merged']} or newer"
            )

    def _load(self, told: dict[str, Any], merged: int) -> list[list[Segment]]:
        """The segments of each table that the base does not hold yet, oldest first."""
        there = {s.path.name: s for o in self._overlays for s in o.segments if s.generation}
        chains: list[list[Segment]] = [[] for _ in self._row_bytes]
        later = [s for s in told["segments"] if int(s["generation"]) > merged]
        for one in Folds(self._segments).resolve(later):
            name, t = str(one["file"]), int(one["table"])
            known = there.get(name)
            if known is not None and known.describe() == one:
                chains[t].append(known)
                continue
            try:
                chains[t].append(Segment.load(self._segments, one, self._row_bytes[t], 0))
            except FileNotFoundError:
                error = StaleDescription if self.readonly else CorruptStore
                raise error(f"{self._segments / name} is missing") from None
        return chains

    def _leave(self, chains: list[list[Segment]]) -> None:
        """Segments that are in no chain any more: open ones go, frozen ones once nothing can ask for them."""
        staying = {s.path for chain in chains for s in chain}
        self._abandoned = [(last, path) for last, path in self._abandoned if path not in staying]
        for overlay in self._overlays:
            for segment in overlay.segments:
                if segment.path in staying:
                    continue
                segment.close()
                if segment.generation == 0:
                    segment.path.unlink(missing_ok=True)
                else:
                    self._abandoned.append((self._generation, segment.path))

    def _sweep(self, told: Sequence[dict[str, Any]], merged: int) -> None:
        folds = Folds(self._segments)
        later = [[s for s in one["segments"] if int(s["generation"]) > merged] for one in told]
        named = {str(s["file"]) for chain in later for s in folds.resolve(chain)}
        for path in self._segments.iterdir():
            if path.name not in named and path.suffix == ".rows":
                path.unlink(missing_ok=True)
        folds.sweep(named)
        self._changes.sweep(merged)
        self._check().presence.sweep()

    # -- merging

    def merge(self, wait: bool = True) -> None:
        """Merge what may be merged, now. ``wait``: until it is done; a failure of it is raised."""
        self._check(writing=True).start(wait)

    def wait(self) -> None:
        """Until no merge runs."""
        if self._merger is not None:
            self._merger.wait()

    # -- looking after

    def stats(self) -> dict[str, float]:
        """Counters since it was opened, and bytes: overlay_rows, overlay_bytes, index_bytes (memory), filter_bytes
        (memory, and as much on the disk), base_bytes, spare_bytes (files kept to be written over)."""
        merger = self._check()
        base, presence = merger.base, merger.presence
        overlays = self._overlays
        return {
            **self._counters.values,
            "overlay_rows": float(sum(len(o) for o in overlays)),
            "overlay_bytes": float(sum(o.bytes for o in overlays)),
            "index_bytes": float(sum(o.index_bytes for o in overlays)),
            "filter_bytes": float(presence.nbytes),
            "base_bytes": float(base.pages * base.page_size),
            "spare_bytes": float(self._spares.nbytes),
        }

    def verify(self) -> Iterator[str]:
        """A line for each thing that is not what was written; all rows are read."""
        self._check()
        for overlay in self._overlays:
            for segment in list(overlay.segments):
                try:
                    segment.verify()
                except CorruptStore as error:
                    yield str(error)
        yield from self._changes.problems()
        with self._snapshot() as snapshot:
            for t, size in enumerate(self._row_bytes):
                yield from scanning.problems(snapshot, t, size)

    def compact(self) -> None:
        """Merge what may be merged and write the base anew without gaps. NotSupported while others read it."""
        self.merge()
        merger = self._check(writing=True)
        with self._gate.closed():
            merger.base = compact.rewrite(merger.base, self.folder, self._row_bytes)
            merger.owner = merger.base.claim()
        merger.renew_presence()

    def info(self) -> dict[str, Any]:
        """For people: generation, what is merged, rows and bytes; ``filter_keys``: about how many keys the filter of
        the base's keys holds (None: there is none until the next merge, or ``compact``)."""
        merger = self._check()
        keyfilter = merger.presence.filter
        with self._snapshot() as snapshot:
            rows = [snapshot.count(t) for t in range(len(self._row_bytes))]
            seal = snapshot.seal
        return {
            "generation": self._generation,
            "merged": merger.merged,
            "seal": seal,
            "base_rows": rows,
            "overlay_keys": [len(o) for o in self._overlays],
            "filter_keys": None if keyfilter is None else len(keyfilter),
            "segments": sum(len(o.segments) for o in self._overlays),
            "last_merge_failure": None if merger.failure is None else str(merger.failure),
            **self.stats(),
        }


def _make(path: Path, readonly: bool, overlay_bytes: int, changes_bytes: int) -> Lmdb:
    return Lmdb(path, readonly=readonly, overlay_bytes=overlay_bytes, changes_bytes=changes_bytes)


_COUNTERS = (
    "rows_read",
    "rows_found",
    "rows_asked_base",
    "rows_read_base",
    "rows_written",
    "bytes_read",
    "bytes_written",
    "seconds_read",
    "seconds_write",
    "merges",
    "merges_failed",
    "folds",
    "rows_merged",
    "bytes_merged",
    "bytes_written_base",
    "seconds_merge",
)
