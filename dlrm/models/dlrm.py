"""DLRM (Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

import embcache as ec
from dlrm.models.base import ClickModel
from dlrm.models.interaction import dot_interaction, native_interaction
from dlrm.models.layers import MLP, check_sizes


class DenseArch(MLP):
    """Bottom MLP, ReLU after each layer: `B x n_dense -> B x D`."""


class InteractionArch(nn.Module):
    """Dot products of all pairs: dense `B x D` (or None), sparse `B x (F D)` -> `B x (D + N(N-1)/2)`, N = F + 1.

    Without dense features N = F, and the output holds the products only.

    >>> import torch
    >>> arch = InteractionArch(n_features=26, dim=64)
    >>> arch(torch.zeros(2, 64), torch.zeros(2, 26 * 64)).shape
    torch.Size([2, 415])
    """

    def __init__(self, n_features: int, dim: int, has_dense: bool = True) -> None:
        super().__init__()
        self.n_features, self.dim, self.has_dense = n_features, dim, has_dense
        n = n_features + has_dense
        self.out_features = n * (n - 1) // 2 + (dim if has_dense else 0)
        native_interaction()  # loaded now, so that a compiled forward need not

    def forward(self, dense: Tensor | None, sparse: Tensor) -> Tensor:
        """See :func:`dlrm.models.interaction.dot_interaction`."""
        return dot_interaction(dense if self.has_dense else None, sparse, self.dim)

    def extra_repr(self) -> str:
        return f"n_features={self.n_features}, dim={self.dim}, out_features={self.out_features}"


class OverArch(MLP):
    """Top MLP, ReLU after each layer but the last: `B x (D + pairs) -> B x 1`."""

    def __init__(self, in_features: int, sizes: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__(in_features, sizes, last_relu=False, dropout=dropout)


class DLRM(ClickModel):
    """Bottom MLP over dense features, embeddings, dot products of all pairs, top MLP over [dense, products].

    `bottom_mlp` ends with the embedding dim (appended when it does not); `top_mlp` ends with 1 (appended likewise).
    `n_dense=0` leaves the bottom MLP and the dense vector out; then at least two features are needed. Linear layers
    start as in the authors' code, W ~ N(0, 2 / (in + out)), b ~ N(0, 1 / out); their embeddings are uniform on
    +-sqrt(1 / rows), see :func:`dlrm.models.published_init`.

    >>> import torch
    >>> tables = [ec.TableConfig(f"t{i}", 100, 8, features=[f"f{i}"]) for i in range(2)]
    >>> model = DLRM(tables, n_dense=4, bottom_mlp=(16, 8), top_mlp=(16, 1))
    >>> ids = ec.KeyedJaggedTensor.from_lengths_sync(["f0", "f1"], torch.arange(4), torch.ones(4, dtype=torch.long))
    >>> model(torch.zeros(2, 4), ids).shape
    torch.Size([2])
    """

    def __init__(
        self,
        tables: Sequence[ec.TableConfig],
        n_dense: int,
        bottom_mlp: Sequence[int] = (512, 256, 64),
        top_mlp: Sequence[int] = (512, 512, 256, 1),
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(tables, n_dense, **options)
        dim = self.sparse_arch.uniform_dim("DLRM")
        features = len(self.sparse_arch.features)
        if n_dense == 0 and features < 2:
            raise ValueError("DLRM without dense features needs at least two sparse features: one has no pairs")
        bottom = check_sizes("bottom_mlp", bottom_mlp)
        top = check_sizes("top_mlp", top_mlp)
        self.dense_arch = DenseArch(n_dense, _ending(bottom, dim), dropout=dropout) if n_dense else None
        self.inter_arch = InteractionArch(features, dim, has_dense=n_dense > 0)
        self.over_arch = OverArch(self.inter_arch.out_features, _ending(top, 1), dropout)

    def head(self, dense: Tensor, pooled: Tensor, sparse: Any) -> Tensor:
        """[B, n_dense], [B, F * D] -> [B]."""
        bottom = self.dense_arch(dense) if self.dense_arch is not None else None
        logits: Tensor = self.over_arch(self.inter_arch(bottom, pooled))
        return logits.squeeze(1)


def _ending(sizes: list[int], last: int) -> list[int]:
    return sizes if sizes and sizes[-1] == last else [*sizes, last]
