"""How often ids occur in what all ranks look up together: ids travel once, so this has to be said where it counts.

* Admission counts occurrences in steps: they travel beside the gradients, one byte an id where ``min_count`` fits in
  one, since what is more than ``min_count`` says no more than ``min_count``.
* ``scale_grad_by_freq`` divides by the occurrences in one lookup of all ranks: requesters tell owners, owners add and
  tell back, 4 bytes an id each way, before gradients are summed.

Both are exact; pooled tables whose owners see every id (traffic "pooled") need neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import TableConfig
from ..staged import Gathered
from .exchange import WireOrder, starts_of
from .plan import HASH

__all__ = ["Occurrences"]

Spans = Mapping[int, Sequence[tuple[int, int]]]


class Occurrences:
    """Of the pieces of a store, in wire order.

    Args:
        wire: the pieces.
        tables: the local ones.
        whole: the tables that are sharded.
        lanes: to meet on.
    """

    def __init__(
        self, wire: WireOrder, tables: Sequence[TableConfig], whole: Sequence[TableConfig], lanes: Any
    ) -> None:
        self._wire, self._lane, self._rank = wire, lanes.grads, lanes.rank
        named = [(j, tables[p], wire.pieces[j]) for j, p in enumerate(wire.order)]
        rows = [(j, table) for j, table, piece in named if not piece.pooled]
        self._most = {j: table.admission.min_count for j, table in rows if table.admission is not None}
        first = {wire.of_table[t][0] for t, table in enumerate(whole) if table.scale_grad_by_freq}
        self._scaled = [j for j, _ in rows if j in first]

    # admission --------------------------------------------------------------------------------------------------

    @property
    def counted(self) -> bool:
        """Whether a table asks how often ids occur before they are admitted."""
        return bool(self._most)

    def tell(self, pending: Sequence[Gathered], joined: Any, front: Any) -> None:
        """Collective, before the owners' step: of the ids of ``joined`` how often they occur in ``pending``."""
        slots = [_slots(item, joined) for item in pending]
        counts = self._by_slot(
            self._most, [(item.source.lease.spans, out) for item, out in zip(pending, slots, strict=True)]
        )
        kinds = {j: np.dtype(np.uint8 if most <= 255 else np.int32) for j, most in self._most.items()}
        blocks = {
            (rank, j): np.minimum(block, self._most[j]).astype(kinds[j])
            for rank, j, block in self._blocks(self._most, counts, joined.sent, joined.begin)
        }
        found = self._exchange(blocks, joined.received, kinds)
        lease = joined.handle.parts[0].lease
        begin = starts_of(joined.received)
        places = [np.arange(begin[key], begin[key] + len(block)) for key, block in found.items()]
        values = [block.astype(np.int64) for block in found.values()]
        if places:
            front.occurred(lease, np.concatenate(places), np.concatenate(values))

    # scale_grad_by_freq -----------------------------------------------------------------------------------------

    @property
    def scaled(self) -> bool:
        """Whether a table divides gradients by how often an id occurs."""
        return bool(self._scaled)

    def weights(self, pending: Sequence[Gathered]) -> list[Tensor]:
        """Collective. fp32 by id of each item's update: 1 / how often its id occurs in that lookup, on all ranks."""
        known: dict[int, Tensor] = {}
        for item in pending:
            lease = item.source.lease
            if lease.number not in known:
                known[lease.number] = self._of_lease(lease)
        return [item.part.chosen(known[item.source.lease.number]) for item in pending]

    def _of_lease(self, lease: Any) -> Tensor:
        out = lease.out.numpy()
        counts = self._by_slot(self._scaled, [(lease.spans, lease.out)])
        kinds = dict.fromkeys(self._scaled, np.dtype(np.int32))
        asked = {
            (rank, j): block.astype(np.int32)
            for rank, j, block in self._blocks(self._scaled, counts, lease.sent, lease.begin)
        }
        found = self._exchange(asked, lease.received, kinds)
        totals = self._added(found, lease)
        heard = self._exchange(self._answered(totals), self._heard(lease.sent), kinds)
        weights = np.ones(len(out), dtype=np.float32)
        for j in self._scaled:
            table = self._wire.pieces[j].table
            if table not in lease.spans:
                continue
            total = np.zeros(len(counts[j]), dtype=np.int64)
            for rank, first, n in self._places(j, lease.sent, lease.begin):
                if (rank, j) in heard:
                    total[first : first + n] = heard[rank, j]
            for start, stop in lease.spans[table]:
                weights[start:stop] = np.float32(1.0) / total[out[start:stop]].astype(np.float32)
        return torch.from_numpy(weights)

    def _added(self, found: Mapping[tuple[int, int], np.ndarray], lease: Any) -> dict[tuple[int, int], np.ndarray]:
        """Of each rank's ids, in its order, their occurrences on all ranks."""
        begin, totals = starts_of(lease.received), {}
        for j in self._scaled:
            asking = [rank for rank in range(self._wire.world) if (rank, j) in found]
            ids = [lease.received_ids[begin[r, j] : begin[r, j] + len(found[r, j])] for r in asking]
            if not ids:
                continue
            _, inverse = np.unique(np.concatenate(ids), return_inverse=True)
            sums = np.bincount(inverse, weights=np.concatenate([found[r, j] for r in asking]))[inverse]
            at = 0
            for rank, mine in zip(asking, ids, strict=True):
                totals[rank, j] = sums[at : at + len(mine)].astype(np.int32)
                at += len(mine)
        return totals

    def _answered(self, totals: Mapping[tuple[int, int], np.ndarray]) -> dict[tuple[int, int], np.ndarray]:
        """Those to tell back: of what every rank holds each has added itself."""
        return {
            (rank, j): block
            for (rank, j), block in totals.items()
            if rank == self._rank or not self._wire.everywhere[j]
        }

    def _heard(self, sent: np.ndarray) -> np.ndarray:
        back = sent.copy()
        others = np.arange(self._wire.world) != self._rank
        back[np.ix_(others, self._wire.everywhere)] = 0
        return back

    # both -------------------------------------------------------------------------------------------------------

    def _by_slot(self, pieces: Any, parts: Sequence[tuple[Spans, Tensor]]) -> dict[int, np.ndarray]:
        """Of each piece, how often each of its slots occurs in the positions of its table."""
        found = {}
        for j in pieces:
            table = self._wire.pieces[j].table
            slots = [out.numpy()[start:stop] for spans, out in parts for start, stop in spans.get(table, ())]
            found[j] = np.bincount(np.concatenate([np.empty(0, dtype=np.int64), *slots]))
        return found

    def _places(self, j: int, sent: np.ndarray, begin: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """(rank, first slot, ids) of a piece's ids, as its table's slots count them."""
        hashed = self._wire.pieces[j].route == HASH
        for rank in range(self._wire.world):
            if sent[rank, j]:
                yield rank, int(begin[rank, j]) if hashed else 0, int(sent[rank, j])

    def _blocks(
        self, pieces: Any, counts: Mapping[int, np.ndarray], sent: np.ndarray, begin: np.ndarray
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        for j in pieces:
            for rank, first, n in self._places(j, sent, begin):
                block = counts[j][first : first + n]
                yield rank, j, np.concatenate([block, np.zeros(n - len(block), dtype=block.dtype)])

    def _exchange(
        self, blocks: Mapping[tuple[int, int], np.ndarray], coming: np.ndarray, kinds: Mapping[int, np.dtype[Any]]
    ) -> dict[tuple[int, int], np.ndarray]:
        """Blocks by (rank, piece): to each rank its own, in wire order; ``coming`` [W, P] numbers come back."""
        every = range(self._wire.world)
        send = [
            np.concatenate(
                [np.empty(0, np.uint8), *(blocks[r, j].view(np.uint8) for j in sorted(kinds) if (r, j) in blocks)]
            )
            for r in every
        ]
        sizes = [sum(int(coming[r, j]) * kind.itemsize for j, kind in kinds.items()) for r in every]
        answer = self._lane.all_to_all(send, sizes).numpy()
        found, at = {}, 0
        for r in every:
            for j in sorted(kinds):
                n = int(coming[r, j])
                if n:
                    found[r, j] = answer[at : at + n * kinds[j].itemsize].copy().view(kinds[j])
                    at += n * kinds[j].itemsize
        return found


def _slots(item: Gathered, joined: Any) -> Tensor:
    """The slots of a gathered gradient's staged ids among the rows of the update."""
    lease = item.source.lease
    return lease.out if joined.slots is None else joined.slots[lease.number]
