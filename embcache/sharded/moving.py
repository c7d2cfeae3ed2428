"""Blocks of fp32 rows from rank to rank in a wire format, in as few copies as their layout allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .meeting import meet
from .wire import Wire

__all__ = ["Classes", "Mover"]

Classes = Sequence[tuple[int, slice]]  # dimension, columns of the counts


class Mover:
    """What travels on lanes ``rows`` and ``grads``.

    A buffer of rows is rank after rank, and within a rank class after class: a class are the pieces (columns of the
    counts) of one dimension. With an exact wire the buffer is the message.
    """

    def __init__(self, wire: str, rank: int, world: int) -> None:
        self.codec, self.rank, self.world = Wire(wire), rank, world

    @property
    def exact(self) -> bool:
        """Whether rows arrive as they are."""
        return self.codec.exact

    def moved(
        self,
        lane: Any,
        signature: int | None,
        error: Exception | None,
        rows: Tensor,
        going: np.ndarray,
        coming: np.ndarray,
        classes: Classes,
        buffers: Sequence[Tensor] = (),
    ) -> Tensor:
        """Exchange fp32 rows in wire order: ``rows`` has ``going`` [W, n] of them, the result ``coming``, unless these
        go into ``buffers``, one for each of the ``classes`` (dimension, columns). ``signature`` None: the ranks have
        met already."""
        sent, back = going.copy(), coming.copy()
        if not self.codec.exact:  # the own part does not pass the codec
            sent[self.rank] = back[self.rank] = 0
        splits, sizes = self._bytes(sent, classes), self._bytes(back, classes)
        packed = torch.empty(0, dtype=torch.uint8)
        if error is None and self.codec.exact:
            packed = rows.view(torch.uint8)
        elif error is None:
            packed = torch.empty(int(splits.sum()), dtype=torch.uint8)
            others = [(block, None) for rank, block in self._blocks(rows, going, classes) if rank != self.rank]
            self.codec.encode_many(others, packed)
        if signature is None:
            answer = lane.submit(lane.all_to_all, (packed, splits), sizes).result()
        else:
            _, answer = meet(lane, signature, error, lambda heads: (packed, splits, sizes))
        return self._unpacked(answer, rows, going, coming, classes, buffers)

    def _bytes(self, counts: np.ndarray, classes: Classes) -> np.ndarray:
        return sum(counts[:, columns].sum(1) * self.codec.row_bytes(dim) for dim, columns in classes)

    def _unpacked(
        self,
        answer: Tensor,
        rows: Tensor,
        going: np.ndarray,
        coming: np.ndarray,
        classes: Classes,
        buffers: Sequence[Tensor],
    ) -> Tensor:
        if self.codec.exact and not buffers:
            return answer.view(torch.float32)
        out = torch.empty(0 if buffers else sum(int(coming[:, c].sum()) * dim for dim, c in classes))
        targets = list(_targets(coming, classes, buffers) if buffers else self._blocks(out, coming, classes))
        if self.codec.exact:
            came = self._blocks(answer.view(torch.float32), coming, classes)
            for (_, target), (_, block) in zip(targets, came, strict=True):
                target.copy_(block)
            return out
        self.codec.decode_many(answer, [(target, None) for rank, target in targets if rank != self.rank])
        own = [block for rank, block in self._blocks(rows, going, classes) if rank == self.rank]
        for target, block in zip([target for rank, target in targets if rank == self.rank], own, strict=True):
            target.copy_(block)
        return out

    def _blocks(self, rows: Tensor, counts: np.ndarray, classes: Classes) -> Iterator[tuple[int, Tensor]]:
        """(rank, rows [n, D]) of fp32 rows in wire order: what goes to, or came from, a rank in one class."""
        at = 0
        for rank in range(self.world):
            for dim, columns in classes:
                n = int(counts[rank, columns].sum())
                yield rank, rows[at : at + n * dim].view(n, dim)
                at += n * dim

    def rounded(self, block: Tensor) -> Tensor:
        """What other ranks get of these rows."""
        packed = torch.empty(block.shape[0] * self.codec.row_bytes(block.shape[1]), dtype=torch.uint8)
        out = torch.empty_like(block)
        self.codec.encode(block, packed)
        self.codec.decode(packed, out)
        return out


def _targets(coming: np.ndarray, classes: Classes, buffers: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """(rank, rows) block after block as on the wire, in a buffer for each class."""
    done = [0] * len(buffers)
    for rank in range(len(coming)):
        for k, (_, columns) in enumerate(classes):
            n = int(coming[rank, columns].sum())
            yield rank, buffers[k][done[k] : done[k] + n]
            done[k] += n
