"""Which keys the base may hold, in memory: reads of keys that were never written do not touch its pages.

Every key of the base is in the filter (``kernels/bloom.py``); that others are, too, is harmless. So keys are added and
the file is saved *before* the first transaction of the merge that brings them, and neither has to be undone.

Reading beside a merge: a read looks into the overlay first, then here, and takes its snapshot of the base last. A key
that it did not find in the overlay, and that was there, has been merged and forgotten by the overlay, under the lock
that the look took; its bits were set before that merge began. What is added later, the read has found in the overlay.

The file names the generation that it ``covers`` and the transaction of the base at which its keys were ``scanned`` (0:
it began empty). It holds the keys of every state of the base from that transaction to that generation, and is used for
no other. Missing, torn, altered, too old: there is no filter, and the next merge scans the base's keys first.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import CorruptStore, StorageFull
from ..kernels import parts
from ..kernels.bloom import FIRST, KeyFilter, Layer
from ..statefile import named_when_full, sync_folder
from .basefile import BaseFile, Snapshot
from .merge_rows import distinct
from .segment import Segment

__all__ = ["NAME", "Presence"]

NAME = "keys.filter"
MAGIC, VERSION = b"embcache filter\0", 1
_HEAD = struct.Struct("<16sIIQQ")  # magic, version, layers, covers, scanned
_LAYER = struct.Struct("<QQII")  # capacity, keys, checksum, 0
_CHECK = struct.Struct("<I")
_MOST = 64  # layers
_CHUNK = 1 << 16
_PIECE = 64 << 20  # bytes written at a time


class Presence:
    """The filter of a base, if there is one, and its file. ``screen`` is for any thread; the others take turns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.filter: KeyFilter | None = None
        self._scanned = self._covers = 0
        self._changing = threading.Lock()

    def screen(self, table: int, keys: np.ndarray, state: np.ndarray) -> int:
        """How many keys with state 0 the base may hold; the others with state 0 get state NEVER. Ask before the
        snapshot is taken, and after the overlay was asked."""
        keyfilter = self.filter
        if keyfilter is None:
            return int(np.count_nonzero(state == 0))
        return keyfilter.screen(table, keys, state)

    def screen_parts(self, lines: np.ndarray, state: np.ndarray) -> int:
        """The same for the parts of one call (``kernels/parts.py``)."""
        keyfilter = self.filter
        if keyfilter is None:
            return int(np.count_nonzero(state == 0))
        layers = keyfilter.layers[::-1]  # half of the keys are in the newest
        where = np.array([(x.words.ctypes.data, x.words.size) for x in layers], np.int64).reshape(-1, 2)
        return int(parts.screen(lines, where, state))

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return 0 if self.filter is None else self.filter.nbytes

    # -- before a merge

    def prepare(self, base: BaseFile, owner: int, chain: Sequence[Segment], target: int) -> bool:
        """Before the rows of ``chain`` are merged as generation ``target``: their keys are in the filter and in its
        file. False: the base belongs to another process now. StorageFull: the file is as it was.

        Where memory or the base's pages do not allow a filter, there is none, in memory or on the disk.
        """
        with self._changing:
            try:
                built = self._scan(base) if self.filter is None else self.filter
                self._add(built, chain)
            except (MemoryError, CorruptStore):
                self.filter = None
                (self.folder / NAME).unlink(missing_ok=True)
                sync_folder(self.folder)
                return True
            self.filter = built  # whole from the first moment that a read can see it
            return self._save(built, base, owner, target)

    @staticmethod
    def _add(keyfilter: KeyFilter, chain: Sequence[Segment]) -> None:
        """The keys of all rows of the chain; tombstones bring no key to the base."""
        more = sum(s.records for s in chain)
        for table in sorted({s.table for s in chain}):
            mine = [s for s in chain if s.table == table]
            more -= sum(s.records for s in mine)
            keys = [k[dead == 0] for k, dead in (s.keys() for s in mine)]
            keyfilter.add(table, distinct(np.concatenate(keys).view(np.uint64)).view(np.int64), more)

    def renew(self, base: BaseFile, owner: int) -> None:
        """A filter of exactly what the base holds, while nothing is merged: deleted keys are out, one layer is left.
        Where the disk has no room for it, the file stays as it was, which is as good."""
        with self._changing:
            try:
                self.filter = self._scan(base)
            except (MemoryError, CorruptStore):
                return  # the one before, if any, stays good
            with base.snapshot() as snapshot:
                seal = snapshot.seal
            if seal:
                with contextlib.suppress(StorageFull):
                    self._save(self.filter, base, owner, seal)

    def _scan(self, base: BaseFile) -> KeyFilter:
        tables = range(len(base.row_bytes))
        with base.snapshot() as snapshot:
            self._scanned = snapshot.transaction if snapshot.seal else 0
            rows = [snapshot.count(t) for t in tables]
            keyfilter = KeyFilter(sum(rows))
            for t in tables:
                first, keys = 0, np.empty(_CHUNK, np.int64)
                while first < 2**64:
                    n = snapshot.walk(t, first, keys, None)
                    keyfilter.add(t, keys[:n])
                    if n < len(keys):
                        break
                    first = int(keys[n - 1 :].view(np.uint64)[0]) + 1
        return keyfilter

    # -- the file

    def _save(self, keyfilter: KeyFilter, base: BaseFile, owner: int, covers: int) -> bool:
        path, partial = self.folder / NAME, self.folder / f"{NAME}.{os.getpid()}.tmp"
        layers = keyfilter.layers
        head = _HEAD.pack(MAGIC, VERSION, len(layers), covers, self._scanned)
        head += b"".join(_LAYER.pack(one.capacity, one.keys, zlib.crc32(one.words.data), 0) for one in layers)
        size = len(head) + _CHECK.size + keyfilter.nbytes
        try:
            with named_when_full(path, size), partial.open("wb") as file:
                file.write(head + _CHECK.pack(zlib.crc32(head)))
                for layer in layers:
                    data = layer.words.data.cast("B")
                    for at in range(0, len(data), _PIECE):
                        file.write(data[at : at + _PIECE])
                file.flush()
                os.fsync(file.fileno())
            # a writer that has lost the store must not replace the next one's file: each holds LMDB's lock here
            with named_when_full(path, size), base.owned(owner) as ours:
                if ours:
                    os.replace(partial, path)
                    sync_folder(self.folder)
            return ours
        finally:
            partial.unlink(missing_ok=True)

    def serves(self, snapshot: Snapshot) -> bool:
        """Whether the filter that was loaded for another snapshot is good for this one."""
        return self.filter is not None and snapshot.seal <= self._covers and self._scanned <= snapshot.transaction

    def drop(self) -> None:
        """No filter in memory."""
        with self._changing:
            self.filter, self._scanned, self._covers = None, 0, 0

    def load(self, snapshot: Snapshot) -> None:
        """What the file holds, if that is good for this state of the base and later ones; else there is no filter.

        A writer calls it once the base is its own; a reader for the one snapshot that it looks at.
        """
        with self._changing:
            self.filter, self._scanned, self._covers = None, 0, 0
            seal = snapshot.seal
            if seal == 0:  # a merge's first transaction seals: nothing was merged yet
                self.filter = KeyFilter()
                return
            with contextlib.suppress(OSError, MemoryError, OverflowError, ValueError):
                self.filter = self._read(seal, snapshot.transaction)

    def _read(self, seal: int, transaction: int) -> KeyFilter | None:
        with (self.folder / NAME).open("rb") as file:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return None
            magic, version, count, covers, scanned = _HEAD.unpack(head)
            if (magic, version) != (MAGIC, VERSION) or count > _MOST or covers < seal or scanned > transaction:
                return None
            told = file.read(count * _LAYER.size)
            check = file.read(_CHECK.size)
            if check != _CHECK.pack(zlib.crc32(head + told)):
                return None
            layers = []
            for capacity, keys, check, _ in _LAYER.iter_unpack(told):
                layer = Layer(capacity, keys)
                got = file.readinto(layer.words.data.cast("B"))
                if capacity < FIRST or got != layer.words.nbytes or zlib.crc32(layer.words.data) != check:
                    return None
                layers.append(layer)
            if file.read(1):
                return None
        self._scanned, self._covers = scanned, covers
        return KeyFilter(layers=tuple(layers))

    def sweep(self) -> None:
        """Remove what a crash left behind, and a file that this base cannot use."""
        for path in self.folder.glob(NAME + ".*.tmp"):
            path.unlink(missing_ok=True)
        if self.filter is None:
            (self.folder / NAME).unlink(missing_ok=True)
