"""A step's exchange as stages of its own: the bits of lookups that exchange themselves, and a timeline of it."""

from __future__ import annotations

import numpy as np
import ranks
import torch
from torch.distributed import HashStore

import embcache as ec
from dlrm.data.batch import ClickBatch
from dlrm.models import build
from dlrm.task import ClickTask
from embcache.schedule.base import Step, Timeline, schedule_named
from embcache.train.config import TrainConfig
from embcache.train.group import GroupSession
from embcache.train.step import Work, Workshop

FEATURES = ["a", "b", "c"]


def batch(rank, step, size=6):
    draw = np.random.default_rng([rank, step])
    ids = torch.from_numpy(draw.integers(0, 40, len(FEATURES) * size))
    sparse = ec.KeyedJaggedTensor.from_lengths_sync(FEATURES, ids, torch.ones(len(ids), dtype=torch.int32))
    dense = torch.from_numpy(draw.standard_normal((size, 4), dtype=np.float32))
    return ClickBatch(dense, sparse, torch.from_numpy(draw.integers(0, 2, size).astype(np.float32)))


def train(lanes, session, explicit):
    """Three steps; (rows and dense weights, stages of a step, spans of the last)."""
    torch.manual_seed(1)
    names = ["t", "u"]
    tables = [
        ec.TableConfig(name, 40, 8, features=of, optimizer=ec.optim.RowWiseAdagrad(lr=0.1))
        for name, of in zip(names, [["a", "b"], ["c"]], strict=True)
    ]
    tiers = [ec.tiers.Unplaced()]
    model = build("dlrm", tables, 4, bottom_mlp=(8,), top_mlp=(8, 1), tiers=tiers)
    ec.shard(model, ec.ShardingPlan(lanes.world, dict.fromkeys(names, ec.Placement("row_wise"))), lanes=lanes)
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers = [dense, ec.optim.SparseOptimizer(model)]
    config = TrainConfig(micro_batches=2, tensorboard=False)
    shop = Workshop(ClickTask(model), optimizers, [model.store], session, config, 1.0)
    assert shop.remote is model.store
    if not explicit:
        shop.remote = None
    timeline, keys = Timeline(), []
    for step in range(3):
        if step == 2:
            timeline.record(lanes.ledger)
        work = Work(shop, batch(lanes.rank, step), "here")
        stages = work.stages()
        schedule_named("sync").run(Step(step, stages), timeline)
        work.release()
        for optimizer in optimizers:
            optimizer.zero_grad()
        keys = [(stage.name, stage.micro) for stage in stages]
    pins = model.store.local.front.pins()
    rows = [model.store.read_rows(name, torch.arange(40)) for name in names]
    rows = [row[0] if isinstance(row, tuple) else row for row in rows]
    return [*rows, *(p.detach().clone() for p in model.parameters())], keys, timeline.stop(), pins


def both(rank):
    lanes = rank.lanes()
    store = HashStore()
    session = GroupSession(lanes, store, store)
    values, keys, spans, pins = train(lanes, session, True)
    plain, fewer, _, _ = train(lanes, session, False)
    equal = all(torch.equal(a, b) for a, b in zip(values, plain, strict=True))
    return {"equal": equal, "keys": keys, "fewer": fewer, "spans": [tuple(s) for s in spans], "pins": pins}


def test_stages_of_an_exchange_change_no_bit_and_are_seen():
    for got in ranks.run(2, both, delays=4):
        assert got["equal"]
        assert got["pins"] == 0
        part = [[(name, i) for name in ("ids", "rows", "forward", "backward")] for i in (0, 1)]
        ends = [("agreement", None), ("dense optimizer", None), ("embedding update", None)]
        assert got["keys"] == [("batch size", None), *part[0], *part[1], *ends]
        assert got["fewer"] == [key for key in got["keys"] if key[0] not in ("ids", "rows")]
        # an exchange lies within its stage; of the last step, whose number is 2
        spans = got["spans"]
        stages = {(name, micro): (begun, done) for _, begun, done, name, step, micro, _ in spans if step == 2}
        assert set(stages) == set(got["keys"])
        for lane, key in [("ids", ("ids", 1)), ("rows", ("rows", 1)), ("grads", ("embedding update", None))]:
            begun, done = stages[key]
            inside = [s for s in spans if s[4] is None and s[0] == lane and begun <= s[1] and s[2] <= done]
            assert sum(sent for *_, sent in inside) > 0
