"""FinalMLP (Mao et al. 2023, "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction"; code in FuxiCTR)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import embcache as ec
from dlrm.models.base import ClickModel, SparseArch, derived
from dlrm.models.layers import MLP, check_sizes, xavier_init

SUFFIXES = (".gate1", ".gate2")


class DenseArch(nn.Identity):
    """Dense features enter both streams as they are: `B x n_dense -> B x n_dense`."""


class FeatureGate(nn.Module):
    """Soft feature selection of one stream: `B x N -> B x N`, x * 2 sigmoid(MLP(context)).

    The context is the embedding of `context` features, from tables of their own, or a learned vector of width
    `bias_dim` that is the same for all samples where there are none.
    """

    def __init__(
        self,
        features: int,
        hidden: Sequence[int],
        bias_dim: int,
        context_arch: SparseArch | None = None,
    ) -> None:
        super().__init__()
        self.context_arch = context_arch
        self.context_bias = None if context_arch is not None else nn.Parameter(torch.zeros(1, bias_dim))
        width = self.context_arch.out_features if self.context_arch is not None else bias_dim
        self.gate = MLP(width, [*hidden, features], last_relu=False, init=xavier_init)

    def forward(self, x: Tensor, sparse: Any) -> Tensor:
        """`x` [B, N], `sparse` the model's input -> [B, N]."""
        context = self.context_arch(sparse) if self.context_arch is not None else self.context_bias
        return x * (2.0 * torch.sigmoid(self.gate(context)))


class InteractionArch(nn.Module):
    """Two gated streams of MLPs over the same features: `B x N -> B x N1, B x N2`."""

    def __init__(self, gates: Sequence[FeatureGate], streams: Sequence[MLP]) -> None:
        super().__init__()
        self.gates = nn.ModuleList(gates)
        self.streams = nn.ModuleList(streams)

    def forward(self, x: Tensor, sparse: Any) -> tuple[Tensor, Tensor]:
        """`x` [B, N] -> ([B, N1], [B, N2])."""
        inputs = [gate(x, sparse) for gate in self.gates] if len(self.gates) else [x, x]
        first, second = (stream(part) for stream, part in zip(self.streams, inputs, strict=True))
        return first, second


class OverArch(nn.Module):
    """Bilinear fusion by heads: `b + w_1 x + w_2 y + sum_h x_h W_h y_h`, x `B x N1`, y `B x N2` -> `B x 1`.

    Each stream is cut into `heads` equal parts; W_h is N1/heads x N2/heads.

    >>> OverArch(8, 4, heads=2)(torch.zeros(3, 8), torch.zeros(3, 4)).shape
    torch.Size([3, 1])
    """

    def __init__(self, first: int, second: int, heads: int = 1) -> None:
        super().__init__()
        if heads < 1 or first % heads or second % heads:
            raise ValueError(f"FinalMLP: heads must divide both streams' widths {first} and {second}, got {heads}")
        self.heads = heads
        self.linear_first = nn.Linear(first, 1)
        self.linear_second = nn.Linear(second, 1, bias=False)
        self.bilinear = nn.Parameter(torch.empty(heads, first // heads, second // heads))
        xavier_init(self.linear_first)
        xavier_init(self.linear_second)
        for head in self.bilinear.data:
            nn.init.xavier_normal_(head)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """`first` [B, N1], `second` [B, N2] -> [B, 1]."""
        x = first.unflatten(1, (self.heads, -1)).transpose(0, 1)
        y = second.unflatten(1, (self.heads, -1)).transpose(0, 1)
        products = (torch.bmm(x, self.bilinear) * y).sum(dim=(0, 2)).unsqueeze(1)
        result: Tensor = self.linear_first(first) + self.linear_second(second) + products
        return result


class FinalMLP(ClickModel):
    """Two MLP streams with feature gates and bilinear fusion.

    `mlp1`, `mlp2`: sizes of the streams; `heads` divides both last sizes. `gate_hidden` None leaves the gates out, a
    tuple (also an empty one) lists their hidden layers; `gate_context` names the features whose own embeddings
    (`<table>.gate1`, `<table>.gate2`) steer the first and the second gate. Tables may have different dims. Linear
    weights start Xavier normal, biases 0 (FuxiCTR); its embeddings N(0, 1e-4^2).

    >>> tables = [ec.TableConfig(f"t{i}", 100, 8, features=[f"f{i}"]) for i in range(2)]
    >>> model = FinalMLP(tables, n_dense=4, mlp1=(16, 8), mlp2=(8,), heads=2, gate_context=(["f0"], []))
    >>> ids = ec.KeyedJaggedTensor.from_lengths_sync(["f0", "f1"], torch.arange(4), torch.ones(4, dtype=torch.long))
    >>> model(torch.zeros(2, 4), ids).shape
    torch.Size([2])
    """

    def __init__(
        self,
        tables: Sequence[ec.TableConfig],
        n_dense: int,
        mlp1: Sequence[int] = (400, 400, 400),
        mlp2: Sequence[int] = (400, 400, 400),
        heads: int = 1,
        gate_hidden: Sequence[int] | None = (),
        gate_context: tuple[Sequence[str], Sequence[str]] = ((), ()),
        **options: Any,
    ) -> None:
        dropout = float(options.pop("dropout", 0.0))
        context = [_context_tables(tables, names, suffix) for names, suffix in zip(gate_context, SUFFIXES, strict=True)]
        super().__init__(tables, n_dense, further=[table for part in context for table in part], **options)
        if gate_hidden is None and any(gate_context):
            raise ValueError("FinalMLP: gate_context needs gates, but gate_hidden is None")
        self.dense_arch = DenseArch()
        features = n_dense + self.sparse_arch.out_features
        sizes = [check_sizes("mlp1", mlp1), check_sizes("mlp2", mlp2)]
        streams = [MLP(features, size, dropout=dropout, init=xavier_init) for size in sizes]
        gates = []
        if gate_hidden is not None:
            for part, suffix in zip(context, SUFFIXES, strict=True):
                context_arch = SparseArch(part, self.store, suffix) if part else None
                gates.append(FeatureGate(features, gate_hidden, self.sparse_arch.dims[0], context_arch))
        self.inter_arch = InteractionArch(gates, streams)
        self.over_arch = OverArch(streams[0].out_features, streams[1].out_features, heads)

    def head(self, dense: Tensor, pooled: Tensor, sparse: Any) -> Tensor:
        """[B, n_dense], [B, sum of D], KeyedJaggedTensor -> [B]."""
        x = torch.cat([self.dense_arch(dense), pooled], dim=1)
        logits: Tensor = self.over_arch(*self.inter_arch(x, sparse))
        return logits.squeeze(1)


def _context_tables(tables: Sequence[ec.TableConfig], names: Sequence[str], suffix: str) -> list[ec.TableConfig]:
    """The tables of the features `names`, restricted to them and renamed."""
    known = {feature for table in tables for feature in table.feature_names}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"FinalMLP: gate_context names unknown features {unknown}, known are {sorted(known)}")
    chosen = [(table, [feature for feature in table.feature_names if feature in names]) for table in tables]
    return [derived(table, suffix, features) for table, features in chosen if features]
