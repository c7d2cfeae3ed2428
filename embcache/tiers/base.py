"""What a tier is: a place where rows live. A chain of tiers serves a store; lookups read the first, the last holds all.

A *front* tier gives the kernels arenas (slabs of rows) and, for a batch of ids, the slot of each. A *back* tier moves
blocks of rows by key. A tier may be both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config import TableConfig


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


class FrontTier(Protocol):
    """The tier that lookups and updates read: rows of a staged batch are pinned in its arenas.

    ``stage`` pins hard; ``relax`` after the lookup lets rows leave; ``slots`` pins again, staging what has left;
    ``release`` ends the lease. A lease is whatever the tier needs to remember.
    """

    arenas: list[Arena]

    def open(self, tables: Sequence[TableConfig], kernels: ModuleType) -> None:
        """Allocate for these tables; once."""

    def fresh(self) -> FrontTier:
        """An unopened tier of the same description (for copies of a store)."""

    def stage(self, features: Tensor, values: Tensor, offsets: Tensor | None, training: bool) -> Any:
        """Make the rows of the ids resident; returns the lease. Not ``training``: they are read once and none need stay
        afterwards."""

    def slots(self, lease: Any) -> Tensor:
        """The slot of each id of the staged values, in their order."""

    def relax(self, lease: Any) -> None:
        """The lookup is done: until the next ``slots`` its rows may leave."""

    def release(self, lease: Any) -> None:
        """The handle is gone."""


class BackTier(Protocol):
    """Rows by key in blocks: keys sorted and unique, one contiguous uint8 [n, row_bytes] block."""

    def read(self, table: int, keys: Tensor, out: Tensor) -> Tensor:
        """Fill ``out``; returns bool [n]: which keys were there (the others are left as they are)."""

    def write(self, table: int, keys: Tensor, rows: Tensor) -> None:
        """Insert or replace rows."""

    def scan(self, table: int, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(keys, rows) of all rows, ``block`` at a time, keys ascending."""

    def close(self) -> None:
        """Give back what the tier holds."""
