"""Random problems for the kernels: slabs, descriptors and batches, and views of what a row holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from embcache.kernels import rules

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SGD, ADAGRAD, ROW_WISE, ADAM, ROW_WISE_ADAM, LAMB, LARS, FTRL = range(8)
NAMES = (
    "lr", "wd", "eps", "b1", "b2", "momentum", "eta", "alpha", "beta", "l1", "l2", "max_norm", "c", "step",
    "multiplier", "zero",
)  # fmt: skip
NO_TENSOR = torch.empty(0, dtype=torch.int64)


def hyper_row(**changes: float) -> list[float]:
    """One row of the hyper matrix: the defaults of the conformance page, and changes by name."""
    values = dict.fromkeys(NAMES, 0.0)
    values |= {"lr": 0.05, "eps": 1e-8, "b1": 0.9, "b2": 0.999, "momentum": 0.9, "eta": 0.001, "alpha": 0.05}
    values |= {"beta": 1.0, "c": 1.0, "step": 1.0, "multiplier": 1.0}
    assert set(changes) <= set(NAMES)
    return [{**values, **changes}[name] for name in NAMES]


@dataclass
class Tables:
    """Slabs of `capacity` rows with random weights and a different constant of state in each table."""

    dims: list[int]
    rule: int = SGD
    dtype: int = 0
    flags: int = 0
    capacity: int = 64
    seed: int = 0
    slabs: list[Tensor] = field(init=False)
    described: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.slabs, rows = [], []
        for i, dim in enumerate(self.dims):
            offset = -(-dim * DTYPES[self.dtype].itemsize // 4) * 4
            states = rules.state_floats(self.rule, dim, self.flags)
            slab = torch.full((self.capacity, offset + 4 * states), 77, dtype=torch.uint8)
            slab.view(DTYPES[self.dtype])[:, :dim] = torch.randn(self.capacity, dim, generator=generator)
            slab.view(torch.float32)[:, offset // 4 :] = 0.5 + i
            if self.flags & 8:
                slab.view(torch.float32)[:, -1] = i
            self.slabs.append(slab)
            rows.append([dim, self.dtype, offset, self.rule, 0x1234567890ABCDEF + i, self.flags, 0, dim])
        self.described = torch.tensor(rows, dtype=torch.int64).reshape(-1, 8)

    def copy(self) -> list[Tensor]:
        return [s.clone() for s in self.slabs]

    def weights(self, slabs: list[Tensor], t: int) -> Tensor:
        return slabs[t].view(DTYPES[self.dtype])[:, : self.dims[t]].float()

    def state(self, slabs: list[Tensor], t: int) -> Tensor:
        return slabs[t].view(torch.float32)[:, int(self.described[t, 2]) // 4 :]


@dataclass
class Batch:
    """Jagged bags of features over tables, gradients laid out side by side like a collection's output."""

    features: Tensor
    values: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    grads: list[Tensor]
    numel: int


def make_batch(
    tables: Tables,
    features: list[int],
    bags: int | list[int],
    *,
    longest: int = 5,
    pooling: int = 0,
    weighted: bool = False,
    ids: torch.dtype = torch.int64,
    seed: int = 0,
    grad_dtype: torch.dtype = torch.float32,
) -> Batch:
    """One feature for each entry of `features` (a table); `bags` of 0 to `longest` ids for each (or for all)."""
    generator = torch.Generator().manual_seed(1000 + seed)
    counts = [bags] * len(features) if isinstance(bags, int) else bags
    lengths = torch.randint(0, longest + 1, (sum(counts),), generator=generator)
    if pooling == 2:
        lengths = torch.ones_like(lengths)
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    rows, first, element = [], 0, 0
    for table, count in zip(features, counts, strict=True):
        rows.append([table, pooling, first, count, 0, element, tables.dims[table]])
        first, element = first + count, element + count * tables.dims[table]
    n = int(offsets[-1])
    return Batch(
        torch.tensor(rows, dtype=torch.int64).reshape(-1, 7),
        torch.randint(0, tables.capacity, (n,), generator=generator).to(ids),
        None if pooling == 2 else offsets.to(ids),
        torch.rand(n, generator=generator) + 0.1 if weighted else None,
        [torch.randn(element, generator=generator).to(grad_dtype)],
        element,
    )


def lookup(kernels: ModuleType, tables: Tables, batch: Batch, out_dtype: int = 0) -> Tensor:
    return kernels.pooled_lookup(
        tables.slabs,
        tables.described,
        batch.features,
        batch.values,
        batch.offsets,
        batch.weights,
        batch.numel,
        out_dtype,
    )


def update(
    kernels: ModuleType,
    tables: Tables,
    batch: Batch,
    hyper: list[float],
    slabs: list[Tensor] | None = None,
    written: list[Tensor] | None = None,
    slot_ids: list[Tensor] | None = None,
) -> tuple[list[Tensor], int]:
    """(slabs after one step, rows touched); the tables' own slabs stay, unless given as `slabs`."""
    slabs = tables.copy() if slabs is None else slabs
    t = len(slabs)
    rows = kernels.fused_update(
        slabs,
        written or [NO_TENSOR.to(torch.uint8)] * t,
        tables.described,
        torch.tensor([hyper] * t, dtype=torch.float64).reshape(-1, 16),
        batch.features,
        batch.values,
        batch.offsets,
        batch.weights,
        batch.grads,
        slot_ids or [NO_TENSOR] * t,
    )
    return slabs, rows


def dense_gradient(tables: Tables, batch: Batch, t: int) -> tuple[Tensor, Tensor]:
    """fp64 [capacity, dim] sum of the gradients of each slot of table t, by a plain loop; and which slots occur."""
    grad = torch.zeros(tables.capacity, tables.dims[t], dtype=torch.float64)
    seen = torch.zeros(tables.capacity, dtype=torch.bool)
    for table, pooling, first, bags, tensor, element, stride in batch.features.tolist():
        if table != t:
            continue
        for b in range(bags):
            start, stop = (first + b, first + b + 1)
            if batch.offsets is not None:
                start, stop = int(batch.offsets[first + b]), int(batch.offsets[first + b + 1])
            at = element + b * stride
            g = batch.grads[tensor].double()[at : at + tables.dims[t]]
            for i in range(start, stop):
                scale = 1.0 if batch.weights is None else float(batch.weights[i])
                grad[int(batch.values[i])] += g * scale / (stop - start if pooling == 1 else 1)
                seen[int(batch.values[i])] = True
    return grad, seen
