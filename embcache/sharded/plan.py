"""Where tables live: a placement for each, and which rank holds which hash bucket.

A *piece* is what one local store holds of a table: the whole of it, the rows of some buckets, or some columns. A
placement is a strategy object that says how ids reach the pieces of a table; everything else is told in pieces.

>>> plan = ShardingPlan(2, {"user": Placement("row_wise"), "item": Placement("table_wise", ranks=(1,))})
>>> plan.owner("user", np.array([0, 1, 2, 3])).tolist(), plan.owner("item", np.array([0, 1])).tolist()
([1, 1, 1, 0], [1, 1])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import TableConfig
from ..errors import BadConfig
from ..kernels.buckets import BUCKETS, MAX_BUCKETS, bucket_of

__all__ = ["ALL", "HASH", "ONE", "WIRES", "Piece", "Placement", "ShardingPlan", "first_map", "remap"]

HASH, ONE, ALL = range(3)  # how ids reach a piece: by bucket, all to one rank, to every rank
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
TRAFFIC = ("rows", "pooled")
WIRES = ("fp32", "fp16", "bf16", "int8")
FORMAT = 1


@dataclass(frozen=True)
class Placement:
    """Where one table lives.

    Args:
        kind: "table_wise" (whole on one rank), "row_wise" (rows by hash bucket over all ranks), "column_wise" (columns
            split evenly over ``ranks``) or "data_parallel" (whole on every rank).
        ranks: the rank of a table_wise table; of a column_wise one the rank of each shard, in column order.
        traffic: what travels, "rows" (each distinct row once) or "pooled" (sums of bags, for pooled tables that are
            row_wise or table_wise).
    """

    kind: str = "row_wise"
    ranks: tuple[int, ...] = ()
    traffic: str = "rows"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if self.kind not in KINDS:
            raise BadConfig(f"Placement: kind = {self.kind!r}, must be one of {list(KINDS)}")
        if self.traffic not in TRAFFIC:
            raise BadConfig(f"Placement: traffic = {self.traffic!r}, must be one of {list(TRAFFIC)}")
        if any(not isinstance(r, int) or isinstance(r, bool) or r < 0 for r in self.ranks):
            raise BadConfig(f"Placement: ranks = {self.ranks}, must be numbers of ranks")
        if self.kind == "table_wise" and len(self.ranks) != 1:
            raise BadConfig(f"Placement('table_wise'): ranks = {self.ranks}, must name one rank")
        if self.kind == "column_wise" and not self.ranks:
            raise BadConfig("Placement('column_wise'): ranks = (), must name a rank for each shard")
        if self.kind in ("row_wise", "data_parallel") and self.ranks:
            raise BadConfig(f"Placement({self.kind!r}): ranks = {self.ranks}, uses every rank, give none")
        if self.traffic == "pooled" and self.kind not in ("row_wise", "table_wise"):
            raise BadConfig(f"Placement({self.kind!r}): traffic 'pooled' is for row_wise and table_wise")


@dataclass(frozen=True)
class Piece:
    """What a local store holds of a table.

    Attributes:
        name: of the local table.
        table: index of the table.
        columns: first and last (exclusive) column.
        route: HASH, ONE or ALL.
        rank: the rank that holds it, of route ONE.
        pooled: whether sums of bags travel instead of rows.
    """

    name: str
    table: int
    columns: tuple[int, int]
    route: int
    rank: int = -1
    pooled: bool = False

    @property
    def dim(self) -> int:
        return self.columns[1] - self.columns[0]


def pieces_of(t: int, table: TableConfig, placement: Placement) -> list[Piece]:
    """The pieces of a table, in column order; the first has the table's name."""
    whole, pooled = (0, table.embedding_dim), placement.traffic == "pooled"
    if placement.kind == "row_wise":
        return [Piece(table.name, t, whole, HASH, pooled=pooled)]
    if placement.kind == "table_wise":
        return [Piece(table.name, t, whole, ONE, placement.ranks[0], pooled)]
    if placement.kind == "data_parallel":
        return [Piece(table.name, t, whole, ALL)]
    shards = len(placement.ranks)
    ends = [table.embedding_dim * k // shards for k in range(shards + 1)]
    return [
        Piece(table.name if not k else f"{table.name}.columns{ends[k]}", t, (ends[k], ends[k + 1]), ONE, rank)
        for k, rank in enumerate(placement.ranks)
    ]


def first_map(world: int, buckets: int = BUCKETS) -> tuple[int, ...]:
    """Rank of each bucket: a stretch of neighbours for every rank."""
    return tuple(b * world // buckets for b in range(buckets))


def remap(old: Sequence[int], world: int) -> tuple[int, ...]:
    """The map for another number of ranks that moves the fewest buckets away from their rank; shares are as even as
    they can be.

    >>> old = first_map(2, 8)
    >>> old, remap(old, 4)
    ((0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 2, 3, 1, 1, 2, 3))
    """
    new = [rank if rank < world else -1 for rank in old]
    held = [new.count(rank) for rank in range(world)]
    least, extra = divmod(len(old), world)
    most = sorted(range(world), key=lambda rank: (-held[rank], rank))
    quota = {rank: least + (k < extra) for k, rank in enumerate(most)}
    seen = [0] * world
    for b, rank in enumerate(new):
        if rank >= 0:
            seen[rank] += 1
            if seen[rank] > quota[rank]:
                new[b] = -1
    kept = {rank: min(held[rank], quota[rank]) for rank in range(world)}
    free = iter([rank for turn in range(least + 1) for rank in range(world) if kept[rank] + turn < quota[rank]])
    return tuple(next(free) if rank < 0 else rank for rank in new)


@dataclass(frozen=True)
class ShardingPlan:
    """Placement of every table over ``world`` ranks.

    Args:
        world: number of ranks.
        placements: by table name.
        wire: format of rows and gradients that travel: "fp32", "bf16", "fp16" or "int8".
        buckets: number of hash buckets of row_wise tables, a multiple of 64; more than ranks.
        ranks: of each bucket; None: as even as can be.
    """

    world: int
    placements: Mapping[str, Placement]
    wire: str = "fp32"
    buckets: int = BUCKETS
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.world, int) or isinstance(self.world, bool) or self.world < 1:
            raise BadConfig(f"ShardingPlan: world = {self.world!r}, must be an integer >= 1")
        if self.wire not in WIRES:
            raise BadConfig(f"ShardingPlan: wire = {self.wire!r}, must be one of {list(WIRES)}")
        object.__setattr__(self, "placements", dict(self.placements))
        if self.buckets < 1 or self.buckets % BUCKETS or self.buckets > MAX_BUCKETS:
            raise BadConfig(f"ShardingPlan: buckets = {self.buckets}, must be a multiple of {BUCKETS} <= {MAX_BUCKETS}")
        ranks = first_map(self.world, self.buckets) if self.ranks is None else tuple(self.ranks)
        object.__setattr__(self, "ranks", ranks)
        if len(ranks) != self.buckets or any(not 0 <= rank < self.world for rank in ranks):
            raise BadConfig(f"ShardingPlan: ranks of {len(ranks)} buckets, must be {self.buckets} of [0, {self.world})")
        for name, placement in self.placements.items():
            if not isinstance(placement, Placement):
                raise BadConfig(f"ShardingPlan: placements[{name!r}] = {placement!r}, must be a Placement")
            over = [rank for rank in placement.ranks if rank >= self.world]
            if over:
                raise BadConfig(f"table {name!r}: rank {over[0]} of a plan for {self.world} ranks")

    @classmethod
    def default(cls, tables: Sequence[TableConfig], world: int, wire: str = "fp32") -> ShardingPlan:
        """Every table row_wise, rows travel; with one rank table_wise."""
        only = Placement("table_wise", (0,)) if world == 1 else Placement("row_wise")
        return cls(world, {table.name: only for table in tables}, wire)

    @property
    def map(self) -> np.ndarray:
        """int32 [buckets]: the rank of each bucket."""
        return np.array(self.ranks, dtype=np.int32)

    def placement(self, table: str) -> Placement:
        """That of a table by name."""
        if table not in self.placements:
            raise BadConfig(f"the plan places no table {table!r}; it has {list(self.placements)}")
        return self.placements[table]

    def check(self, tables: Sequence[TableConfig]) -> None:
        """BadConfig where the plan does not fit the tables."""
        names = [table.name for table in tables]
        strange = [name for name in self.placements if name not in names]
        if strange:
            raise BadConfig(f"the plan places table {strange[0]!r}, which the model has not; it has {names}")
        for table in tables:
            placement = self.placement(table.name)
            if placement.traffic == "pooled" and table.pooling == "none":
                raise BadConfig(f"table {table.name!r} is not pooled: traffic must be 'rows'")
            if placement.kind == "column_wise" and len(placement.ranks) > table.embedding_dim:
                raise BadConfig(f"table {table.name!r}: {len(placement.ranks)} shards of {table.embedding_dim} columns")

            if placement.kind == "row_wise" and table.admission is not None and not self._whole_filters():
                raise BadConfig(
                    f"table {table.name!r} counts ids before it admits them, {BUCKETS} hash buckets apart: of "
                    f"{self.buckets} buckets those of one {BUCKETS}th must be with one rank"
                )

    def _whole_filters(self) -> bool:
        rows = self.map.reshape(BUCKETS, -1)
        return bool((rows == rows[:, :1]).all())

    def pieces(self, tables: Sequence[TableConfig]) -> list[Piece]:
        """Of all tables: first one of each, in order, then the further ones of those that are split by column."""
        found = [pieces_of(t, table, self.placement(table.name)) for t, table in enumerate(tables)]
        return [mine[0] for mine in found] + [piece for mine in found for piece in mine[1:]]

    def owner(self, table: str, ids: np.ndarray) -> np.ndarray:
        """int32 [n]: the rank that holds each id (of a column_wise table its first columns; -1 of a replicated one)."""
        placement = self.placement(table)
        if placement.kind == "row_wise":
            return self.map[bucket_of(np.asarray(ids), self.buckets)]
        rank = -1 if placement.kind == "data_parallel" else placement.ranks[0]
        return np.full(len(ids), rank, dtype=np.int32)

    def for_world(self, world: int) -> ShardingPlan:
        """The plan for another number of ranks that moves as little as it can."""

        def fit(name: str, placement: Placement) -> Placement:
            return dataclasses.replace(placement, ranks=tuple(rank % world for rank in placement.ranks))

        assert self.ranks is not None
        placements = {name: fit(name, placement) for name, placement in self.placements.items()}
        return ShardingPlan(world, placements, self.wire, self.buckets, remap(self.ranks, world))

    def describe(self, tables: Sequence[TableConfig] = ()) -> str:
        """A line a table."""
        shapes = {t.name: f"{t.num_embeddings if t.num_embeddings else 'any'} x {t.embedding_dim}" for t in tables}
        lines = [("table", "shape", "placement", "ranks", "travels")]
        for name, placement in self.placements.items():
            ranks = ", ".join(map(str, placement.ranks)) or "all"
            lines.append((name, shapes.get(name, ""), placement.kind, ranks, f"{placement.traffic} {self.wire}"))
        wide = [max(len(line[k]) for line in lines) for k in range(5)]
        padded = [[word.ljust(w) for word, w in zip(line, wide, strict=True)] for line in lines]
        return "\n".join("  ".join(words).rstrip() for words in padded)

    # saving -----------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Plain values that ``from_dict`` takes."""
        assert self.ranks is not None
        tables: dict[str, Any] = {}
        for name, placement in self.placements.items():
            entry: dict[str, Any] = {"kind": placement.kind, "traffic": placement.traffic}
            tables[name] = {**entry, "ranks": list(placement.ranks)} if placement.ranks else entry
        return {
            "format": FORMAT, "world": self.world, "wire": self.wire, "buckets": list(self.ranks), "tables": tables,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], where: str = "plan") -> ShardingPlan:
        """What ``as_dict`` gave; BadConfig names a key that is unknown or missing."""
        _keys(saved, {"format", "world", "tables"}, {"wire", "buckets"}, where)
        if saved["format"] != FORMAT:
            raise BadConfig(f"{where}: format = {saved['format']!r}, this version reads {FORMAT}")
        placements = {}
        for name, entry in dict(saved["tables"]).items():
            _keys(entry, {"kind"}, {"ranks", "traffic"}, f"{where}: table {name!r}")
            placements[name] = Placement(**{**entry, "ranks": tuple(entry.get("ranks", ()))})
        ranks = saved.get("buckets")
        wire = saved.get("wire", "fp32")
        if ranks is None:
            return cls(saved["world"], placements, wire)
        return cls(saved["world"], placements, wire, len(ranks), tuple(ranks))

    def save(self, path: str | Path) -> None:
        """Write a YAML file."""
        import yaml

        text = yaml.safe_dump(self.as_dict(), sort_keys=False, default_flow_style=None, width=118)
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ShardingPlan:
        """Read what ``save`` wrote, or somebody by hand (``buckets`` and ``wire`` may be left out)."""
        import yaml

        try:
            saved = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise BadConfig(f"{path} is no YAML file: {error}") from error
        return cls.from_dict(saved, str(path))


def _keys(saved: Any, needed: set[str], allowed: set[str], where: str) -> None:
    if not isinstance(saved, Mapping):
        raise BadConfig(f"{where}: must have the keys {sorted(needed)}")
    for name in sorted(saved.keys() - needed - allowed, key=str):
        raise BadConfig(f"{where}: unknown key {name!r}, known are {sorted(needed | allowed)}")
    for name in sorted(needed - saved.keys()):
        raise BadConfig(f"{where}: no key {name!r}")
