"""Random jagged batches and a torch twin of a collection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import embcache as ec


def jagged(
    features: Sequence[str],
    rows: Sequence[int],
    bags: int | Sequence[int],
    *,
    longest: int = 5,
    weighted: bool = False,
    dtype: torch.dtype = torch.int64,
    seed: int = 0,
) -> ec.KeyedJaggedTensor:
    """Bags of 0 to ``longest`` ids, with duplicates."""
    g = torch.Generator().manual_seed(seed)
    sizes = [bags] * len(features) if isinstance(bags, int) else list(bags)
    lengths = [torch.randint(0, longest + 1, (b,), generator=g) for b in sizes]
    values = [torch.randint(0, r, (int(n.sum()),), generator=g) for r, n in zip(rows, lengths, strict=True)]
    flat = torch.cat(values).to(dtype)
    weights = torch.rand(flat.numel(), generator=g) + 0.1 if weighted else None
    return ec.KeyedJaggedTensor(list(features), flat, weights, torch.cat(lengths), stride_per_key=sizes)


class Twin(torch.nn.Module):
    """The collection in plain torch: dense parameters, gradients by autograd."""

    def __init__(self, store: ec.EmbeddingStore) -> None:
        super().__init__()
        self.tables = store.tables
        self.weights = torch.nn.ParameterDict(
            {t.name: torch.nn.Parameter(store.weight(t.name).float().clone()) for t in store.tables}
        )

    def forward(self, kjt: ec.KeyedJaggedTensor) -> dict[str, Tensor]:
        out = {}
        for table in self.tables:
            for name in table.feature_names:
                jt = kjt[name]
                rows = self.weights[table.name][jt.values().long()]
                if jt.weights_or_none() is not None:
                    rows = rows * jt.weights()[:, None]
                if table.pooling == "none":
                    out[name] = rows
                    continue
                bag = torch.repeat_interleave(torch.arange(jt.lengths().numel()), jt.lengths())
                pooled = torch.zeros(jt.lengths().numel(), table.embedding_dim).index_add(0, bag, rows)
                if table.pooling == "mean":
                    pooled = pooled / jt.lengths().clamp(min=1)[:, None]
                out[name] = pooled
        return out


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Within ``tolerance`` of the larger magnitude."""
    a, b = a.detach(), b.detach()
    scale = float(torch.max(a.abs().max(), b.abs().max())) if a.numel() else 1.0
    return bool(((a.double() - b.double()).abs() <= tolerance * max(scale, 1e-30)).all())
