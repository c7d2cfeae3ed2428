"""Every kernel in plain torch: the oracle of the tests, and the fallback where no compiler is.

Same functions, arguments and order of summation as the native ops (``embcache/kernels/native.py``). A table's arena
("slab") is uint8 [capacity, row_bytes]: a row holds its weights, then at ``state_offset`` its fp32 optimizer state.

``tables`` int64 [T, 8]: dim, weight dtype, state_offset, rule, rounding key, flags, first column, columns of the rows
that these are columns of. ``features`` int64 [F, 7]: table, pooling, first bag, bags, tensor, element offset, element
stride. ``hyper`` float64 [T, 16]: see ``embcache.optim``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from .. import init
from . import rules

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUM, MEAN, NONE = 0, 1, 2


class Feature(NamedTuple):
    """One row of the features matrix."""

    table: int
    pooling: int
    first: int
    bags: int
    tensor: int
    offset: int
    stride: int


def _features(features: Tensor) -> Iterator[Feature]:
    return (Feature(*row) for row in features.tolist())


def _range(f: Feature, offsets: Tensor | None) -> tuple[int, int]:
    """Positions [start, stop) of a feature's ids in values."""
    if offsets is None:
        return f.first, f.first + f.bags
    return int(offsets[f.first]), int(offsets[f.first + f.bags])


def weight_view(slab: Tensor, dim: int, dtype_code: int) -> Tensor:
    """[capacity, dim] view of the weights in a slab."""
    return slab.view(WEIGHT_DTYPES[dtype_code])[:, :dim]


def state_view(slab: Tensor, state_offset: int, width: int) -> Tensor:
    """fp32 [capacity, width] view of the optimizer state in a slab."""
    first = state_offset // 4
    if width == 0:  # the row may end before a whole fp32
        return torch.empty(slab.shape[0], 0)
    return slab.view(torch.float32)[:, first : first + width]


def _gather(slab: Tensor, dim: int, dtype_code: int, slots: Tensor) -> Tensor:
    return weight_view(slab, dim, dtype_code)[slots.to(torch.int64)].to(torch.float32)


def pooled_lookup(
    slabs: Sequence[Tensor],
    tables: Tensor,
    features: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    out_numel: int,
    out_dtype: int,
) -> Tensor:
    """One-dimensional output: each bag's pooled vector at its feature's element offset and stride."""
    out = torch.zeros(out_numel, dtype=WEIGHT_DTYPES[out_dtype])
    described = tables.tolist()
    for f in _features(features):
        dim, code = described[f.table][:2]
        start, stop = _range(f, offsets)
        if f.bags == 0:
            continue
        rows = _gather(slabs[f.table], dim, code, values[start:stop])
        target = out.as_strided((f.bags, dim), (f.stride, 1), f.offset)
        scale = None if weights is None else weights[start:stop].to(torch.float32)
        if offsets is None:
            target.copy_(rows if scale is None else rows * scale[:, None])
            continue
        bags = offsets[f.first : f.first + f.bags + 1].to(torch.int64) - start
        target.copy_(_pool(rows, bags, scale, f.pooling == MEAN))
    return out


def _pool(rows: Tensor, bags: Tensor, scale: Tensor | None, mean: bool) -> Tensor:
    if rows.shape[0] == 0:
        return torch.zeros(bags.numel() - 1, rows.shape[1])
    pooled = embedding_bag(
        torch.arange(rows.shape[0]), rows, bags, mode="sum", per_sample_weights=scale, include_last_offset=True
    )
    if mean:
        pooled /= (bags[1:] - bags[:-1]).clamp(min=1).to(torch.float32)[:, None]
    return pooled


class _Contribution(NamedTuple):
    """What one feature adds to a table's gradient: id k of it adds ``scale[k] * grads[row[k]]``."""

    slots: Tensor
    rows: Tensor
    scale: Tensor
    grads: Tensor


def _contribution(
    f: Feature, dim: int, values: Tensor, offsets: Tensor | None, weights: Tensor | None, grads: Sequence[Tensor]
) -> _Contribution:
    start, stop = _range(f, offsets)
    grad = grads[f.tensor].as_strided((f.bags, dim), (f.stride, 1), grads[f.tensor].storage_offset() + f.offset)
    scale = torch.ones(stop - start) if weights is None else weights[start:stop].to(torch.float32)
    if offsets is None:
        rows = torch.arange(f.bags)
    else:
        bags = offsets[f.first : f.first + f.bags + 1].to(torch.int64)
        lengths = bags[1:] - bags[:-1]
        rows = torch.repeat_interleave(torch.arange(f.bags), lengths)
        if f.pooling == MEAN:
            scale = scale / lengths.to(torch.float32)[rows]
    return _Contribution(values[start:stop].to(torch.int64), rows, scale, grad.to(torch.float32))


def _table_gradient(parts: Sequence[_Contribution]) -> tuple[Tensor, Tensor]:
    """(unique slots ascending, fp32 [u, dim] gradient sums in ascending position)."""
    slots = torch.cat([p.slots for p in parts])
    sizes = [0] + [p.grads.shape[0] for p in parts]
    shifts = torch.tensor(sizes).cumsum(0).tolist()
    rows = torch.cat([p.rows + shift for p, shift in zip(parts, shifts, strict=False)])
    grads = torch.cat([p.grads for p in parts])
    scale = torch.cat([p.scale for p in parts])
    unique, counts = torch.unique(slots, return_counts=True)
    order = torch.sort(slots, stable=True).indices
    bounds = torch.zeros(unique.numel() + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=bounds[1:])
    if unique.numel() == 0:
        return unique, grads[:0]
    summed = embedding_bag(
        rows[order], grads, bounds, mode="sum", per_sample_weights=scale[order], include_last_offset=True
    )
    return unique, summed


def fused_update(
    slabs: Sequence[Tensor],
    written: Sequence[Tensor],
    tables: Tensor,
    hyper: Tensor,
    features: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    grads: Sequence[Tensor],
    slot_ids: Sequence[Tensor],
) -> int:
    """Sum the gradients of equal slots, apply each table's rule once per touched row; returns the rows touched."""
    described, options = tables.tolist(), hyper.tolist()
    parts: dict[int, list[_Contribution]] = {}
    for f in _features(features):
        parts.setdefault(f.table, []).append(_contribution(f, described[f.table][0], values, offsets, weights, grads))
    touched = 0
    for t, contributions in parts.items():
        slots, grad = _table_gradient(contributions)
        touched += slots.numel()
        if slots.numel():
            ids = slot_ids[t][slots] if slot_ids[t].numel() else slots
            _update_rows(slabs[t], described[t], options[t], slots, ids, grad)
            _mark(written[t], slots)
    return touched


def _update_rows(
    slab: Tensor, described: list[int], hyper: list[float], slots: Tensor, ids: Tensor, grad: Tensor
) -> None:
    if hyper[14] != 1.0:
        grad = grad * torch.tensor(hyper[14], dtype=torch.float32)
    _apply(slab, described, hyper, slots, ids, grad, rules.RowSums(slots.numel(), described[7]))


def _apply(
    slab: Tensor,
    described: list[int],
    hyper: list[float],
    slots: Tensor,
    ids: Tensor | None,
    grad: Tensor,
    row: rules.RowSums,
) -> None:
    """The rule on rows; ``ids`` None: only what it sums is asked for."""
    dim, dtype_code, state_offset, rule, key, flags, first, _ = described
    weights = weight_view(slab, dim, dtype_code)
    state = state_view(slab, state_offset, rules.state_floats(rule, dim, flags))
    new_w, new_state = rules.apply(rule, flags, hyper, weights[slots].to(torch.float32), state[slots], grad, row)
    if ids is None:
        return
    if dtype_code and flags & 1:
        new_w = round_stochastically(new_w, dtype_code, key, ids, int(hyper[13]), first)
    weights[slots] = new_w.to(weights.dtype)
    state[slots] = new_state


def row_sums(slab: Tensor, table: Tensor, hyper: Tensor, slots: Tensor, grads: Tensor, given: Tensor | None) -> Tensor:
    """fp32 [n, 3]: what the rule sums over the columns of each row; nothing changes."""
    described = table[0].tolist()
    row = rules.RowSums(slots.numel(), described[7], given)
    _apply(slab, described, hyper[0].tolist(), slots, None, grads, row)
    return row.found


def apply_rows(
    slab: Tensor,
    written: Tensor,
    table: Tensor,
    hyper: Tensor,
    slots: Tensor,
    grads: Tensor,
    given: Tensor | None,
    slot_ids: Tensor,
) -> None:
    """The rule on distinct rows whose gradients are summed already."""
    described = table[0].tolist()
    ids = slot_ids[slots] if slot_ids.numel() else slots
    row = rules.RowSums(slots.numel(), described[7], given)
    _apply(slab, described, hyper[0].tolist(), slots, ids, grads, row)
    _mark(written, slots)


def _mark(written: Tensor, slots: Tensor) -> None:
    if written.numel():
        bits = torch.zeros(written.numel() * 8, dtype=torch.bool)
        bits[slots] = True
        packed = (bits.view(-1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
        written |= packed


def round_stochastically(x: Tensor, dtype_code: int, key: int, ids: Tensor, step: int, first: int = 0) -> Tensor:
    """fp32 [n, dim] whose values the 16-bit format holds: each rounded up or down, in expectation exactly ``x``, which
    are columns ``first`` and on.

    A random integer below one unit of the kept mantissa is added to the fp32 bits and the rest cut off.
    """
    words = init.random_words(key, ids, x.shape[1], step, first)
    cut = 16 if dtype_code == 1 else 13
    bits = x.contiguous().view(torch.int32).to(torch.int64)
    magnitude = bits & 0x7FFFFFFF
    rounded = ((magnitude + (words >> (32 - cut))) >> cut) << cut
    if dtype_code == 2:  # fp16 subnormals, below 2^-14, have the fixed unit 2^-24
        steps = x.abs().to(torch.float64) * 2.0**24 + words.to(torch.float64) * 2.0**-32
        small = (torch.floor(steps) * 2.0**-24).to(torch.float32).view(torch.int32).to(torch.int64)
        rounded = torch.where(magnitude < 113 << 23, small, rounded)
    out = torch.where(magnitude < 0x7F800000, rounded, magnitude) | (bits & 0x80000000)
    return (out - ((out >> 31) << 32)).to(torch.int32).view(torch.float32)


def grad_weights(
    slabs: Sequence[Tensor],
    tables: Tensor,
    features: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    grads: Sequence[Tensor],
) -> Tensor:
    """fp32 [n]: d/dp_i = <grad_out of its bag, w_i>, divided by the bag's length under mean pooling."""
    out = torch.zeros(values.numel())
    described = tables.tolist()
    for f in _features(features):
        dim, code = described[f.table][:2]
        part = _contribution(f, dim, values, offsets, None, grads)
        start, stop = _range(f, offsets)
        rows = _gather(slabs[f.table], dim, code, part.slots)
        out[start:stop] = (rows * part.grads[part.rows]).sum(1) * part.scale
    return out


def all_finite(grads: Sequence[Tensor]) -> bool:
    """No NaN and no infinity in any of the tensors."""
    return all(bool(torch.isfinite(g).all()) for g in grads)


def check_ids(values: Tensor, offsets: Tensor | None, features: Tensor, rows: Tensor) -> int:
    """First position whose id is outside ``[0, rows[table])``, or -1; ``rows[table] < 0``: every id is inside."""
    limits = rows.tolist()
    first = -1
    for f in _features(features):
        if limits[f.table] < 0:
            continue
        start, stop = _range(f, offsets)
        ids = values[start:stop]
        bad = (ids < 0) | (ids >= limits[f.table])
        if bool(bad.any()):
            at = start + int(bad.nonzero()[0])
            first = at if first < 0 else min(first, at)
    return first


def check_offsets(offsets: Tensor, n_values: int) -> int:
    """-1 where offsets begin at 0, never decrease and end at ``n_values``; else the first bad position."""
    if offsets.numel() == 0 or int(offsets[0]) != 0:
        return 0
    down = offsets[1:] < offsets[:-1]
    if bool(down.any()):
        return int(down.nonzero()[0]) + 1
    return -1 if int(offsets[-1]) == n_values else offsets.numel() - 1


def init_rows(
    slab: Tensor,
    slots: Tensor | None,
    ids: Tensor | None,
    first_id: int,
    dim: int,
    weight_dtype: int,
    state_offset: int,
    init_code: int,
    p0: float,
    p1: float,
    key: int,
    state_init: Tensor,
    normal_table: Tensor,
    first_column: int = 0,
) -> None:
    """Fill rows with their initial weights, columns ``first_column`` and on, and state; ``slots`` None: rows 0, 1, ...
    hold ids first_id, ..."""
    count = slab.shape[0] if slots is None else slots.numel()
    weights = weight_view(slab, dim, weight_dtype)
    state = state_view(slab, state_offset, state_init.numel())
    block = max(1, 2**22 // dim)
    for start in range(0, count, block):
        stop = min(count, start + block)
        at = torch.arange(start, stop) if slots is None else slots[start:stop].to(torch.int64)
        mine = first_id + at if ids is None else ids[start:stop]
        weights[at] = init.values(init_code, p0, p1, key, mine, dim, normal_table, first_column).to(weights.dtype)
        state[at] = state_init
