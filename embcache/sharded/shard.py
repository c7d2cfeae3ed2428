"""``ec.shard``: a model's tables spread over ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from ..errors import BadConfig, NotSupported
from ..lookup import Tables
from ..store import EmbeddingStore
from ..store_rows import BLOCK
from ..tiers import Lmdb, Ram, Unplaced
from .lanes import Lanes
from .peers import Peers
from .plan import ALL, HASH, ShardingPlan
from .store import ShardedStore, local_tables
from .warm import warm

__all__ = ["RANK_FOLDER", "rank_folder", "shard"]

M = TypeVar("M", bound=nn.Module)
RANK_FOLDER = re.compile(r"rank-\d{5}(\.\d+)?")


def shard(
    model: M,
    plan: ShardingPlan | None = None,
    mesh: Any = None,
    *,
    tiers: Sequence[Any] | None = None,
    wire: str | None = None,
    lanes: Any = None,
) -> M:
    """Spread the tables of all embedding modules in ``model`` over the ranks of a group, in place; returns the model.

    Collective: every rank calls it with the same model and plan, before it makes a ``SparseOptimizer``. Inputs and
    outputs of the modules stay the same; each rank gives its own samples. A model may be built cheaply with
    ``tiers=[ec.tiers.Unplaced()]``; of one with rows in memory each rank takes over the rows that are its own.

    Args:
        plan: where tables live; None: every table row_wise.
        mesh: a one-dimensional device mesh or a process group; None: the default group, or this process alone.
        tiers: of each rank's store, as for ``EmbeddingStore``; ``Lmdb(path)`` becomes ``path/rank-00000`` and so on,
            where it is not such a folder already. None: those the model was built with, ``[Ram()]`` if it has no place
            yet.
        wire: format of rows and gradients that travel, in place of the plan's.
        lanes: what the ranks meet on, where there are lanes already.

    >>> import embcache as ec
    >>> model = ec.EmbeddingBag(10, 2, mode="sum", init=ec.init.Constant(1.0), tiers=[ec.tiers.Unplaced()])
    >>> shard(model)(torch.tensor([[3, 4]])).detach()
    tensor([[2., 2.]])
    """
    stores = _stores(model)
    every = [table for store in stores for table in store.tables]
    lanes = Lanes(mesh) if lanes is None else lanes
    if plan is None:
        plan = ShardingPlan.default(every, lanes.world, wire or "fp32")
    elif wire is not None and wire != plan.wire:
        plan = ShardingPlan(plan.world, plan.placements, wire, plan.buckets, plan.ranks)
    if len({table.name for table in every}) < len(every):
        raise BadConfig(f"tables of several stores have the same name: {sorted(table.name for table in every)}")
    plan.check(every)
    if lanes.world > 1:
        Peers(lanes).patiently(lambda: warm(_chain(stores[0], tiers), stores[0].backend))
    for k, store in enumerate(stores):
        _replace(model, store, _sharded(store, plan, lanes, tiers, k if len(stores) > 1 else None))
    return model


def rank_folder(path: str | Path, rank: int) -> Path:
    """Where a rank's store lives in a group's folder."""
    return Path(path) / f"rank-{rank:05d}"


def _stores(model: nn.Module) -> list[EmbeddingStore]:
    found: dict[int, EmbeddingStore] = {}
    for module in model.modules():
        if isinstance(module, Tables):
            found[id(module.store)] = module.store
    if not found:
        raise BadConfig("ec.shard: the model holds no embedding table of this library")
    for store in found.values():
        if isinstance(store, ShardedStore):
            raise BadConfig(f"tables {store.names} are sharded already")
        if store.durable is not None:
            raise NotSupported(
                f"sharding a store on disk, {store.durable.folder}: build the model with tiers=[ec.tiers.Unplaced()], "
                "give the tiers to ec.shard, and import an export of the store"
            )
        if store._owner is not None and store._owner() is not None:
            raise BadConfig("ec.shard comes before the SparseOptimizer, which would hold the tables as they were")
        store._settled()
    return list(found.values())


def _sharded(
    store: EmbeddingStore, plan: ShardingPlan, lanes: Any, tiers: Sequence[Any] | None, number: int | None
) -> ShardedStore:
    mine = ShardingPlan(
        plan.world, {name: plan.placement(name) for name in store.names}, plan.wire, plan.buckets, plan.ranks
    )
    given, unplaced = _chain(store, tiers), any(isinstance(tier, Unplaced) for tier in store.tiers)
    tables, pieces = local_tables(store.tables, mine), mine.pieces(store.tables)
    chain = [_own_tier(tier, lanes.rank, number) for tier in given]
    if len(chain) == 1 and isinstance(chain[0], Ram):
        here = [p.name for p in pieces if p.route == ALL or p.rank == lanes.rank or lanes.world == 1]
        chain[0].whole = frozenset(here)
    local = EmbeddingStore(tables, chain, backend=store.backend)
    try:
        sharded = ShardedStore(store.tables, mine, local, lanes)
        sharded.frozen = store.frozen
        if not unplaced and local.recovered_from is None:
            _hand_over(store, sharded)
    except BaseException:
        local.close()
        raise
    return sharded


def _chain(store: EmbeddingStore, tiers: Sequence[Any] | None) -> Sequence[Any]:
    given = store.tiers if tiers is None else tiers
    return [Ram()] if any(isinstance(tier, Unplaced) for tier in given) else given


def _own_tier(tier: Any, rank: int, number: int | None) -> Any:
    """A rank's own tier of that description; ``number`` tells the stores of a model apart."""
    if not isinstance(tier, Lmdb) or RANK_FOLDER.fullmatch(tier.folder.name):
        return tier.fresh()
    folder = rank_folder(tier.folder if number is None else tier.folder / f"store-{number}", rank)
    os.makedirs(folder.parent, exist_ok=True)
    return Lmdb(folder, readonly=tier.readonly, overlay_bytes=tier.overlay_bytes, changes_bytes=tier.changes_bytes)


def _hand_over(store: EmbeddingStore, sharded: ShardedStore) -> None:
    """This rank's share of the rows that a store in memory has written; every rank has them all."""
    for t, step in enumerate(store.steps):
        sharded.steps[t] = step
    for p, piece in enumerate(sharded.pieces):
        if piece.route not in (ALL, HASH) and piece.rank != sharded.lanes.rank:
            continue
        for ids, rows in store.raw_rows(piece.table, BLOCK):
            if piece.route == HASH:
                owners = sharded.plan.owner(store.names[piece.table], ids.numpy())
                keep = torch.from_numpy(np.flatnonzero(owners == sharded.lanes.rank))
                ids, rows = ids[keep], rows[keep]
            sharded.local.put_raw_rows(p, ids, sharded.front.cut(p, rows))


def _replace(model: nn.Module, old: EmbeddingStore, new: ShardedStore) -> None:
    for module in model.modules():
        if isinstance(module, Tables) and module.store is old:
            module.store = new
    old.close()
