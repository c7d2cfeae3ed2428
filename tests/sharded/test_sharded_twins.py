"""Tiers below a rank's store change no bit; long runs drift no more than splitting a batch does."""

from __future__ import annotations

from typing import Any

import numpy as np
import ranks
import torch
from test_sharded_steps import plan_of
from twins import RULES, Data, Model, compare, loss_of, merged, rows_of, single, train

import embcache as ec


def tiers_case(rank: ranks.Rank, steps: int) -> list[Any]:
    lanes, out = rank.lanes(), []
    chains = {
        "ram": [ec.tiers.Ram()],
        "cache": [ec.tiers.Ram(rows=4, policy="lru"), ec.tiers.Ram()],
    }
    for name, chain in [*chains.items(), ("disk", None), ("ahead", chains["cache"])]:
        model = Model(RULES["adam"], [ec.tiers.Unplaced()], integers=False)
        for k, module in enumerate((model.pooled, model.rows)):
            own = chain or [ec.tiers.Ram(rows=4), ec.tiers.Lmdb(rank.folder / f"store{k}")]
            names = set(module.store.names)
            plan = plan_of("mixed", rank.world)
            placements = {n: p for n, p in plan.placements.items() if n in names}
            ec.shard(module, ec.ShardingPlan(rank.world, placements), tiers=own, lanes=lanes)
        data = Data(3, steps, 13, integers=False)
        losses = train(model, data, rank.rank, rank.world, 0, steps, depth="auto" if name == "ahead" else 0)
        out.append((losses, rows_of(model)))
        model.pooled.store.close()
        model.rows.store.close()
    lanes.close()
    return out


def test_tiers_and_look_ahead_change_no_bit() -> None:
    for result in ranks.run(2, tiers_case, steps=5, delays=1):
        for losses, rows in result[1:]:
            assert losses == result[0][0]
            compare(rows, result[0][1], None)


def frozen_case(rank: ranks.Rank, frozen: list[str]) -> Any:
    lanes = rank.lanes()
    model = Model(RULES["sgd"], [ec.tiers.Unplaced()], integers=True)
    ec.shard(model, plan_of("both", rank.world), lanes=lanes)
    out = forwards(model, Data(5, 3, 12, integers=True), rank.rank, rank.world, frozen)
    lanes.close()
    return out


def forwards(model: Model, data: Data, rank: int, world: int, frozen: list[str]) -> Any:
    """Two forwards before one backward and step, on frozen tables and thawed ones."""
    for name in frozen:
        (model.pooled if name in "abc" else model.rows).freeze(name)
    optimizer = ec.optim.SparseOptimizer(model)
    for step in range(3):
        at = data.share(step, rank, world)
        bags, lists = data.batch(step, at)
        other = data.batch((step + 1) % 3, data.share((step + 1) % 3, rank, world))
        (loss_of(model(bags, lists), True, 1) + loss_of(model(*other), True, 1)).backward()
        optimizer.step()
    return rows_of(model)


def test_frozen_tables_and_two_forwards() -> None:
    for frozen in ([], ["a"], ["c", "d"]):
        mine = merged(ranks.run(2, frozen_case, frozen=frozen), {"b"})
        model = single(Model(RULES["sgd"], [ec.tiers.Ram()], integers=True))
        compare(mine, forwards(model, Data(5, 3, 12, integers=True), 0, 1, frozen), None)
        assert all(not mine[name] for name in frozen)


STEPS, ROWS, DIM, SIZE = 100, 60, 8, 16


def drift_ids() -> torch.Tensor:
    return torch.from_numpy(np.minimum(np.random.default_rng(0).zipf(1.2, (STEPS, SIZE, 3)) - 1, ROWS - 1))


def drift_model() -> ec.EmbeddingBag:
    return ec.EmbeddingBag(ROWS, DIM, mode="sum", optimizer=ec.optim.Adagrad(lr=0.1), init=ec.init.Uniform(0.5), seed=1)


def drift_loss(out: torch.Tensor) -> torch.Tensor:
    return (out.sin() * torch.arange(1, DIM + 1)).sum() / SIZE


def drift_train(bag: ec.EmbeddingBag, part: slice) -> None:
    optimizer = ec.optim.SparseOptimizer(bag)
    for ids in drift_ids():
        drift_loss(bag(ids[part])).backward()
        optimizer.step()


def drift_case(rank: ranks.Rank) -> torch.Tensor:
    lanes = rank.lanes()
    bag = ec.shard(drift_model(), lanes=lanes)
    share = SIZE // rank.world
    drift_train(bag, slice(rank.rank * share, (rank.rank + 1) * share))
    weight = bag.store.whole_weight("embedding_bag")[1]
    lanes.close()
    return weight


def control(parts: int) -> torch.Tensor:
    """Plain torch, the batch in so many parts whose gradients are added."""
    weight = torch.nn.Parameter(drift_model().weight.clone())
    optimizer = torch.optim.Adagrad([weight], lr=0.1, eps=1e-8)
    for ids in drift_ids():
        optimizer.zero_grad()
        for part in ids.chunk(parts):
            drift_loss(torch.nn.functional.embedding_bag(part, weight, mode="sum")).backward()
        optimizer.step()
    return weight.detach()


def test_a_hundred_steps_drift_as_a_split_batch_does() -> None:
    bag = drift_model()
    bag.store.guard = None
    drift_train(bag, slice(0, SIZE))
    allowed = 10 * max(float((control(2) - control(1)).abs().max()), float((control(4) - control(1)).abs().max()))
    assert 0 < allowed < 1
    for world in (2, 4):
        first, *others = ranks.run(world, drift_case)
        assert all(torch.equal(first, other) for other in others)
        assert float((first - bag.weight).abs().max()) <= allowed
    assert torch.equal(first, ranks.run(4, drift_case, delays=9)[0])
