"""What a tier is: a place where rows live. A chain of tiers serves a store; lookups read the first, the last holds all.

The store talks to a *front* (``embcache/cache``), which gives the kernels arenas of rows and, for a batch of ids, the
slot of each. Below it are *back* tiers, which move blocks of whole rows by key and know nothing of batches. They work
on numpy arrays: keys int64 [n], unique and ascending as unsigned 64-bit numbers (the order of LMDB's integer keys);
rows uint8 [n, row_bytes], contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..config import TableConfig
from ..kernels import cpu

PIECE = 4 << 20  # bytes of rows that ``Copying`` moves at a time

Block = tuple[np.ndarray, np.ndarray]  # keys int64 [n], rows uint8 [n, row_bytes]


@dataclass
class Arena:
    """The resident rows of one table.

    Attributes:
        slab: uint8 [capacity, row_bytes]; weights, then optimizer state, of the row in each slot.
        written: uint8 [ceil(capacity / 8)], a bit per slot: differs from its initial value. Empty: not tracked.
        slot_ids: int64 [capacity], the id in each slot. Empty: slot and id are equal.
    """

    slab: Tensor
    written: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    slot_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


class Moved(NamedTuple):
    """Rows of one table that move between slots of an arena and a tier."""

    table: int
    keys: np.ndarray
    """int64 [n], distinct, in any order; reading is fastest where they ascend as unsigned numbers."""
    slab: np.ndarray
    """uint8 [capacity, row_bytes], contiguous: the arena."""
    slots: np.ndarray
    """int32 [n], of each key; distinct."""
    found: np.ndarray
    """bool [n], set by the call: the row was read or written. Where it was not there to be read, its slot is as it was.
    """


class BackTier(Protocol):
    """Rows by key in blocks. Every method may be called from any thread while another runs."""

    def open(self, tables: Sequence[TableConfig]) -> None:
        """Get ready for these tables; once."""

    def read(self, table: int, keys: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Fill ``out`` with the rows that are there; bool [n] says which (the others are left as they are)."""

    def write(self, table: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """Insert or replace rows that are newer than what is here; StorageFull leaves nothing of the call visible."""

    def read_into(self, parts: Sequence[Moved]) -> None:
        """``read`` for several tables, each in one part, straight into slots, which nobody else touches meanwhile.
        After an error slots may hold anything."""

    def write_from(self, parts: Sequence[Moved]) -> None:
        """``write`` for several tables, each in one part, straight from slots, whose rows nobody changes meanwhile.

        An error may leave some rows written, if the tier is one that goes through its parts one by one: ``found`` says
        which. Lmdb writes all or none.
        """

    def offer(self, table: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """Rows that leave the cache above unchanged: a cache may keep them, a tier that holds all has them already."""

    def delete(self, table: int, keys: np.ndarray) -> None:
        """The keys are not there from now on, here and below."""

    def scan(self, table: int, block: int) -> Iterator[Block]:
        """(keys, rows) of all rows, at most ``block`` at a time, keys ascending as unsigned numbers; copies."""

    def count(self, table: int) -> int:
        """Rows that ``scan`` would give."""

    def stats(self) -> dict[str, float]:
        """Counters since it was opened: rows and bytes read and written, seconds spent."""

    def close(self) -> None:
        """Give back what the tier holds."""


class DurableTier(BackTier, Protocol):
    """A back tier whose rows survive the process: it closes what was written as a numbered generation, and the caller
    decides by a manifest which generation exists."""

    folder: Path
    readonly: bool

    def freeze(self, number: int) -> dict[str, Any]:
        """End the open overlay: a JSON description of everything needed to read the rows as they are now. Fast, and
        nothing is on the disk for certain yet."""

    def begin(self, number: int, late: Sequence[int]) -> None:
        """``freeze`` for a generation to which ``land`` will add ``late[t]`` rows of each table: they are older than
        what is written from now on. StorageFull: it can be tried again."""

    def land(self, table: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """All late rows of a table, distinct keys in any order; any thread may read and write meanwhile. StorageFull:
        none of them is there."""

    def abandon(self) -> None:
        """Late rows that have not landed will not."""

    def describe(self) -> dict[str, Any]:
        """What ``freeze`` would have returned."""

    def sync(self) -> None:
        """Everything frozen is on the disk afterwards; may run while new rows are written."""

    def changed_since(self, table: int, generation: int) -> np.ndarray | None:
        """Keys (ascending as unsigned numbers, each once) written or deleted after a generation; None: not known."""

    def sealed(self, number: int, horizon: int, kept: Sequence[int] = ()) -> None:
        """The manifest names generation ``number``; no generation before ``horizon`` will be asked for again, so rows
        up to it may be merged, in the background. ``kept``: all generations that may be asked for."""

    on_merged: Callable[[], None]
    """Called (from a background thread) when rows have been merged, before the files they came from are removed: the
    caller then writes its manifest anew with ``trimmed`` descriptions."""

    def trimmed(self, description: dict[str, Any]) -> dict[str, Any]:
        """The same rows as they are stored now: without the segments that merges have made superfluous."""

    def restore(self, description: dict[str, Any] | None, keep: Sequence[dict[str, Any]] = ()) -> None:
        """The rows are exactly those of a description (None: of an empty store); what was not frozen is dropped.
        ``keep``: descriptions of other generations that may be asked for."""


class Copying:
    """``read_into`` and ``write_from`` by way of ``read`` and ``write``, for tiers that have no shorter one."""

    def read(self, table: int, keys: np.ndarray, out: np.ndarray) -> np.ndarray:
        """See ``BackTier``."""
        raise NotImplementedError

    def write(self, table: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """See ``BackTier``."""
        raise NotImplementedError

    def read_into(self, parts: Sequence[Moved]) -> None:
        """See ``BackTier``."""
        for part, order in _pieces(parts):
            rows = np.empty((len(order), part.slab.shape[1]), np.uint8)
            found = self.read(part.table, part.keys[order], rows)
            part.found[order] = found
            cpu.scatter(rows, np.flatnonzero(found), part.slots[order], rows.shape[1], part.slab.reshape(-1))

    def write_from(self, parts: Sequence[Moved]) -> None:
        """See ``BackTier``."""
        for part in parts:
            part.found[:] = False
        for part, order in _pieces(parts):
            rows = np.empty((len(order), part.slab.shape[1]), np.uint8)
            cpu.gather(part.slab.reshape(-1), rows.shape[1], part.slots[order], rows)
            self.write(part.table, part.keys[order], rows)
            part.found[order] = True


def _pieces(parts: Sequence[Moved]) -> Iterator[tuple[Moved, np.ndarray]]:
    """(part, positions in it whose keys ascend as unsigned numbers), a piece at a time."""
    for part in parts:
        order = np.argsort(part.keys.view(np.uint64))
        step = max(1, PIECE // part.slab.shape[1])
        for start in range(0, len(order), step):
            yield part, order[start : start + step]
