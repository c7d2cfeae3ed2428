"""DCN-V2 (Wang et al. 2021, "DCN V2: Improved Deep & Cross Network"): explicit bounded-degree feature crosses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import embcache as ec
from dlrm.models.base import ClickModel
from dlrm.models.layers import MLP, check_sizes, xavier_init


class DenseArch(MLP):
    """Dense features as they are (the paper), or through an MLP (MLPerf's DLRM-DCNv2): `B x n_dense -> B x M`."""


class CrossLayer(nn.Module):
    """Full-rank cross, `x_{l+1} = x_0 * (W x_l + b) + x_l` elementwise: `B x N, B x N -> B x N`."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        xavier_init(self.linear)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """`x0`, `x` [B, N] -> [B, N]."""
        return torch.addcmul(x, x0, self.linear(x))


class LowRankCrossLayer(nn.Module):
    """Low-rank cross, `x_{l+1} = x_0 * (U (V x_l) + b) + x_l`, U: N x r, V: r x N: `B x N, B x N -> B x N`."""

    def __init__(self, features: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(features, rank, bias=False)
        self.up = nn.Linear(rank, features)
        xavier_init(self.down)
        xavier_init(self.up)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """`x0`, `x` [B, N] -> [B, N]."""
        return torch.addcmul(x, x0, self.up(self.down(x)))


class InteractionArch(nn.Module):
    """The cross network: `B x N -> B x N` by `layers` crosses, of rank `rank` (None: full).

    >>> InteractionArch(10, layers=3)(torch.zeros(2, 10)).shape
    torch.Size([2, 10])
    >>> sum(p.numel() for p in InteractionArch(100, layers=1, rank=4).parameters())
    900
    """

    def __init__(self, features: int, layers: int, rank: int | None = None) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"cross_layers must be at least 1, got {layers}")
        if rank is not None and not 1 <= rank <= features:
            raise ValueError(f"low_rank must lie in [1, {features}], got {rank}")
        self.layers = nn.ModuleList(
            CrossLayer(features) if rank is None else LowRankCrossLayer(features, rank) for _ in range(layers)
        )

    def forward(self, x0: Tensor) -> Tensor:
        """`x0` [B, N] -> [B, N]."""
        x = x0
        for layer in self.layers:
            x = layer(x0.to(x.dtype), x)
        return x


class OverArch(nn.Module):
    """Deep network and logit. Stacked: crossed `B x N -> MLP -> B x 1`. Parallel: `[crossed, MLP(x0)] -> B x 1`."""

    def __init__(self, features: int, deep_mlp: Sequence[int], stacked: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.stacked = stacked
        self.deep = MLP(features, deep_mlp, dropout=dropout, init=xavier_init)
        self.logit = nn.Linear(self.deep.out_features + (0 if stacked else features), 1)
        xavier_init(self.logit)

    def forward(self, x0: Tensor, crossed: Tensor) -> Tensor:
        """`x0`, `crossed` [B, N] -> [B, 1]."""
        if self.stacked:
            hidden = self.deep(crossed)
        else:
            deep = self.deep(x0)
            hidden = torch.cat([crossed.to(deep.dtype), deep], dim=1)
        logits: Tensor = self.logit(hidden)
        return logits


class DCNv2(ClickModel):
    """Cross network and deep network over x_0 = [dense, embeddings], stacked or parallel.

    Tables may have different dims. `low_rank=None` gives full cross matrices, an integer the factorised ones.
    `structure` is "parallel" (default) or "stacked"; `dense_mlp` is () for the paper's plain dense features, or the
    sizes of a bottom MLP, which with "stacked" is MLPerf's DLRM-DCNv2. Weights start Xavier normal, biases 0.

    >>> tables = [ec.TableConfig("a", 100, 8, features=["a"]), ec.TableConfig("b", 100, 4, features=["b"])]
    >>> model = DCNv2(tables, n_dense=3, cross_layers=2, deep_mlp=(16, 8), low_rank=4)
    >>> ids = ec.KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.arange(4), torch.ones(4, dtype=torch.long))
    >>> model(torch.zeros(2, 3), ids).shape
    torch.Size([2])
    """

    def __init__(
        self,
        tables: Sequence[ec.TableConfig],
        n_dense: int,
        cross_layers: int = 3,
        deep_mlp: Sequence[int] = (512, 512, 256),
        low_rank: int | None = None,
        structure: str = "parallel",
        dense_mlp: Sequence[int] = (),
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(tables, n_dense, **options)
        if structure not in ("parallel", "stacked"):
            raise ValueError(f"DCNv2: structure must be 'parallel' or 'stacked', got {structure!r}")
        if dense_mlp and n_dense == 0:
            raise ValueError("DCNv2: dense_mlp needs dense features")
        self.dense_arch = DenseArch(n_dense, check_sizes("dense_mlp", dense_mlp), init=xavier_init)
        features = self.dense_arch.out_features + self.sparse_arch.out_features
        self.inter_arch = InteractionArch(features, cross_layers, low_rank)
        self.over_arch = OverArch(features, check_sizes("deep_mlp", deep_mlp), structure == "stacked", dropout)

    def head(self, dense: Tensor, pooled: Tensor, sparse: Any) -> Tensor:
        """[B, n_dense], [B, sum of D] -> [B]."""
        x0 = torch.cat([self.dense_arch(dense).to(pooled.dtype), pooled], dim=1)
        logits: Tensor = self.over_arch(x0, self.inter_arch(x0))
        return logits.squeeze(1)
