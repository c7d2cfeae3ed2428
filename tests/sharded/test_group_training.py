"""Models that are trained over ranks, saved, and gone on with by others."""

from __future__ import annotations

import hashlib

import ranks
import torch

import embcache as ec
from embcache.sharded.checkpoint import GroupCheckpoints
from embcache.sharded.plan import Placement, ShardingPlan
from embcache.sharded.shard import shard
from embcache.sharded.store import local_tables
from embcache.sharded.transfer import export_group


def plan(world, kind):
    placements = {"rows": Placement("row_wise"), "tables": Placement("table_wise", (world - 1,)),
                  "columns": Placement("column_wise", tuple(k % world for k in range(3)))}  # fmt: skip
    return ShardingPlan(world, {"user": placements[kind], "item": Placement("row_wise")})


def go_on(rank, at, out, kind, tier):
    """Three steps of a model from where it is; sums of the export before and after, the outputs at the end."""
    tables = [
        ec.TableConfig("user", None, 6, optimizer=ec.optim.Adagrad(lr=0.5), admission=ec.Admission(2, cells=4096)),
        ec.TableConfig("item", 500, 4, optimizer=ec.optim.RowWiseAdagrad(lr=0.5)),
    ]
    model = ec.EmbeddingBagCollection(tables, tiers=[ec.tiers.Unplaced()])
    lanes = rank.lanes()
    saved = GroupCheckpoints(at, lanes)
    before = saved.plan()
    made = plan(rank.world, kind)
    if before is not None:
        made = ShardingPlan(made.world, made.placements, made.wire, made.buckets, before.ranks)
    place = saved.claim(local_tables(tables, made))
    shard(model, made, lanes=lanes, tiers=[ec.tiers.Ram(rows=50), ec.tiers.Lmdb(place)] if tier == "disk" else None)
    store = model.store
    optimizer = ec.optim.SparseOptimizer(model)
    step, sums = 0, []
    if saved.latest is not None:
        state = saved.load([store])
        step = state["step"]
        export_group(saved, store, out / f"{step}-{rank.world}")
        sums.append(total(out / f"{step}-{rank.world}"))
    for _ in range(3):
        step += 1
        draw = torch.Generator().manual_seed(step)  # the batch of all ranks, cut among them
        values = torch.randint(0, 300, (120,), generator=draw).view(2, 60)
        mine = values.tensor_split(rank.world, dim=1)[rank.rank]
        batch = ec.KeyedJaggedTensor(["user", "item"], mine.reshape(-1), lengths=torch.ones(mine.numel(), dtype=int))
        model(batch).values().square().sum().backward()
        optimizer.step()
    saved.save({"step": step}, [store], notes={"step": step}, wait=False)
    saved.wait()
    export_group(saved, store, out / f"after-{step}")
    sums.append(total(out / f"after-{step}"))
    store.close()
    return sums


def total(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_trained_models_move_between_ranks_and_plans(tmp_path):
    last = None
    for world, kind, tier in [(2, "rows", "disk"), (3, "tables", "disk"), (1, "rows", "ram")]:
        got = ranks.run(world, go_on, at=tmp_path / "run", out=tmp_path / "out", kind=kind, tier=tier, delays=world)
        assert all(g == got[0] for g in got)
        assert last is None or got[0][0] == last
        last = got[0][-1]
