"""Sharded stores for tests of what lies on disks: the local stores of a plan, trained without exchanges.

Gradients are a function of table, id, column and step, so every rank updates what it holds and no row depends on where
it lies: one store with whole tables, trained the same, is what any number of ranks must equal.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

import embcache as ec
from embcache.sharded.checkpoint import GroupCheckpoints
from embcache.sharded.layout import Piece, cut, layout_of, narrowed, payload_bytes
from embcache.sharded.plan import Placement, ShardingPlan

ROWS = 3000


def tables(admission: bool = False) -> list[ec.TableConfig]:
    """Bounded, unbounded and narrow ones, with and without state; in one, rows come and go."""
    extra = {"admission": ec.Admission(2, cells=4096), "expiry": ec.Expiry(idle=3, every=2)} if admission else {}
    return [
        ec.TableConfig("user", None, 6, optimizer=ec.optim.Adam(lr=0.1, per_row_step=True), **extra),
        ec.TableConfig("item", ROWS, 8, optimizer=ec.optim.Adagrad(lr=0.1)),
        ec.TableConfig("tiny", 3, 5, optimizer=ec.optim.SGD(lr=0.1), dtype=torch.bfloat16),
    ]


def plan(world: int, kinds: str, declared: list[ec.TableConfig] | None = None, **options: Any) -> ShardingPlan:
    """``kinds``: of each table r(ow_wise), t(able_wise), c(olumn_wise) or d(ata_parallel)."""
    made = {
        "r": lambda t: Placement("row_wise"),
        "t": lambda t: Placement("table_wise", ((t + 1) % world,)),
        "c": lambda t: Placement("column_wise", tuple((t + k) % world for k in range(2))),
        "d": lambda t: Placement("data_parallel"),
    }
    names = [table.name for table in declared or tables()]
    return ShardingPlan(world, {name: made[kind](t) for t, (name, kind) in enumerate(zip(names, kinds, strict=True))},
                        **options)  # fmt: skip


def local_tables(declared: list[ec.TableConfig], plan: ShardingPlan) -> list[ec.TableConfig]:
    """A local table for each piece."""
    found = []
    for piece in plan.pieces(declared):
        table = declared[piece.table]
        found.append(dataclasses.replace(table.part(*piece.columns, name=piece.name), features=(piece.name,)))
    return found


@dataclasses.dataclass
class Sharded:
    """What checkpoints need of a sharded store."""

    tables: list[ec.TableConfig]
    plan: ShardingPlan
    lanes: Any
    local: ec.EmbeddingStore

    def close(self) -> None:
        self.local.close()

    def renewed(self) -> None:
        pass

    def discard(self) -> None:
        pass

    def pending_tables(self) -> set[int]:
        return self.local.pending_tables()


def open_group(rank: Any, folder: Path, kinds: str, tier: str, declared: list[ec.TableConfig] | None = None,
               keep: int = 2, lanes: Any = None, **options: Any) -> tuple[GroupCheckpoints, Sharded]:  # fmt: skip
    """Checkpoints and a store, as a training opens them."""
    declared = declared or tables()
    lanes = lanes or rank.lanes()
    saved = GroupCheckpoints(folder, lanes, keep, **{"tell": print, **options})
    made = plan(rank.world, kinds, declared)
    before = saved.plan()
    if before is not None:  # as few buckets as possible move
        made = dataclasses.replace(made, ranks=before.ranks)
    local = local_tables(declared, made)
    place = saved.claim(local)
    tiers = {"ram": [ec.tiers.Ram()], "cache": [ec.tiers.Ram(rows=64), ec.tiers.Lmdb(place)],
             "hashed": [ec.tiers.Ram(rows=64), ec.tiers.Ram()]}[tier]  # fmt: skip
    return saved, Sharded(declared, made, lanes, ec.EmbeddingStore(local, tiers))


def batch(table: ec.TableConfig, step: int) -> np.ndarray:
    """Distinct ids of a step."""
    rng = np.random.default_rng([step, *map(ord, table.name)])
    if table.num_embeddings is None:
        ids = np.concatenate([rng.integers(-(2**63), 2**63, 40), rng.integers(0, 400, 150)])
        ids = np.concatenate([ids, [-1, 2**63 - 1]])
    else:
        ids = rng.integers(0, table.num_embeddings, 150)
    return np.unique(ids)


def gradient(table: ec.TableConfig, ids: np.ndarray, step: int) -> np.ndarray:
    """fp32 [n, D]."""
    columns = np.arange(table.embedding_dim)
    with np.errstate(over="ignore"):
        mixed = ids.astype(np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15) + np.uint64(step * 977 + 1)
        mixed = (mixed >> np.uint64(40)) + columns.astype(np.uint64)[None] * np.uint64(7919)
    return ((mixed % np.uint64(201)).astype(np.float32) - 100) / 64


def train(store: Sharded, steps: range, rank: int) -> None:
    """Each rank updates what it holds."""
    layout = layout_of(store.plan, store.tables)
    for step in steps:
        names, values, lengths, grads = [], [], [], {}
        for table in store.tables:
            for piece in layout[table.name]:
                ids = batch(table, step)
                ids = ids[_mine(piece, ids, rank)]
                names.append(piece.name)
                values.append(torch.from_numpy(ids))
                lengths.append(len(ids))
                grads[piece.name] = torch.from_numpy(gradient(table, ids, step)[:, slice(*piece.columns)].copy())
        longest = max(lengths)
        sizes = torch.tensor([[1] * n + [0] * (longest - n) for n in lengths]).reshape(-1)
        with store.local.stage(ec.KeyedJaggedTensor(names, torch.cat(values), lengths=sizes)) as handle:
            store.local.lookup(handle)
            full = {name: torch.cat([g, torch.zeros(longest - len(g), g.shape[1])]) for name, g in grads.items()}
            store.local.update(handle, full)
        store.local.step()


def _mine(piece: Piece, ids: np.ndarray, rank: int) -> np.ndarray:
    if piece.replicated:
        return np.ones(len(ids), bool)
    return piece.owners(ids) == rank


def rows(store: Sharded) -> dict[str, dict[int, bytes]]:
    """Every written row of this rank by piece."""
    found = {}
    for t, table in enumerate(store.local.tables):
        width = table.meta_offset + table.meta_bytes
        found[table.name] = {
            key: row.tobytes()
            for ids, block in store.local.raw_rows(t, 1000)
            for key, row in zip(ids.tolist(), block[:, :width].numpy(), strict=True)
        }
    return found


def one_store(steps: int, declared: list[ec.TableConfig] | None = None) -> Sharded:
    """The same steps in one store of whole tables."""
    declared = declared or tables()
    made = plan(1, "t" * len(declared), declared)
    store = Sharded(declared, made, None, ec.EmbeddingStore(local_tables(declared, made)))
    train(store, range(1, steps + 1), 0)
    return store


def gathered(parts: list[dict[str, dict[int, bytes]]], made: ShardingPlan,
             declared: list[ec.TableConfig]) -> dict[str, dict[int, Any]]:  # fmt: skip
    """Rows of all ranks by table, checked to lie where the plan says, joined where columns are split (weights only)."""
    found: dict[str, dict[int, Any]] = {}
    for name, pieces in layout_of(made, declared).items():
        for piece in pieces:
            whole: dict[int, Any] = {}
            for rank, part in enumerate(parts):
                ids = np.array(list(part[piece.name]), np.int64)
                assert _mine(piece, ids, rank).all(), (name, rank)
                if piece.replicated:
                    assert part[piece.name] == parts[0][piece.name]
                whole.update(part[piece.name])
            found[piece.name] = whole
    return found


def expected(store: Sharded, made: ShardingPlan) -> dict[str, dict[int, bytes]]:
    """The rows of a store of whole tables, as the pieces of a plan hold them."""
    found = {}
    for t, table in enumerate(store.tables):
        blocks = list(store.local.raw_rows(t, 1 << 20))
        for piece in layout_of(made, store.tables)[table.name]:
            form = narrowed(table, piece.columns)
            found[piece.name] = {
                key: row.tobytes()
                for ids, block in blocks
                for key, row in zip(ids.tolist(), cut(table, (0, table.embedding_dim), block, piece.columns)
                                    [:, : payload_bytes(form)].numpy(), strict=True)
            }  # fmt: skip
    return found


class Alone:
    """The only rank of a group."""

    rank, world = 0, 1

    def lanes(self) -> Any:
        from embcache.sharded.lanes import Lanes

        return Lanes()


def warm(folder: Path) -> None:
    """Compile everything once where nobody waits: a rank's time is limited."""
    for tier in ("cache", "hashed", "cache"):
        saved, store = open_group(Alone(), folder / tier, "rrr", tier, tables(True), tell=None)
        if saved.latest is not None:
            saved.load([store])
        train(store, range(1, 5), 0)
        rows(store)
        saved.save({}, [store])
        store.close()
