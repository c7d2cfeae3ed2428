"""One table under any placement and with any of its options, trained by W ranks and by one process on the same data."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import ranks
import torch
from torch import Tensor, nn

import embcache as ec
from embcache import records
from embcache.sharded.columns import split_tables


class Case:
    """A table, where it lives, and how its batches are made; everything is a function of the arguments."""

    def __init__(
        self,
        table: ec.TableConfig,
        placement: ec.Placement,
        *,
        integers: bool = False,
        weighted: bool = False,
        steps: int = 4,
        micro: int = 1,
        size: int = 12,
        pool: tuple[int, ...] = tuple(range(9)),
        lr_steps: bool = False,
        longest: int = 4,
        cache: int | None = None,
    ) -> None:
        self.table, self.placement, self.integers, self.weighted = table, placement, integers, weighted
        self.steps, self.micro, self.size, self.pool, self.longest, self.cache = (
            steps,
            micro,
            size,
            pool,
            longest,
            cache,
        )

    def plan(self, world: int) -> ec.ShardingPlan:
        return ec.ShardingPlan(world, {self.table.name: self.placement})

    def model(self, tiers: list[Any]) -> nn.Module:
        if self.table.pooling == "none":
            return ec.EmbeddingCollection([self.table], tiers=tiers)
        return ec.EmbeddingBagCollection([self.table], self.weighted, tiers=tiers)

    def tiers(self) -> list[Any]:
        return [ec.tiers.Ram()] if self.cache is None else [ec.tiers.Ram(rows=self.cache), ec.tiers.Ram()]

    def samples(self, step: int) -> list[list[list[int]]]:
        """Of each sample and feature the ids; lengths are powers of two where means must be exact."""
        rng = np.random.default_rng([step, 5])
        sizes = [n for n in (0, 1, 2, 4, 3, 5) if n <= self.longest and (not self.integers or n != 3)]
        return [
            [[int(i) for i in rng.choice(self.pool, rng.choice(sizes))] for _ in self.table.feature_names]
            for _ in range(self.size)
        ]

    def batch(self, step: int, at: slice) -> ec.KeyedJaggedTensor:
        samples = self.samples(step)[at]
        features = self.table.feature_names
        lengths = [len(s[f]) for f in range(len(features)) for s in samples]
        ids = torch.tensor([i for f in range(len(features)) for s in samples for i in s[f]], dtype=torch.int64)
        weights = (ids % 3 + 1).float() if self.weighted else None
        lengths_ = torch.tensor(lengths, dtype=torch.int64)
        return ec.KeyedJaggedTensor(list(features), ids, weights, lengths=lengths_, stride=len(samples))

    def slices(self, step: int, rank: int, world: int) -> list[slice]:
        """Per micro-batch the samples of a rank: a part of the same stretch of samples for every number of ranks."""
        rng = np.random.default_rng([step, 77])
        edges = np.linspace(0, self.size, self.micro + 1).astype(int)
        out = []
        for lo, hi in pairwise(edges):
            inner = np.sort(rng.integers(lo, hi + 1, 7))[: world - 1]
            ends = [lo, *np.sort(inner).tolist(), hi]
            out.append(slice(int(ends[rank]), int(ends[rank + 1])))
        return out

    def coefficients(self, rows: int, first: int) -> Tensor:
        """Gradients of the output's rows, by their number among all ranks' (of pooled ones) or by column."""
        dim = self.table.embedding_dim * len(self.table.feature_names) if self.table.pooling != "none" else 0
        dim = dim or self.table.embedding_dim
        at = torch.arange(rows)[:, None] + first
        if self.integers:
            return ((at * 7 + torch.arange(dim)) % 5 - 2).float()
        return torch.sin(at * 1.7 + torch.arange(dim))


def train(case: Case, model: nn.Module, rank: int, world: int) -> list[Tensor]:
    """Outputs of every lookup of this rank."""
    optimizer = ec.optim.SparseOptimizer(model)
    outputs = []
    for step in range(case.steps):
        for at in case.slices(step, rank, world):
            batch = case.batch(step, at)
            if case.table.pooling == "none":
                blocks = [jagged.values() for jagged in model(batch).values()]
                out = torch.cat(blocks)
                # rows are ids here: the gradient is a function of the id, the same for any split
                ids = batch.values()
                grad = case.coefficients(1, 3) * (ids[:, None] % 4 + 1)
            else:
                out = model(batch).values()
                grad = case.coefficients(out.shape[0], at.start)
            (out * grad).sum().backward()
            outputs.append(out.detach())
        optimizer.step()
    return outputs


def stored(store: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """(ids, whole rows) of the written rows of this process's tables."""
    local, out = getattr(store, "local", store), {}
    for p, table in enumerate(local.tables):
        blocks = list(local.raw_rows(p, 1000))
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *(ids for ids, _ in blocks)])
        rows = torch.cat([torch.empty(0, table.row_bytes, dtype=torch.uint8), *(rows for _, rows in blocks)])
        out[table.name] = ids, rows
    return out


def on_ranks(rank: ranks.Rank, cases: list[Case]) -> list[Any]:
    """Several trainings in one run: outputs, rows, tables, ledger."""
    lanes = rank.lanes()
    results = []
    for case in cases:
        model = case.model([ec.tiers.Unplaced()])
        before = lanes.ledger.mark() if hasattr(lanes.ledger, "mark") else None
        ec.shard(model, case.plan(rank.world), tiers=case.tiers(), lanes=lanes)
        outputs = train(case, model, rank.rank, rank.world)
        assert model.store.front.pins() == 0
        report = lanes.ledger.since(before) if before is not None else None
        results.append((outputs, stored(model.store), model.store.local.tables, report, list(model.store.steps)))
        model.store.close()
    lanes.close()
    return results


def whole_rows(case: Case, results: list[Any]) -> dict[int, Tensor]:
    """Rows by id, put together from all ranks and pieces."""
    world = len(results)
    pieces = case.plan(world).pieces([case.table])
    names = [table.name for table in results[0][2]]
    by_piece: list[dict[int, Tensor]] = []
    for p, piece in enumerate(pieces):
        mine: dict[int, Tensor] = {}
        for r, result in enumerate(results):
            ids, rows = result[1][names[p]]
            for i, row in zip(ids.tolist(), rows, strict=True):
                assert i not in mine or (case.placement.kind == "data_parallel" and torch.equal(mine[i], row)), i
                assert piece.rank in (-1, r)
                mine[i] = row
        by_piece.append(mine)
    if not split_tables(pieces):
        return by_piece[0]
    assert all(mine.keys() == by_piece[0].keys() for mine in by_piece)
    local = results[0][2]
    return {
        i: records.glue(case.table, [(local[p], by_piece[p][i][None]) for p in range(len(pieces))])[0]
        for i in by_piece[0]
    }


def check(world: int, cases: list[Case], tolerance: float | None = 1e-6, **options: Any) -> list[Any]:
    """Rows, states, meta and outputs of W ranks against one process; the results of the ranks."""
    results = ranks.run(world, on_ranks, cases=cases, **options)
    for k, case in enumerate(cases):
        mine = [result[k] for result in results]
        model = case.model(case.tiers())
        outputs = train(case, model, 0, 1)
        ids, wanted = stored(model.store)[case.table.name]
        rows = whole_rows(case, mine)
        assert sorted(rows) == sorted(ids.tolist()), (case.placement, set(rows) ^ set(ids.tolist()))
        assert ids.numel()
        assert all(m[4] == list(model.store.steps) for m in mine)
        both = torch.stack([rows[i] for i in ids.tolist()])
        for view in (records.weights, records.states):
            _close(view(case.table, both), view(case.table, wanted), tolerance)
        if case.table.meta_bytes:
            assert torch.equal(records.metas(case.table, both), records.metas(case.table, wanted))
        if case.table.pooling != "none":
            for m, out in enumerate(outputs):
                _close(torch.cat([result[0][m] for result in mine]), out, tolerance and 10 * tolerance)
    return results


def _close(mine: Tensor, wanted: Tensor, tolerance: float | None) -> None:
    if tolerance is None:
        assert torch.equal(mine, wanted)
    elif mine.numel():
        scale = wanted.abs().clamp(min=1.0)
        worst = float(((mine.float() - wanted.float()).abs() / scale).max())
        assert worst <= tolerance, worst
