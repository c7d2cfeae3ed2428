"""DeepFM (Guo et al. 2017): a factorisation machine and an MLP over the same embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import embcache as ec
from dlrm.models.base import ClickModel, SparseArch, derived
from dlrm.models.interaction import fm_interaction
from dlrm.models.layers import MLP, DenseFields, check_sizes, xavier_init

SUFFIX = ".first_order"


class FirstOrderArch(nn.Module):
    """The linear part: one weight an id (tables of dim 1), one a dense feature, one bias: `-> B x 1`."""

    def __init__(self, tables: Sequence[ec.TableConfig], n_dense: int, store: ec.EmbeddingStore) -> None:
        """`tables` are of dim 1, with features and names ending in `.first_order`, in `store`."""
        super().__init__()
        self.sparse_arch = SparseArch(tables, store, SUFFIX)
        self.dense_weight = nn.Parameter(torch.zeros(n_dense, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        """`dense` [B, n_dense], `sparse` KeyedJaggedTensor -> [B, 1]."""
        result: Tensor = self.sparse_arch(sparse).sum(dim=1, keepdim=True) + self.bias
        return result + dense @ self.dense_weight if self.dense_weight.shape[0] else result


class DenseArch(DenseFields):
    """Each dense feature times a vector of its own: `B x n_dense -> B x n_dense x D`."""


class InteractionArch(nn.Module):
    """Second-order factorisation machine: `B x F x D -> B x 1`."""

    def forward(self, fields: Tensor) -> Tensor:
        """See :func:`dlrm.models.interaction.fm_interaction`; computed in fp32."""
        with torch.autocast(fields.device.type, enabled=False):
            return fm_interaction(fields.float())


class OverArch(MLP):
    """The deep part: all fields side by side, `B x (F D) -> B x 1`, ReLU between layers."""

    def __init__(self, in_features: int, sizes: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__(in_features, [*sizes, 1], last_relu=False, dropout=dropout, init=xavier_init)


class DeepFM(ClickModel):
    """logit = first order + FM over all pairs of fields + MLP over all fields.

    Fields are the sparse features and, as `x_j v_j`, the dense ones; all tables share one embedding dim. The first
    order has tables of its own, `<name>.first_order`, of dim 1. MLP weights start Xavier normal, dense vectors
    N(0, 0.01^2), biases 0, as in the authors' comparison code; its embeddings N(0, 0.01^2), see
    :func:`dlrm.models.published_init`. `deep_mlp` lists the hidden layers.

    >>> tables = [ec.TableConfig(f"t{i}", 100, 8, features=[f"f{i}"]) for i in range(2)]
    >>> model = DeepFM(tables, n_dense=4, deep_mlp=(16,))
    >>> ids = ec.KeyedJaggedTensor.from_lengths_sync(["f0", "f1"], torch.arange(4), torch.ones(4, dtype=torch.long))
    >>> model(torch.zeros(2, 4), ids).shape
    torch.Size([2])
    """

    def __init__(
        self,
        tables: Sequence[ec.TableConfig],
        n_dense: int,
        deep_mlp: Sequence[int] = (400, 400, 400),
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        linear = [derived(table, SUFFIX, embedding_dim=1) for table in tables]
        super().__init__(tables, n_dense, further=linear, **options)
        self.dim = self.sparse_arch.uniform_dim("DeepFM")
        fields = len(self.sparse_arch.features) + n_dense
        self.first_order = FirstOrderArch(linear, n_dense, self.store)
        self.dense_arch = DenseArch(n_dense, self.dim)
        self.inter_arch = InteractionArch()
        self.over_arch = OverArch(fields * self.dim, check_sizes("deep_mlp", deep_mlp), dropout)

    def head(self, dense: Tensor, pooled: Tensor, sparse: Any) -> Tensor:
        """[B, n_dense], [B, F * D], KeyedJaggedTensor -> [B]."""
        fields = torch.cat([self.dense_arch(dense), pooled.unflatten(1, (-1, self.dim))], dim=1)
        logits = self.first_order(dense, sparse) + self.inter_arch(fields) + self.over_arch(fields.flatten(1))
        result: Tensor = logits.squeeze(1)
        return result
