"""Layers that the click-through models share: multilayer perceptrons, dense fields, published initialisers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dlrm.models.fused_mlp import fused_mlp, fused_mlp_applies

Initialiser = Callable[[nn.Linear], None]


def dlrm_init(linear: nn.Linear) -> None:
    """DLRM's initial values (Naumov et al. 2019, their code): W ~ N(0, 2 / (in + out)), b ~ N(0, 1 / out)."""
    nn.init.normal_(linear.weight, 0.0, math.sqrt(2.0 / (linear.in_features + linear.out_features)))
    if linear.bias is not None:
        nn.init.normal_(linear.bias, 0.0, math.sqrt(1.0 / linear.out_features))


def xavier_init(linear: nn.Linear) -> None:
    """W ~ Xavier normal, b = 0: DeepFM's and DCN's code, and FinalMLP's (FuxiCTR)."""
    nn.init.xavier_normal_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def check_sizes(name: str, sizes: Sequence[int]) -> list[int]:
    """`sizes` as a list of positive integers.

    >>> check_sizes("top_mlp", (512, 0))
    Traceback (most recent call last):
    ValueError: top_mlp: layer sizes must be positive integers, got (512, 0)
    """
    result = list(sizes)
    if any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in result):
        raise ValueError(f"{name}: layer sizes must be positive integers, got {tuple(sizes)}")
    return result


class MLP(nn.Module):
    """Linear layers with ReLU between them: `B x in_features -> B x sizes[-1]`.

    `last_relu` says whether the last layer has a ReLU too. No sizes: the identity. `dropout` follows each ReLU in
    training. Without dropout the whole stack runs as one fused autograd node where that is faster
    (:mod:`dlrm.models.fused_mlp`); the values are those of `nn.Linear` and `nn.ReLU`.

    >>> mlp = MLP(13, [512, 256, 64])
    >>> mlp(torch.zeros(4, 13)).shape
    torch.Size([4, 64])
    >>> MLP(13, []).out_features
    13
    """

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int],
        last_relu: bool = True,
        dropout: float = 0.0,
        init: Initialiser = dlrm_init,
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
        widths = [in_features, *check_sizes("sizes", sizes)]
        self.in_features, self.out_features = widths[0], widths[-1]
        self.last_relu = last_relu
        self.dropout = dropout
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(widths))
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            init(layer)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [B, in_features] -> [B, out_features]."""
        if self.dropout == 0.0 and fused_mlp_applies(x, self.layers):
            return fused_mlp(x, self.layers, self.last_relu)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i + 1 < len(self.layers) or self.last_relu:
                x = nn.functional.dropout(torch.relu(x), self.dropout, self.training)
        return x

    def extra_repr(self) -> str:
        return f"last_relu={self.last_relu}, dropout={self.dropout}"


class DenseFields(nn.Module):
    """Each dense feature as a field of its own, `x_j v_j` with a learned vector v_j: `B x n_dense -> B x n_dense x D`.

    Rendle's factorisation machine treats a real-valued feature so. v ~ N(0, std^2).

    >>> DenseFields(13, 16)(torch.ones(4, 13)).shape
    torch.Size([4, 13, 16])
    """

    def __init__(self, n_dense: int, dim: int, std: float = 0.01) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_dense, dim).normal_(0.0, std))

    def forward(self, dense: Tensor) -> Tensor:
        """`dense` [B, n_dense] -> [B, n_dense, D]."""
        return dense.unsqueeze(-1) * self.weight
