"""The step of tables that are some columns of wider ones (``TableConfig.columns``): what a rule needs of a whole row is
summed over the stores that hold its parts, before the rule.

Rules that see one column at a time need nothing of this. The others (row-wise Adagrad and Adam, LAMB, LARS, and what
keeps a norm below a limit) ask up to three times in a step, each time once for all tables of a store:

* ``norms``: of the rows that ``TableConfig.max_norm`` shortens before the update, powers of the weights summed;
* ``sums``: the rule's own;
* ``squares``: of the new rows, where the rule has a ``max_norm``.

Every store that holds a part must be asked the same in the same order; rows of a table are ordered by id, so they are
the same rows in each. Parts are added in the order of their columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import options
from .config import TableConfig
from .errors import NotSupported
from .layout import BAGS, FIRST, TABLE
from .optim import HYPER, LR, MAX_NORM, MULTIPLIER, C
from .staged import Update

NORMS, SUMS, SQUARES = "norms", "sums", "squares"
Exchange = Callable[[str, Mapping[int, Tensor]], Mapping[int, Tensor]]
"""Of each table by number fp32 [n, k], what its part of n rows adds; gives [parts, n, k], in the order of columns."""


class Arenas(NamedTuple):
    """Where a store's tables lie, and what its kernels are told of them."""

    kernels: ModuleType
    described: Tensor
    slabs: list[Tensor]
    written: list[Tensor]
    slot_ids: list[Tensor]


class Summed(NamedTuple):
    """Distinct rows of a table by ascending id, with their summed gradients."""

    slots: Tensor
    grads: Tensor


class RowParts:
    """The tables of a store that are columns of wider ones and need something of whole rows.

    Attributes:
        exchange: asks the stores that hold the other parts; set by who brings them together.
    """

    exchange: Exchange | None = None

    def __init__(self, tables: Sequence[TableConfig], arenas: Arenas) -> None:
        self._tables, self._arenas = tables, arenas
        self.tables = frozenset(t for t, table in enumerate(tables) if table.columns is not None)
        self._ruled = frozenset(t for t in self.tables if tables[t].optimizer.row_sums)
        self._normed = frozenset(t for t in self.tables if tables[t].max_norm is not None)

    def require(self, trained: set[int]) -> None:
        """Raise NotSupported where one of the tables about to be trained cannot be."""
        lost = trained & (self._ruled | self._normed)
        if lost and self.exchange is None:
            table = self._tables[min(lost)]
            what = f"rule {table.optimizer.name}" if table.optimizer.row_sums else "max_norm"
            raise NotSupported(
                f"table {table.name!r} is {table.columns} with {table.embedding_dim} of them here: its {what} needs "
                "whole rows, so it is trained by what holds all of its parts (ec.shard)"
            )

    def _ask(self, what: str, mine: dict[int, Tensor]) -> Mapping[int, Tensor]:
        assert self.exchange is not None
        return self.exchange(what, mine)

    def renormalise(self, touched: Mapping[int, Tensor]) -> None:
        """Shorten rows as ``options.renormalise_rows`` does; ``touched``: slots by table, of those with a limit."""
        if not self._normed:
            return
        slots = {t: self._distinct(t, touched[t])[0] for t in sorted(self._normed) if t in touched}
        weights = {t: self._weights(t)[at].float() for t, at in slots.items()}
        mine = {t: options.norm_part(rows, self._tables[t].norm_type) for t, rows in weights.items()}
        for t, parts in self._ask(NORMS, mine).items():
            table = self._tables[t]
            assert table.max_norm is not None
            norms = options.norm_of(parts, table.norm_type)
            self._weights(t)[slots[t]] = options.shortened(weights[t], norms, table.max_norm).to(table.dtype)

    def apply(self, update: Update, hyper: Tensor) -> tuple[Update, int]:
        """(what is left of the update for ``fused_update``, rows updated here)."""
        if not self._ruled:
            return update, 0
        present = set(update.features[:, TABLE].tolist()) if update.features.numel() else set()
        rows = {t: self._summed(t, update, hyper[t]) for t in sorted(self._ruled & present)}
        given = {t: torch.zeros(r.slots.numel(), 3) for t, r in rows.items()}
        asked = {t: self._tables[t].optimizer.row_sums for t in rows}
        found = self._ask(SUMS, {t: self._sums(t, r, hyper, None)[:, : asked[t]] for t, r in rows.items()})
        for t, parts in found.items():
            given[t][:, : asked[t]] = added(parts)
        if any(float(hyper[t, MAX_NORM]) > 0 for t in self._ruled):
            mine = {
                t: self._sums(t, r, hyper, given[t])[:, 2:] for t, r in rows.items() if float(hyper[t, MAX_NORM]) > 0
            }
            for t, parts in self._ask(SQUARES, mine).items():
                given[t][:, 2:] = added(parts)
        a = self._arenas
        for t, r in rows.items():
            at = slice(t, t + 1)
            a.kernels.apply_rows(
                a.slabs[t], a.written[t], a.described[at], hyper[at], r.slots, r.grads, given[t], a.slot_ids[t]
            )
        kept = ~torch.isin(update.features[:, TABLE], torch.tensor(sorted(self._ruled)))
        return update._replace(features=update.features[kept]), sum(r.slots.numel() for r in rows.values())

    def _sums(self, t: int, r: Summed, hyper: Tensor, given: Tensor | None) -> Tensor:
        a, at = self._arenas, slice(t, t + 1)
        return a.kernels.row_sums(a.slabs[t], a.described[at], hyper[at], r.slots, r.grads, given)

    def _weights(self, t: int) -> Tensor:
        table = self._tables[t]
        return self._arenas.slabs[t].view(table.dtype)[:, : table.embedding_dim]

    def _distinct(self, t: int, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(distinct slots by ascending id, of each slot which of all distinct slots it is, which of those these are).
        The sink of a hashed table, its last slot, is none of them."""
        unique, inverse = torch.unique(slots.to(torch.int64), return_inverse=True)
        chosen = torch.arange(unique.numel())
        ids = self._arenas.slot_ids[t]
        if ids.numel():
            chosen = chosen[unique != self._arenas.slabs[t].shape[0] - 1]
            chosen = chosen[torch.argsort(ids[unique[chosen]])]
        return unique[chosen], inverse, chosen

    def _summed(self, t: int, update: Update, hyper: Tensor) -> Summed:
        """Gradients of equal slots summed as ``fused_update`` does: by that kernel, from 0 with a rate of -1."""
        mine = update.features[update.features[:, TABLE] == t].clone()
        positions = torch.cat([_span(row, update.offsets) for row in mine.tolist()])
        slots, inverse, chosen = self._distinct(t, update.slots[positions])
        dim, count = self._tables[t].embedding_dim, int(inverse.max()) + 1 if inverse.numel() else 0
        values = torch.zeros(update.slots.numel(), dtype=torch.int64)
        values[positions] = inverse
        mine[:, TABLE] = 0
        plain = torch.zeros(1, HYPER, dtype=torch.float64)
        plain[0, LR], plain[0, C], plain[0, MULTIPLIER] = -1.0, 1.0, hyper[MULTIPLIER]
        sums = torch.zeros(max(count, 1), 4 * dim, dtype=torch.uint8)
        self._arenas.kernels.fused_update(
            [sums],
            [_NOTHING.to(torch.uint8)],
            torch.tensor([[dim, 0, 4 * dim, 0, 0, 0, 0, dim]]),
            plain,
            mine,
            values,
            update.offsets,
            update.weights,
            update.grads,
            [_NOTHING],
        )
        return Summed(slots, sums.view(torch.float32)[chosen])


_NOTHING = torch.empty(0, dtype=torch.int64)


def added(parts: Tensor) -> Tensor:
    """[n, k]: the sum of [parts, n, k], in their order."""
    out = parts[0].clone()
    for part in parts[1:]:
        out += part
    return out


def _span(feature: Sequence[int], offsets: Tensor | None) -> Tensor:
    """Positions of a feature's ids."""
    first, last = feature[FIRST], feature[FIRST] + feature[BAGS]
    return torch.arange(first, last) if offsets is None else torch.arange(int(offsets[first]), int(offsets[last]))
