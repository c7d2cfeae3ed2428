"""The same training by one process and by W ranks: what both are built from and how they are compared."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import embcache as ec

RULES = {
    "sgd": ec.optim.SGD(lr=0.5),
    "sgd_decay": ec.optim.SGD(lr=0.5, weight_decay=0.25),
    "adagrad": ec.optim.Adagrad(lr=0.1),
    "rowwise_adagrad": ec.optim.RowWiseAdagrad(lr=0.1),
    "adam": ec.optim.Adam(lr=0.01),
    "rowwise_adam": ec.optim.RowWiseAdam(lr=0.01),
    "lamb": ec.optim.LAMB(lr=0.01),
    "lars": ec.optim.LARS(lr=0.1),
    "ftrl": ec.optim.FTRL(lr=0.1),
}


class Model(nn.Module):
    """Pooled and unpooled tables, and a drop-in bag, under one loss: everything is linear in the rows, so that
    integer data stays exact."""

    def __init__(self, rule: Any, tiers: Any, *, integers: bool, weighted: bool = False) -> None:
        super().__init__()
        init = ec.init.Constant(3.0) if integers else ec.init.Uniform(0.5)
        tables = [
            ec.TableConfig("a", 50, 8, ["a1", "a2"], "sum", rule, init=init, seed=1),
            ec.TableConfig("b", 3, 4, ["b"], "mean", rule, init=init, seed=2),
            ec.TableConfig("c", None, 8, ["c"], "sum", rule, init=init, seed=3),
        ]
        self.pooled = ec.EmbeddingBagCollection(tables, weighted, tiers=[t.fresh() for t in tiers])
        rows = [
            ec.TableConfig("d", 40, 8, ["d"], "none", rule, init=init, seed=4),
            ec.TableConfig("e", 2, 8, ["e"], "none", rule, init=init, seed=5),
        ]
        self.rows = ec.EmbeddingCollection(rows, tiers=[t.fresh() for t in tiers])

    def forward(self, bags: ec.KeyedJaggedTensor, lists: ec.KeyedJaggedTensor) -> list[Tensor]:
        out = self.rows(lists)
        return [self.pooled(bags).values(), out["d"].values(), out["e"].values()]


IDS = {"a1": 50, "a2": 50, "b": 3, "c": None, "d": 40, "e": 2}
FEATURES = {True: ("a1", "a2", "b", "c"), False: ("d", "e")}


def bags_of(rng: np.random.Generator, size: int, features: tuple[str, ...]) -> list[list[list[int]]]:
    """By sample and feature, a bag of ids; lengths are powers of two or 0, so that means of integers are exact."""
    out = []
    for _ in range(size):
        sample = []
        for name in features:
            limit = IDS[name]
            n = int(rng.choice([0, 1, 2, 4]))
            if limit is None:
                pool = np.array([-(2**63), 2**63 - 1, -1, 0, 7, 2**40, *range(100, 120)], dtype=np.int64)
                sample.append([int(x) for x in rng.choice(pool, n)])
            else:
                sample.append([int(x) for x in np.minimum(rng.zipf(1.3, n) - 1, limit - 1)])
        out.append(sample)
    return out


def jagged(samples: list[list[list[int]]], features: tuple[str, ...], weights: bool = False) -> ec.KeyedJaggedTensor:
    """Samples as a batch; weights are a function of the ids."""
    lengths = [len(s[f]) for f in range(len(features)) for s in samples]
    values = torch.tensor([i for f in range(len(features)) for s in samples for i in s[f]], dtype=torch.int64)
    w = ((values % 3) + 1).to(torch.float32) if weights else None
    return ec.KeyedJaggedTensor(
        list(features), values, w, lengths=torch.tensor(lengths, dtype=torch.int64), stride=len(samples)
    )


class Data:
    """Global batches and their split over ranks, sizes uneven; some ranks get nothing."""

    def __init__(self, seed: int, steps: int, size: int, integers: bool, weighted: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.integers, self.weighted = integers, weighted
        self.bags = [bags_of(rng, size, FEATURES[True]) for _ in range(steps)]
        self.lists = [bags_of(rng, size, FEATURES[False]) for _ in range(steps)]
        self.cuts = rng.random((steps, 8))
        self.size = size

    def share(self, step: int, rank: int, world: int) -> slice:
        """Samples of a rank: uneven, in some steps none."""
        if world == 1:
            return slice(0, self.size)
        inner = np.sort((self.cuts[step, : world - 1] * (self.size + 1)).astype(int))
        ends = [0, *inner.tolist(), self.size]
        return slice(ends[rank], ends[rank + 1])

    def batch(self, step: int, at: slice) -> tuple[ec.KeyedJaggedTensor, ec.KeyedJaggedTensor]:
        return (
            jagged(self.bags[step][at], FEATURES[True], self.weighted),
            jagged(self.lists[step][at], FEATURES[False]),
        )


def loss_of(outputs: list[Tensor], integers: bool, count: int) -> Tensor:
    """Local sum over the global count; linear with integer coefficients, or smooth."""
    total = torch.zeros(())
    for out in outputs:
        if integers:
            coefficients = (torch.arange(out.shape[1]) % 5 - 2).to(torch.float32)
            total = total + (out * coefficients).sum()
        else:
            total = total + (out.sin() * (torch.arange(out.shape[1]) + 1)).sum() / count
    return total


def train(
    model: Model, data: Data, rank: int, world: int, first: int, last: int, micro: int = 1, depth: Any = 0
) -> list[float]:
    """Steps of the data; losses. ``depth``: batches of the pooled tables are staged ahead, one more than is used."""
    optimizer = ec.optim.SparseOptimizer(model)
    losses = []
    batches = []
    for step in range(first, last + 1):
        at = data.share(step % len(data.bags), rank, world)
        edges = np.linspace(at.start, at.stop, micro + 1).astype(int)
        batches.append([data.batch(step % len(data.bags), slice(lo, hi)) for lo, hi in pairwise(edges)])
    flat = iter([batch for step in batches for batch in step])
    ahead = model.pooled.store.lookahead(flat, depth, ids=lambda batch: batch[0]) if depth else flat
    for _ in range(first, last):
        for _ in range(micro):
            loss = loss_of(model(*next(ahead)), data.integers, data.size)
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
    if depth:
        ahead.close()
    return losses


def rows_of(model: Model) -> dict[str, dict[int, tuple[bytes, bytes]]]:
    """Written rows of this process's stores, by local table and id."""
    out: dict[str, dict[int, tuple[bytes, bytes]]] = {}
    for store in (model.pooled.store, model.rows.store):
        local = getattr(store, "local", store)
        for name in local.names:
            mine = out.setdefault(name, {})
            for ids, weight, state in local.written_rows(name):
                for k, i in enumerate(ids.tolist()):
                    mine[i] = (weight[k].numpy().tobytes(), state[k].numpy().tobytes())
    return out


def single(model: Model) -> Model:
    """A model that is its own reference, in a process of a group."""
    for store in (model.pooled.store, model.rows.store):
        store.guard = None
    return model


def merged(results: list[dict[str, dict[int, tuple[bytes, bytes]]]], replicated: set[str] = frozenset()) -> Any:  # type: ignore[assignment]
    """Rows of all ranks in one; of a replicated table all ranks must have the same, of others one rank only."""
    out: dict[str, dict[int, tuple[bytes, bytes]]] = {}
    for rows in results:
        for name, mine in rows.items():
            into = out.setdefault(name, {})
            for i, row in mine.items():
                assert i not in into or (name in replicated and into[i] == row), (name, i)
                into[i] = row
    return out


def compare(mine: Any, wanted: Any, tolerance: float | None) -> float:
    """Largest difference, relative above 1; with no tolerance weights and states are the same bits."""
    worst = 0.0
    assert {n: sorted(r) for n, r in mine.items()} == {n: sorted(r) for n, r in wanted.items()}
    for name, rows in wanted.items():
        for i, row in rows.items():
            if tolerance is None:
                assert mine[name][i] == row, (name, i)
            for a, b in zip(mine[name][i], row, strict=True):
                x, y = np.frombuffer(a, np.float32), np.frombuffer(b, np.float32)
                worst = max(worst, float((np.abs(x - y) / np.maximum(1.0, np.abs(y))).max(initial=0.0)))
    if tolerance is not None:
        assert worst <= tolerance, worst
    return worst
