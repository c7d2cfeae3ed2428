"""Per-table options that torch.nn's modules have, and what to do with ids out of range: plain tensor code around the
kernels, run only for tables that ask for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import TableConfig
from .errors import IdOutOfRange
from .jagged import KeyedJaggedTensor


@dataclass
class Counts:
    """Ids of one table that were not in range."""

    dropped: int = 0
    mapped: int = 0


def repair(
    batch: KeyedJaggedTensor,
    features: Sequence[tuple[str, int, int]],
    tables: Sequence[TableConfig],
    counts: Sequence[Counts],
) -> KeyedJaggedTensor:
    """``batch`` with ids out of range raised, dropped or mapped, and padding ids of pooled tables dropped.

    ``features``: (name, table, index in the batch's keys) of those that will be looked up. Counters change only if
    nothing raises.
    """
    values, at = batch.values(), batch.offset_per_key()
    keep = torch.ones(values.numel(), dtype=torch.bool)
    mapped: list[tuple[int, Tensor]] = []
    gone: list[tuple[int, int]] = []
    for name, t, i in features:
        table, ids = tables[t], values[at[i] : at[i + 1]]
        bad = _out_of_range(name, table, ids, at[i])
        if bad is not None and table.out_of_range == "drop":
            keep[at[i] : at[i + 1]] &= ~bad
            gone.append((t, int(bad.sum())))
        elif bad is not None:
            mapped.append((t, bad.nonzero().flatten() + at[i]))
        if table.padding_idx is not None and table.pooling != "none":
            padding = ids == table.padding_idx
            if bad is not None and table.out_of_range == "map" and table.reserved_row == table.padding_idx:
                padding |= bad  # the row that absent ids read contributes nothing and is never trained
            keep[at[i] : at[i + 1]] &= ~padding
    if mapped:
        values = values.clone()
        for t, positions in mapped:
            values[positions] = tables[t].reserved_row
            counts[t].mapped += positions.numel()
    for t, number in gone:
        counts[t].dropped += number
    return batch.masked(values, None if bool(keep.all()) else keep)


def _out_of_range(feature: str, table: TableConfig, ids: Tensor, start: int) -> Tensor | None:
    if table.num_embeddings is None:
        return None
    bad = (ids < 0) | (ids >= table.num_embeddings)
    if not bool(bad.any()):
        return None
    if table.out_of_range == "raise":
        k = int(bad.nonzero()[0])
        raise IdOutOfRange(table.name, feature, start + k, int(ids[k]), table.num_embeddings)
    return bad


def renormalised(rows: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Rows longer than ``max_norm`` scaled by max_norm / (norm + 1e-7), as ``torch.nn.functional.embedding`` does."""
    return shortened(rows, torch.linalg.vector_norm(rows, norm_type, dim=1, keepdim=True), max_norm)


def shortened(rows: Tensor, norms: Tensor, max_norm: float) -> Tensor:
    """The same where the norms [n, 1] are known."""
    return torch.where(norms > max_norm, rows * (max_norm / (norms + 1e-7)), rows)


def norm_part(rows: Tensor, norm_type: float) -> Tensor:
    """[n, 1]: what some columns of rows add to the norms of the whole rows."""
    if math.isinf(norm_type):
        return torch.linalg.vector_norm(rows, norm_type, dim=1, keepdim=True)
    return (rows.abs() ** norm_type).sum(1, keepdim=True)


def norm_of(parts: Tensor, norm_type: float) -> Tensor:
    """[n, 1]: the norms of whole rows, of what their columns add, [parts, n, 1] in order."""
    if math.isinf(norm_type):
        return parts.amax(0)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total ** (1.0 / norm_type)


def overlay(slab: Tensor, table: TableConfig, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """(a slab of only the rows at ``slots[positions]``, renormalised; ``slots`` pointing into it at those)."""
    assert table.max_norm is not None
    unique, inverse = torch.unique(slots[positions], return_inverse=True)
    small = slab[unique]
    weights = small.view(table.dtype)[:, : table.embedding_dim]
    weights.copy_(renormalised(weights.float(), table.max_norm, table.norm_type))
    moved = slots.clone()
    moved[positions] = inverse.to(slots.dtype)
    return small, moved


def renormalise_rows(slab: Tensor, table: TableConfig, slots: Tensor) -> None:
    """Write the renormalised rows of ``slots`` back."""
    assert table.max_norm is not None
    unique = torch.unique(slots)
    weights = slab.view(table.dtype)[:, : table.embedding_dim]
    weights[unique] = renormalised(weights[unique].float(), table.max_norm, table.norm_type).to(table.dtype)


def inverse_frequency(slots: Tensor) -> Tensor:
    """fp32 [n]: 1 / the number of times each slot occurs."""
    _, inverse, counts = torch.unique(slots, return_inverse=True, return_counts=True)
    return 1.0 / counts[inverse].to(torch.float32)
