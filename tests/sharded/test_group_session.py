"""The training loop on several ranks, on a dense model: every number that decides is that of the whole batch."""

import math
import warnings

import numpy as np
import pytest
import ranks
import torch
from torch import nn
from torch.distributed import HashStore

from embcache.errors import BadConfig, RemoteFault
from embcache.train.config import TrainConfig
from embcache.train.distributed import Session
from embcache.train.loop import NonFiniteLoss, Trainer
from embcache.train.metrics import BinaryMetrics
from embcache.train.optimizers import OptimizerConfig, dense_optimizer
from embcache.train.task import Evaluation

FEATURES = 5


class Data:
    """Batch t of epoch e by a generator seeded with both; a rank's share as a Loader cuts it."""

    def __init__(self, session, batches=6, size=9, bad=()):
        self.session, self.batches, self.size, self.bad = session, batches, size, bad
        self.epoch = self.batch = 0

    def __len__(self):
        return self.batches

    def set_position(self, epoch, batch):
        self.epoch, self.batch = epoch, batch

    def __iter__(self):
        for t in range(self.batch, self.batches):
            g = torch.Generator().manual_seed(1000 * self.epoch + t)
            x, y = torch.randn(self.size, FEATURES, generator=g), torch.rand(self.size, generator=g).round()
            if (self.epoch, t) in self.bad:
                x[-1, 0] = math.nan  # the last rank's
            low, high = (self.size * (self.session.rank + k) // self.session.world for k in (0, 1))
            yield x[low:high], y[low:high]


class DenseTask:
    monitor, higher_is_better = "auc", True

    def __init__(self, dropout=0.0):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.counters = {}

    def split(self, batch, parts):
        return list(zip(*(t.tensor_split(parts) for t in batch), strict=True))

    def count(self, batch):
        return len(batch[1])

    samples = count

    def loss(self, batch):
        self.counters["x"] = self.counters.get("x", 0) + len(batch[1])
        return nn.functional.binary_cross_entropy_with_logits(self.model(batch[0])[:, 0], batch[1], reduction="sum")

    def evaluate(self, batches, merged):
        meter = BinaryMetrics()
        for x, y in batches:
            meter.update(self.model(x)[:, 0], y)
        meter = merged(meter)
        return Evaluation(meter.compute())


class Watch:
    def __init__(self):
        self.points, self.messages = [], []

    def begin(self, progress, total_steps):
        pass

    def step(self, progress):
        pass

    def point(self, point):
        self.points.append({k: v for k, v in point.items() if k != "samples_per_second"})

    def message(self, text):
        self.messages.append(text)

    def end(self):
        pass


def run(session, size=9, bad=(), dropout=0.0, task=None, **settings):
    """Everything about a training that must be equal on all ranks."""
    watch, task = Watch(), task or DenseTask(dropout)
    opt = OptimizerConfig(dense_optimizer="sgd", sparse_optimizer="sgd", lr=0.1, clip_norm=0.5)
    config = TrainConfig(**{"epochs": 2, "log_every": 1, "eval_every": 4, **settings})
    trainer = Trainer(
        task, [dense_optimizer(task.model.parameters(), opt)], Data(session, size=size, bad=bad),
        Data(session, 3, size), config, opt, None, [watch], session,
    )  # fmt: skip
    p = trainer.fit()
    weights = [w.tolist() for w in task.model.parameters()]
    numbers = (p.step, p.epoch, p.batch, p.samples, p.skipped, p.best_value, p.best_step, p.stopped, p.loss)
    return {"weights": weights, "points": watch.points, "numbers": numbers, "lookups": trainer.lookups()}


def group(rank, **options):
    from embcache.train.group import GroupSession

    return GroupSession(rank.lanes(**options), SharedStore(), HashStore())


class SharedStore:
    """The default group's store, as torchrun's agent would hold it."""

    def __init__(self):
        self._store = torch.distributed.distributed_c10d._get_default_store()

    def __getattr__(self, name):
        return getattr(self._store, name)


CASES = {
    "plain": {},
    "fewer samples than ranks": {"size": 2},
    "micro-batches": {"micro_batches": 3},
    "more parts than samples": {"micro_batches": 4, "size": 3},
    "stops early": {"patience": 1, "epochs": 9, "min_delta": 0.5},
    "skips": {"bad": ((0, 2), (1, 1)), "on_nonfinite": "skip"},
}


def all_cases(rank):
    warnings.simplefilter("ignore")
    session = group(rank)
    results = {name: run(session, **settings) for name, settings in CASES.items()}
    results["dropout"] = run(session, dropout=0.5)
    again = run(session, dropout=0.5)
    assert again == results["dropout"]
    session.lanes.close()
    return results


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_train_as_one_process_does(world):
    first, *others = ranks.run(world, all_cases, delays=1 if world == 3 else None)
    for other in others:
        assert str(other) == str(first)
    for name, settings in CASES.items():
        alone, got = run(Session(), **settings), first[name]
        assert got["numbers"][:5] == alone["numbers"][:5], name
        assert got["numbers"][6:8] == alone["numbers"][6:8], name
        assert got["lookups"] == alone["lookups"]
        for a, b in zip(alone["weights"], got["weights"], strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6, err_msg=name)
        for a, b in zip(alone["points"], got["points"], strict=True):
            assert ([*a], a.pop("kind")) == ([*b], b.pop("kind"))
            assert a == pytest.approx(b, rel=1e-4, nan_ok=True), name


def nan_on_the_last(rank):
    session, task = group(rank), DenseTask()
    before = [w.tolist() for w in task.model.parameters()]
    with pytest.raises(NonFiniteLoss if rank.rank == rank.world - 1 else RemoteFault) as caught:
        run(session, bad=((0, 1),), task=task, epochs=1, steps=2)
    assert isinstance(caught.value, FloatingPointError)
    assert [w.tolist() for w in task.model.parameters()] != before  # one step went well
    return str(caught.value)


def test_a_nan_on_one_rank_is_raised_by_all_with_its_name():
    *others, last = ranks.run(3, nan_on_the_last)
    assert last.startswith("step 2 (epoch 0, batch 1): the loss is nan")
    assert others == [f"rank 2: NonFiniteLoss: {last}"] * 2


def other_weights(rank):
    session, task = group(rank), DenseTask()
    with torch.no_grad():
        task.model[0].bias[0] += rank.rank == 1
    with pytest.raises(BadConfig, match="dense parameters of rank 1 are not those of rank 0"):
        run(session, task=task)
    return True


def test_weights_that_differ_at_the_start_are_refused():
    assert all(ranks.run(3, other_weights))


def small_talk(rank):
    session = group(rank)
    order = []
    session.first(lambda: order.append(rank.rank))
    session.meet()
    return {
        "total": session.total(rank.rank, 0.5, 2**50 + rank.rank),
        "gathered": session.gathered({"rank": rank.rank}),
        "exchange": [report["rank"] for report in session.exchange()],
        "merged": meter_of(range(rank.rank, 1000, rank.world), session).compute(),
        "who": (session.is_main, session.rank, session.world),
    }


def meter_of(rows, session):
    g = np.random.default_rng(0)
    logits, labels = g.normal(size=1000).round(2).astype(np.float32), g.integers(0, 2, 1000)
    meter = BinaryMetrics()
    meter.update(logits[list(rows)], labels[list(rows)])
    return session.merged(meter)


def test_what_ranks_tell_each_other():
    results = ranks.run(3, small_talk)
    whole = meter_of(range(1000), Session()).compute()
    for rank, result in enumerate(results):
        assert result["total"] == [3, 1.5, 3 * 2**50 + 3]
        assert result["gathered"] == [{"rank": r} for r in range(3)]
        assert result["exchange"] == [0, 1, 2]
        assert result["who"] == (rank == 0, rank, 3)
        assert result["merged"]["auc"] == whole["auc"]
        assert result["merged"] == pytest.approx(whole, rel=1e-13)
