"""A tiny task over one embedding table, so that the loop is tested without any model family."""

from __future__ import annotations

import torch
from torch import nn

import embcache as ec
from embcache.checkpoint import Checkpoints
from embcache.statefile import pack, unpack
from embcache.train.config import TrainConfig
from embcache.train.loop import Trainer
from embcache.train.optimizers import OptimizerConfig, dense_optimizer, sparse_rule
from embcache.train.state import seed_all
from embcache.train.storage import StorageConfig
from embcache.train.task import Evaluation


class Toy(nn.Module):
    def __init__(self, rule, rows=50, dim=4, dropout=0.0, init=None, tiers=None):
        super().__init__()
        init = ec.init.Uniform(0.1) if init is None else init
        table = ec.TableConfig("t", rows, dim, optimizer=rule, init=init)
        self.bags = ec.EmbeddingBagCollection([table], backend="reference", tiers=tiers)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(dim, 1)

    def jagged(self, ids):
        if not hasattr(ids, "jagged"):
            lengths = torch.full((len(ids),), ids.shape[1])
            ids.jagged = ec.KeyedJaggedTensor(["t"], ids.reshape(-1), lengths=lengths)
        return ids.jagged

    def forward(self, ids):
        return self.out(self.dropout(self.bags(self.jagged(ids))["t"])).squeeze(1)


class ToyTask:
    """Squared error against a target; a batch is (ids [B, 2], target [B])."""

    def __init__(self, model, values=None):
        self.model, self.monitor, self.higher_is_better = model, "mse", False
        self.counters = {}
        self.values = values  # scripted results of evaluations
        self.evaluations = 0
        self.parts = {}

    def split(self, batch, parts):
        key = id(batch)
        if key not in self.parts:  # the batch is kept, so that its id stays its own
            self.parts[key] = batch, list(zip(*(t.tensor_split(parts) for t in batch), strict=True))
        return self.parts[key][1]

    def jagged(self, batch):
        return [self.model.jagged(batch[0])]

    def count(self, batch):
        return len(batch[1])

    samples = count

    def loss(self, batch):
        self.counters["t"] = self.counters.get("t", 0) + batch[0].numel()
        return ((self.model(batch[0]) - batch[1]) ** 2).sum()

    def evaluate(self, batches, merged=None):
        self.evaluations += 1
        if self.values is not None:
            return Evaluation({"mse": self.values[self.evaluations - 1]})
        losses = [((self.model(ids) - target) ** 2).mean() for ids, target in batches]
        return Evaluation({"mse": float(torch.stack(losses).mean())})


class ToyData:
    """Batch t of epoch e from a generator seeded with both."""

    def __init__(self, batches=8, size=6, rows=50, integers=False):
        self.batches, self.size, self.rows, self.integers = batches, size, rows, integers
        self.epoch = self.batch = 0
        self.given = []

    def __len__(self):
        return self.batches

    def set_position(self, epoch, batch):
        self.epoch, self.batch = epoch, batch

    def __iter__(self):
        for t in range(self.batch, self.batches):
            g = torch.Generator().manual_seed(1000 * self.epoch + t)
            ids = torch.randint(0, self.rows, (self.size, 2), generator=g)
            target = (ids % 5).sum(1).float() - 4
            self.given.append((self.epoch, t))
            yield ids, target if self.integers else target + 0.25 * torch.rand(self.size, generator=g)


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self):
        self.points, self.messages, self.steps, self.ended = [], [], 0, False

    def begin(self, progress, total_steps):
        self.total = total_steps

    def step(self, progress):
        self.steps += 1

    def point(self, point):
        self.points.append(dict(point))

    def message(self, text):
        self.messages.append(text)

    def end(self):
        self.ended = True


def trainer(
    folder=None,
    *,
    data=None,
    valid=None,
    values=None,
    dropout=0.0,
    init=None,
    opt=None,
    observers=(),
    storage=None,
    rows=50,
    **settings,
):
    """With a ``storage`` the rows live in its tiers, and on disk in ``folder``."""
    seed_all(settings.get("seed", 0))
    opt = opt or OptimizerConfig(lr=0.05)
    storage = storage or StorageConfig()
    model = Toy(sparse_rule(opt), rows=rows, dropout=dropout, init=init, tiers=storage.chain(folder))
    task, store = ToyTask(model, values), model.bags.store
    config = TrainConfig(**{"epochs": 3, "log_every": 4, **settings})
    sparse = ec.optim.SparseOptimizer(model, on_nonfinite=config.on_nonfinite)
    if store.durable is not None:
        saved = store.checkpoints
    else:
        saved = None if folder is None else Checkpoints(folder, keep=config.keep)
    return Trainer(
        task,
        [dense_optimizer(model.parameters(), opt), sparse],
        storage.staged(data or ToyData(), store, task, config.micro_batches),
        valid,
        config,
        opt,
        saved,
        observers,
    )


def bits(t):
    """Everything that must be equal after an exact resume; times and curves are not part of it."""
    state = t._state()
    progress = {k: v for k, v in state.pop("progress").items() if k not in ("seconds", "stages", "window")}
    everything = {**state, "progress": progress, "stores": [all_rows(s) for s in t.stores]}
    return unpack(*pack(everything))  # a copy


def all_rows(store):
    """Every row of a store's tables, and their steps, wherever they live."""
    blocks = {name: list(zip(*store.scan(name), strict=True)) for name in store.names}
    return {
        name: {"weight": torch.cat(weights).clone(), "state": torch.cat(state).clone(), "steps": steps}
        for (name, (_, weights, state)), steps in zip(blocks.items(), store.steps, strict=True)
    }
