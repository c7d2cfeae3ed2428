"""The ranks of bench_exchange: ours and TorchRec's sharded DLRM, and the bytes that each should send, by formula.

A rank is a worker process; all ranks of a group are called at the same time. The formulas are written down here
independently of the library, from ids alone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from _bench import zipf_ids

LANES = ("ids", "rows", "grads", "dense")
Batches = list[tuple[np.ndarray, np.ndarray, np.ndarray]]


def raw_batches(work: Mapping[str, Any], rank: int) -> Batches:
    """(dense [B, n], ids int64 [tables, B * bag], labels [B]) of a rank, the same for everybody."""
    rng = np.random.default_rng([work["seed"], rank])
    size = work["batch"]
    return [
        (
            rng.standard_normal((size, work["n_dense"]), dtype=np.float32),
            np.stack([zipf_ids(rng, size * work["bag"], work["rows"], work["alpha"]) for _ in range(work["tables"])]),
            (rng.random(size) < 0.25).astype(np.float32),
        )
        for _ in range(work["batches"])
    ]


# ---------------------------------------------------------------------------------------------------------- formulas


def row_bytes(wire: str, dim: int) -> int:
    """Of one row of weights or gradients; int8 has a scale and a minimum a row.

    >>> [row_bytes(wire, 64) for wire in ("fp32", "fp16", "bf16", "int8")]
    [256, 128, 128, 72]
    """
    return {"fp32": 4 * dim, "fp16": 2 * dim, "bf16": 2 * dim, "int8": dim + 8}[wire]


def our_bytes(
    ids: np.ndarray, owners: Callable[[int, np.ndarray], np.ndarray], rank: int, work: Mapping[str, Any], traffic: str,
    wire: str,
) -> dict[str, int]:  # fmt: skip
    """What a rank sends on lane ids, receives on rows and sends on grads for a batch of ids [tables, B * bag].

    Rows: distinct ids of others x (id, row, row). Pooled: every id of others, and for each bag and rank that has ids of
    it a length of 4 bytes, a sum and its gradient.
    """
    width, row = 4 if work["rows"] <= 2**32 else 8, row_bytes(wire, work["dim"])
    distinct = every = sums = 0
    for t, values in enumerate(ids):
        of = owners(t, values)
        away = of != rank
        distinct += len(np.unique(values[away]))
        every += int(away.sum())
        bags = np.arange(len(values)) // work["bag"]
        sums += len(np.unique(bags[away] * 2**20 + of[away]))
    if traffic == "rows":
        return {"ids": width * distinct, "rows": row * distinct, "grads": row * distinct}
    return {"ids": width * every + 4 * sums, "rows": row * sums, "grads": row * sums}


def dense_bytes(parameters: int, world: int) -> int:
    """What all ranks together send to sum fp32 gradients: each slice to its rank, each sum to all."""
    return 2 * (world - 1) * 4 * parameters


def torchrec_bytes(kind: str, ids: np.ndarray, rank: int, world: int, work: Mapping[str, Any]) -> dict[str, int]:
    """The same of TorchRec 1.8, sent: all ids as int64 with int32 lengths, nothing deduplicated, fp32 sums.

    table_wise (table t on rank t mod world): ids and lengths of a table go to its rank, which sends the B sums of each
    of its tables to every other rank; gradients of sums go the way back. row_wise (contiguous blocks of rows): ids go
    to their block's rank, lengths of all features to all ranks; every rank gives every other B partial sums of every
    table (reduce-scatter) and gets their gradients (all-gather).
    """
    others, size, sum_bytes = world - 1, work["batch"], 4 * work["dim"]
    if kind == "table_wise":
        mine = len(range(rank, len(ids), world))
        return {
            "ids": (len(ids) - mine) * size * (8 * work["bag"] + 4),
            "rows": others * size * mine * sum_bytes,
            "grads": (len(ids) - mine) * size * sum_bytes,
        }
    block = -(-work["rows"] // world)
    away = int((ids // block != rank).sum())
    travel = others * size * len(ids) * sum_bytes
    return {"ids": 8 * away + others * len(ids) * size * 4, "rows": travel, "grads": travel}


# -------------------------------------------------------------------------------------------------------------- ours


class Ours:
    """One rank of our DLRM; a step is that of the training loop under ``sync``."""

    def __init__(self, work: dict[str, Any]) -> None:
        import torch

        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        from embcache.sharded import launch
        from embcache.sharded.lanes import Lanes
        from embcache.train.distributed import Session
        from embcache.train.group import GroupSession

        torch.set_num_threads(1)
        self.work, here = work, launch.init()
        self.rank, self.world = here.rank, here.world
        self.lanes = Lanes()
        group = self.world > 1
        self.session = GroupSession(self.lanes, here.store, here.lasting) if group else Session()
        self.batches = raw_batches(work, self.rank)
        self.features = [f"f{i}" for i in range(work["tables"])]
        self.store: Any = None
        self.step = 0

    def build(self, placement: str, traffic: str, wire: str) -> int:
        """A new model; returns the number of its dense parameters."""
        import torch

        import embcache as ec
        from dlrm.models import build
        from dlrm.task import ClickTask
        from embcache.train.config import TrainConfig
        from embcache.train.step import Workshop

        if self.store is not None:
            self.store.close()
        work = self.work
        torch.manual_seed(work["seed"])
        rule, names = ec.optim.RowWiseAdagrad(lr=0.01), [f"t{i}" for i in range(work["tables"])]
        tables = [
            ec.TableConfig(name, num_embeddings=work["rows"], embedding_dim=work["dim"], features=[f], optimizer=rule)
            for name, f in zip(names, self.features, strict=True)
        ]
        model = build(
            "dlrm", tables, work["n_dense"], bottom_mlp=work["bottom"], top_mlp=work["top"], tiers=[ec.tiers.Unplaced()]
        )
        places = {
            name: ec.Placement(placement, (t % self.world,) if placement == "table_wise" else (), traffic)
            for t, name in enumerate(names)
        }
        self.plan = ec.ShardingPlan(self.world, places, wire)
        ec.shard(model, self.plan, lanes=self.lanes, tiers=[ec.tiers.Ram()])
        self.store, task = model.store, ClickTask(model)
        dense = list(model.parameters())
        optimizers = [torch.optim.SGD(dense, lr=0.01, fused=True), ec.optim.SparseOptimizer(model)]
        self.shop = Workshop(task, optimizers, [self.store], self.session, TrainConfig(tensorboard=False), None)
        self.model = model
        return sum(p.numel() for p in dense)

    def run(self, warm: int, steps: int, gigabits: float | None) -> dict[str, Any]:
        """Seconds of each of ``steps`` steps after ``warm`` ones, over a link; the ledger's account of them, seconds by
        stage, and the bytes by formula of their batches."""
        from embcache.schedule.base import Timeline, schedule_named
        from embcache.sharded.ledger import Link

        ledger, schedule = self.lanes.ledger, schedule_named("sync")
        ledger.link = None if gigabits is None else Link(gigabits)
        timeline, seconds, losses, first = Timeline(), [], [], 0
        for k in range(warm + steps):
            if k == warm:
                timeline, first, mark = Timeline(), self.step, ledger.mark()
            begun = time.perf_counter()
            losses.append(self._train(schedule, timeline))
            if k >= warm:
                seconds.append(time.perf_counter() - begun)
        lanes, formula = ledger.since(mark)["lanes"], dict.fromkeys(LANES[:3], 0)
        for k in range(first, self.step):
            placement = self.plan.placement("t0")
            ids = self.batches[k % len(self.batches)][1]
            of = our_bytes(ids, lambda t, v: self.plan.owner(f"t{t}", v), self.rank, self.work, placement.traffic,
                           self.plan.wire)  # fmt: skip
            formula = {name: formula[name] + of[name] for name in formula}
        ways = {"ids": "sent", "rows": "received", "grads": "sent", "dense": "sent"}
        return {
            "seconds": seconds,
            "bytes": {name: sum(lanes[name][way]) for name, way in ways.items()},
            "formula": formula,
            "headers": sum(lane["header_bytes"] for lane in lanes.values()),
            "waited": {name: lanes[name]["waited"] for name in LANES},
            "stages": timeline.seconds,
            "finite": bool(np.isfinite(losses).all()),
        }

    def _train(self, schedule: Any, timeline: Any) -> float:
        import torch

        import embcache as ec
        from dlrm.data.batch import ClickBatch
        from embcache.schedule.base import Step
        from embcache.train.step import Work

        dense, ids, labels = (torch.from_numpy(a) for a in self.batches[self.step % len(self.batches)])
        lengths = torch.full((len(self.features) * len(labels),), self.work["bag"], dtype=torch.int32)
        sparse = ec.KeyedJaggedTensor.from_lengths_sync(self.features, ids.reshape(-1), lengths)
        self.model.train()
        self.session.begin_step(self.work["seed"], self.step)
        work = Work(self.shop, ClickBatch(dense, sparse, labels), f"step {self.step}")
        try:
            schedule.run(Step(self.step, work.stages()), timeline)
        finally:
            work.release()
            for optimizer in self.shop.optimizers:
                optimizer.zero_grad()
        self.step += 1
        return work.total / work.count


# ---------------------------------------------------------------------------------------------------------- torchrec


class TorchRec:
    """One rank of TorchRec's DLRM, model parallel on gloo: its planner, fused row-wise Adagrad, DDP around the rest."""

    def __init__(self, work: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo")
        self.work, self.rank, self.world = work, dist.get_rank(), dist.get_world_size()
        self.batches = raw_batches(work, self.rank)
        self.features = [f"f{i}" for i in range(work["tables"])]
        self.sent, self.phase, self.step = dict.fromkeys([*LANES[:3], "headers"], 0), "rows", 0
        real = dist.all_to_all_single

        def counted(output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None,
                    *rest: Any, **named: Any) -> Any:  # fmt: skip
            own = input.numel() // self.world if input_split_sizes is None else input_split_sizes[self.rank]
            own *= input.element_size() * (1 if input.dim() == 1 else input[0].numel() if len(input) else 0)
            lane = self.phase if input.is_floating_point() else "headers" if input_split_sizes is None else "ids"
            self.sent[lane] += input.numel() * input.element_size() - own
            return real(output, input, output_split_sizes, input_split_sizes, *rest, **named)

        dist.all_to_all_single = counted

    def build(self, placement: str) -> int:
        """The model; returns the number of its dense parameters."""
        import torch
        import torch.distributed as dist
        import torchrec.optim
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        from torchrec.distributed.planner.types import ParameterConstraints
        from torchrec.distributed.types import ShardingEnv
        from torchrec.models.dlrm import DLRM
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

        work = self.work
        names = [f"t{i}" for i in range(work["tables"])]
        configs = [
            EmbeddingBagConfig(name=n, num_embeddings=work["rows"], embedding_dim=work["dim"], feature_names=[f])
            for n, f in zip(names, self.features, strict=True)
        ]
        bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        model = DLRM(bags, work["n_dense"], work["bottom"], work["top"], dense_device=torch.device("cpu"))
        apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, model.sparse_arch.parameters(), {"lr": 0.01})
        only = ParameterConstraints(sharding_types=[placement], compute_kernels=["fused"])
        sharder = EmbeddingBagCollectionSharder()
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=self.world, compute_device="cpu", local_world_size=self.world),
            constraints=dict.fromkeys(names, only),
        )
        plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        self.model = DistributedModelParallel(model, env=env, plan=plan, sharders=[sharder], device=torch.device("cpu"))
        dense = [p for name, p in self.model.named_parameters() if "embedding_bag" not in name]
        self.optimizer = torch.optim.SGD(dense, lr=0.01, fused=True)
        return sum(p.numel() for p in dense)

    def run(self, warm: int, steps: int, gigabits: float | None) -> dict[str, Any]:
        """As of ours; it has no emulated link."""
        import torch
        import torch.distributed as dist

        assert gigabits is None
        seconds, losses, first = [], [], 0
        for k in range(warm + steps):
            if k == warm:
                first, self.sent = self.step, dict.fromkeys(self.sent, 0)
            dist.barrier()
            begun = time.perf_counter()
            losses.append(self._train(torch))
            if k >= warm:
                seconds.append(time.perf_counter() - begun)
        formula = dict.fromkeys(LANES[:3], 0)
        for k in range(first, self.step):
            ids = self.batches[k % len(self.batches)][1]
            of = torchrec_bytes("table_wise", ids, self.rank, self.world, self.work)
            formula = {name: formula[name] + of[name] for name in formula}
        sent = dict(self.sent)
        headers = sent.pop("headers")
        return {
            "seconds": seconds, "bytes": sent, "formula": formula, "headers": headers, "waited": {}, "stages": {},
            "finite": bool(np.isfinite(losses).all()),
        }  # fmt: skip

    def _train(self, torch: Any) -> float:
        from torchrec import KeyedJaggedTensor

        dense, ids, labels = (torch.from_numpy(a) for a in self.batches[self.step % len(self.batches)])
        lengths = torch.full((len(self.features) * len(labels),), self.work["bag"], dtype=torch.int32)
        sparse = KeyedJaggedTensor.from_lengths_sync(self.features, ids.reshape(-1), lengths)
        self.phase = "rows"
        logits = self.model(dense, sparse).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        self.optimizer.zero_grad()
        self.phase = "grads"
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return float(loss.detach())


# ---------------------------------------------------------------------------------------------------- worker's side

_rank: list[Any] = []


def join(kind: str, work: dict[str, Any]) -> None:
    """Become a rank of the group that the environment names."""
    _rank[:] = [{"ours": Ours, "torchrec": TorchRec}[kind](work)]


def build(**case: str) -> int:
    """See the ``build`` of the rank."""
    parameters: int = _rank[0].build(**case)
    return parameters


def run(warm: int, steps: int, gigabits: float | None) -> dict[str, Any]:
    """See the ``run`` of the rank."""
    result: dict[str, Any] = _rank[0].run(warm, steps, gigabits)
    return result


def counted(kind: str, work: dict[str, Any], world: int) -> dict[str, float]:
    """Bytes by formula that a rank of TorchRec sends in a step, mean over ranks and batches."""
    total = dict.fromkeys(LANES[:3], 0)
    for rank in range(world):
        for _, ids, _ in raw_batches(work, rank):
            of = torchrec_bytes(kind, ids, rank, world, work)
            total = {name: total[name] + of[name] for name in total}
    return {name: value / (world * work["batches"]) for name, value in total.items()}
