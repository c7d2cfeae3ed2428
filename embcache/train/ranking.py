"""Ranking metrics over a whole catalogue: hit rate, NDCG and mean reciprocal rank from the exact rank of the target.

Ties count against the model (a model that scores everything alike ranks its target last), and so does NaN. There is no
sampling of negatives: Krichene & Rendle, "On Sampled Metrics for Item Recommendation", KDD 2020.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["RankingMetrics", "target_ranks"]


def target_ranks(scores: Tensor, targets: Tensor, exclude: Tensor | None = None) -> Tensor:
    """Exact rank (from 1) of each row's target among all items of the row, ties and NaN against the model.

    Args: scores float [n, items]; targets int64 [n]; exclude bool [n, items]: items left out of the ranking (seen
    before); the target itself is never left out.
    Returns: int64 [n].

    >>> target_ranks(torch.tensor([[0.1, 0.9, 0.9]]), torch.tensor([1]))
    tensor([2])
    """
    if scores.dim() != 2 or targets.shape != scores.shape[:1]:
        shapes = f"{list(scores.shape)} and {list(targets.shape)}"
        raise ValueError(f"scores must be [n, items] and targets [n], got {shapes}")
    wrong = ((targets < 0) | (targets >= scores.shape[1])).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise IndexError(f"targets[{at}] = {int(targets[at])}, valid range [0, {scores.shape[1]})")
    column = targets.unsqueeze(1)
    ahead = ~(scores < scores.gather(1, column))  # the target itself is among them: the count is its rank
    if exclude is not None:
        if exclude.shape != scores.shape or exclude.dtype != torch.bool:
            raise ValueError(f"exclude must be bool {list(scores.shape)}, got {exclude.dtype} {list(exclude.shape)}")
        ahead &= ~exclude
        ahead.scatter_(1, column, True)
    return ahead.sum(1)


class RankingMetrics:
    """Streaming HR@K, NDCG@K and MRR in constant memory.

    >>> meter = RankingMetrics(ks=(1, 10))
    >>> meter.update(torch.tensor([1, 3]))
    >>> {name: round(value, 4) for name, value in meter.compute().items()}
    {'hr@1': 0.5, 'ndcg@1': 0.5, 'hr@10': 1.0, 'ndcg@10': 0.75, 'mrr': 0.6667}
    """

    def __init__(self, ks: Sequence[int] = (10, 50)) -> None:
        if any(k < 1 for k in ks):
            raise ValueError(f"every K must be at least 1, got {tuple(ks)}")
        self.ks = tuple(ks)
        self._hits = torch.zeros(len(self.ks), dtype=torch.float64)
        self._gains = torch.zeros(len(self.ks), dtype=torch.float64)
        self._reciprocal = 0.0
        self._count = 0

    def update(self, ranks: Tensor) -> None:
        """Add ranks int64 [n], counted from 1."""
        if ranks.numel() and int(ranks.min()) < 1:
            raise ValueError("ranks count from 1")
        r = ranks.to("cpu", torch.float64)
        within = r.unsqueeze(1) <= torch.tensor(self.ks, dtype=torch.float64)
        self._hits += within.sum(0)
        self._gains += (within / torch.log2(r + 1).unsqueeze(1)).sum(0)
        self._reciprocal += float((1 / r).sum())
        self._count += len(r)

    def merge(self, other: RankingMetrics) -> None:
        """Add what another accumulator of the same Ks has seen."""
        if self.ks != other.ks:
            raise ValueError(f"cannot merge K = {other.ks} into K = {self.ks}")
        self._hits += other._hits
        self._gains += other._gains
        self._reciprocal += other._reciprocal
        self._count += other._count

    def compute(self) -> dict[str, float]:
        """``hr@K`` and ``ndcg@K`` for each K, and ``mrr``; NaN when nothing was ranked."""
        n = self._count or float("nan")
        values: dict[str, float] = {}
        for i, k in enumerate(self.ks):
            values[f"hr@{k}"] = float(self._hits[i]) / n
            values[f"ndcg@{k}"] = float(self._gains[i]) / n
        values["mrr"] = self._reciprocal / n
        return values
