"""Bags that are pooled where their rows live: ids and lengths go out, sums of bags come back.

To the requester the sum that a rank gives for a bag is one more row: a bag becomes the list of its sums, in rank order,
and lookup, gradients and wires work on those as on any rows. Mean pooling divides here, by weights 1 / length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..kernels.buckets import bucket
from ..kernels.jit import kernel
from ..layout import BAGS, FIRST, OFFSET, POOL, STRIDE, SUM, TABLE, PartLayout
from ..staged import Handle

__all__ = ["Pooled", "local_layout", "reduced", "split_bags"]


@kernel
def _count(
    ids: np.ndarray,
    offsets: np.ndarray,
    features: np.ndarray,
    ranks: np.ndarray,
    owners: np.ndarray,
    bags: np.ndarray,
    items: np.ndarray,
) -> None:
    buckets, last, k = np.uint64(ranks.shape[0]), np.full(bags.shape[0], -1, np.int64), 0
    for f in range(features.shape[0]):
        fixed = features[f, 2]
        for b in range(features[f, 0], features[f, 0] + features[f, 1]):
            for i in range(offsets[b], offsets[b + 1]):
                rank = np.int64(ranks[bucket(ids[i], buckets)]) if fixed < 0 else fixed
                owners[k] = rank
                k += 1
                items[rank, f] += 1
                if last[rank] != b:
                    last[rank] = b
                    bags[rank, f] += 1
        last[:] = -1


@kernel
def _fill(
    ids: np.ndarray,
    offsets: np.ndarray,
    features: np.ndarray,
    owners: np.ndarray,
    bag_at: np.ndarray,
    item_at: np.ndarray,
    wire: np.ndarray,
    source: np.ndarray,
    which: np.ndarray,
    lengths: np.ndarray,
) -> None:
    last, k = np.full(bag_at.shape[0], -1, np.int64), 0
    for f in range(features.shape[0]):
        for b in range(features[f, 0], features[f, 0] + features[f, 1]):
            for i in range(offsets[b], offsets[b + 1]):
                rank = owners[k]
                k += 1
                wire[item_at[rank, f]] = ids[i]
                source[item_at[rank, f]] = i
                item_at[rank, f] += 1
                if last[rank] != b:
                    last[rank] = b
                    which[bag_at[rank, f]] = b
                    lengths[bag_at[rank, f]] = 0
                    bag_at[rank, f] += 1
                lengths[bag_at[rank, f] - 1] += 1
        last[:] = -1


@kernel
def _reduce(
    features: np.ndarray,
    offsets: np.ndarray,
    at: np.ndarray,
    ends: np.ndarray,
    which: np.ndarray,
    base: np.ndarray,
    out_offsets: np.ndarray,
    source: np.ndarray,
    rows: np.ndarray,
) -> int:
    """``features`` rows of (first, bags, number among the pooled ones or -1), ascending in bags."""
    n, b = 0, 0
    for k in range(features.shape[0]):
        f = features[k, 2]
        while b < features[k, 0]:
            out_offsets[b] = n
            b += 1
        while b < features[k, 0] + features[k, 1]:
            out_offsets[b] = n
            if f < 0:
                for i in range(offsets[b], offsets[b + 1]):
                    source[n], rows[n] = i, -1
                    n += 1
            else:
                for rank in range(at.shape[0]):
                    if at[rank, f] < ends[rank, f] and which[at[rank, f]] == b:
                        source[n], rows[n] = -1, base[rank, f]
                        base[rank, f] += 1
                        at[rank, f] += 1
                        n += 1
            b += 1
    while b < out_offsets.shape[0]:
        out_offsets[b] = n
        b += 1
    return n


@dataclass
class Pooled:
    """The pooled features of a part, F of them, as requester and as owner.

    Attributes:
        numbers: rows of the part's features that they are.
        tables, pieces: int64 [F].
        dims: of each.
        bags, items: int64 [W, F], bags with ids, and ids, for each rank.
        ids, lengths: of those bags, rank after rank, feature after feature.
        which: the bag, counted in the part, of each length.
        source: position of each id in the part.
        received_bags, received_items: int64 [W, F], what others ask of this rank.
        handle: of the local store, on that.
    """

    numbers: np.ndarray
    tables: np.ndarray
    pieces: np.ndarray
    dims: list[int]
    bags: np.ndarray
    items: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray
    which: np.ndarray
    source: np.ndarray
    received_bags: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    received_items: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    handle: Handle | None = None


def _starts(counts: np.ndarray) -> np.ndarray:
    flat = counts.ravel()
    return (np.cumsum(flat) - flat).reshape(counts.shape)


def split_bags(
    features: np.ndarray,
    numbers: np.ndarray,
    pieces: np.ndarray,
    fixed: np.ndarray,
    dims: Sequence[int],
    ranks: np.ndarray,
    ids: np.ndarray,
    offsets: np.ndarray,
    world: int,
) -> Pooled:
    """The bags of the features ``numbers`` by the rank that holds each id: ``fixed`` [F], or by bucket where that is
    -1."""
    spec = np.column_stack([features[numbers][:, [FIRST, BAGS]], fixed]).astype(np.int64)
    sizes = offsets[spec[:, 0] + spec[:, 1]] - offsets[spec[:, 0]]
    n = int(sizes.sum())
    owners = np.empty(n, dtype=np.int64)
    bags, items = np.zeros((world, len(numbers)), dtype=np.int64), np.zeros((world, len(numbers)), dtype=np.int64)
    _count(ids, offsets, spec, ranks, owners, bags, items)
    wire, source = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    which, lengths = np.empty(int(bags.sum()), dtype=np.int64), np.empty(int(bags.sum()), dtype=np.int32)
    _fill(ids, offsets, spec, owners, _starts(bags), _starts(items), wire, source, which, lengths)
    return Pooled(numbers, features[numbers][:, TABLE], pieces, list(dims), bags, items, wire, lengths, which, source)


def local_layout(pieces: np.ndarray, dims: Sequence[int], bags: np.ndarray) -> PartLayout:
    """How an owner pools what ``bags`` [W, F] of features ask of its ``pieces``: rank after rank, feature after
    feature, a block of sums each."""
    world = bags.shape[0]
    every = np.tile(np.asarray(dims, dtype=np.int64), world)
    sizes = bags.ravel() * every
    rows = np.zeros((bags.size, 7), dtype=np.int64)
    rows[:, TABLE], rows[:, POOL] = np.tile(pieces, world), SUM
    rows[:, FIRST], rows[:, BAGS] = _starts(bags).ravel(), bags.ravel()
    rows[:, OFFSET], rows[:, STRIDE] = np.cumsum(sizes) - sizes, every
    number = tuple(range(bags.size))
    return PartLayout(
        names=tuple(map(str, number)),
        tables=tuple(rows[:, TABLE].tolist()),
        dims=tuple(every.tolist()),
        order=number,
        columns=number,
        features=torch.from_numpy(rows),
        pooled=True,
        shape=(int(sizes.sum()),),
    )


@dataclass
class Reduced:
    """A part whose pooled bags are lists of sums.

    Attributes:
        features, offsets, weights: as of a part.
        source: for each place, the position it had in the part, -1 of sums.
        rows: for each place, which of its feature's sums, -1 elsewhere.
    """

    features: Tensor
    offsets: Tensor
    weights: Tensor | None
    source: np.ndarray
    rows: np.ndarray

    def slots(self, slots: Tensor) -> Tensor:
        """By place, from the slots of the part's ids."""
        mine = slots.numpy()
        if not len(mine):
            return torch.from_numpy(self.rows)
        return torch.from_numpy(np.where(self.source < 0, self.rows, mine[self.source]).astype(np.int32))


def reduced(pooled: Pooled, features: Tensor, offsets: Tensor, weights: Tensor | None, first: int) -> Reduced:
    """A part with its pooled features reading sums: feature k those of table ``first + k``."""
    at = features.numpy()
    means = [f for f, number in enumerate(pooled.numbers.tolist()) if at[number, POOL] != SUM]
    bounds = offsets.numpy().astype(np.int64)
    spec = np.full((len(at), 3), -1, dtype=np.int64)
    spec[:, :2] = at[:, [FIRST, BAGS]]
    spec[pooled.numbers, 2] = np.arange(len(pooled.numbers))
    room = len(pooled.which) + int(bounds[-1])
    out_offsets = np.empty(len(bounds), dtype=np.int64)
    source, rows = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64)
    starts = _starts(pooled.bags)
    base = np.cumsum(pooled.bags, axis=0) - pooled.bags
    n = _reduce(spec, bounds, starts.copy(), starts + pooled.bags, pooled.which, base, out_offsets, source, rows)
    source, rows = source[:n], rows[:n]
    made = features.clone()
    chosen = torch.from_numpy(pooled.numbers)
    made[chosen, TABLE] = first + torch.arange(len(pooled.numbers))
    made[chosen, POOL] = SUM
    scale: Tensor | None = None
    if weights is not None or means:
        scale = torch.ones(n)
        if weights is not None:
            mine = np.flatnonzero(source >= 0)
            scale[torch.from_numpy(mine)] = weights.detach().to(torch.float32)[torch.from_numpy(source[mine])]
        for f in means:
            first_bag, bags = at[pooled.numbers[f], FIRST], at[pooled.numbers[f], BAGS]
            lengths = np.maximum(np.diff(bounds[first_bag : first_bag + bags + 1]), 1)
            sums = np.diff(out_offsets[first_bag : first_bag + bags + 1])
            each = torch.from_numpy(np.repeat(np.float32(1) / lengths.astype(np.float32), sums))
            scale[int(out_offsets[first_bag]) : int(out_offsets[first_bag + bags])] = each
    return Reduced(made, torch.from_numpy(out_offsets), scale, source, rows)
