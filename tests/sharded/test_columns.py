"""Tables split by column against one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import ranks
import torch
from table_twins import Case, check

import embcache as ec
from embcache.sharded.columns import ColumnSums
from embcache.sharded.plan import pieces_of

RULES = {
    "sgd": ec.optim.SGD(lr=0.1, weight_decay=0.1),
    "adagrad": ec.optim.Adagrad(lr=0.1),
    "rowwise_adagrad": ec.optim.RowWiseAdagrad(lr=0.1, weight_decay=0.1),
    "rowwise_limited": ec.optim.RowWiseAdagrad(lr=0.1, max_norm=1.2),
    "adam": ec.optim.Adam(lr=0.01, per_row_step=True),
    "rowwise_adam": ec.optim.RowWiseAdam(lr=0.01, per_row_step=True),
    "lamb": ec.optim.LAMB(lr=0.01, weight_decay=0.1),
    "lars": ec.optim.LARS(lr=0.1, eta=0.1),
    "ftrl": ec.optim.FTRL(lr=0.1, l1=0.01),
}


def table(rule: str = "sgd", **changes: Any) -> ec.TableConfig:
    given = {"num_embeddings": 50, "embedding_dim": 11, "features": ["f", "g"], "init": ec.init.Normal(0.5), "seed": 3}
    return ec.TableConfig("t", optimizer=RULES[rule], **{**given, **changes})


def columns(world: int, first: int = 0) -> ec.Placement:
    """One shard a rank, in an order that is not that of the ranks."""
    return ec.Placement("column_wise", tuple((first - k) % world for k in range(world)))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_rule_after_one_step(world: int) -> None:
    """11 columns over 2, 3 and 4 ranks; 4 ranks with two shards on one of them, and none on another."""
    placement = columns(world) if world < 4 else ec.Placement("column_wise", (3, 0, 3, 1))
    check(world, [Case(table(rule), placement, steps=1) for rule in RULES], 1e-6)


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_every_rule_over_steps(pooling: str) -> None:
    cases = [
        Case(
            table(rule, pooling=pooling, num_embeddings=None),
            columns(2, 1),
            weighted=pooling == "sum",
            micro=2,
            cache=3,
        )
        for rule in RULES
    ]
    check(2, cases, 2e-5, delays=11)


def test_integer_data_is_equal_in_every_bit() -> None:
    """Steps of SGD stay exact; of the other rules the first one does, where all they add up are integers."""
    rules = {name: rule for name, rule in RULES.items() if name not in ("sgd", "lamb", "rowwise_limited")}
    rules["rowwise_adagrad"] = ec.optim.RowWiseAdagrad(lr=0.1)
    given = {p: table(init=ec.init.Constant(2.0), pooling=p) for p in ("sum", "mean", "none")}
    exact = ec.optim.SGD(lr=0.5)
    cases = [
        Case(dataclasses.replace(t, optimizer=exact), columns(3), integers=True, weighted=p == "sum", micro=2)
        for p, t in given.items()
    ]
    cases += [
        Case(dataclasses.replace(given[p], optimizer=rule), columns(3), integers=True, steps=1)
        for rule in rules.values()
        for p in given
    ]
    check(3, cases, None)


def test_initial_rows_and_rounding_are_those_of_the_whole_table() -> None:
    starts = [ec.init.Uniform(), ec.init.XavierUniform(), ec.init.TruncatedNormal(0.5), ec.init.Constant(0.5)]
    cases = [
        Case(table(init=start, dtype=dtype, num_embeddings=rows), columns(3), steps=2)
        for start in starts
        for dtype in (torch.float32, torch.float16)
        for rows in ((50, None) if not isinstance(start, ec.init.XavierUniform) else (50,))
    ]
    check(3, cases, 2e-3)  # sums over ranks associate in another way: a value may round to its other neighbour
    one = [Case(table(init=start, dtype=torch.bfloat16), columns(3), steps=1, size=1) for start in starts]
    check(3, one, None)  # one sample: nothing is added up across ranks


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_max_norm_is_that_of_whole_rows(norm_type: float) -> None:
    cases = [Case(table(max_norm=0.9, norm_type=norm_type, pooling=p), columns(3), cache=2) for p in ("sum", "none")]
    cases.append(Case(table("lamb", max_norm=0.9, norm_type=norm_type), columns(3), micro=2))
    check(3, cases, 1e-5)


def test_one_column_a_shard_and_one_shard() -> None:
    narrow = Case(table("rowwise_adagrad", embedding_dim=3), columns(3))
    check(3, [narrow, Case(table("lamb"), ec.Placement("column_wise", (2,)))], 5e-6)
    check(1, [Case(table("lamb", max_norm=0.9), ec.Placement("column_wise", (0, 0)))], 5e-6)


def test_more_shards_than_columns_are_refused() -> None:
    plan = ec.ShardingPlan(4, {"t": ec.Placement("column_wise", (0, 1, 2, 3))})
    with pytest.raises(ec.errors.BadConfig, match="table 't': 4 shards of 3 columns"):
        plan.check([table(embedding_dim=3)])


def exchanged(rank: ranks.Rank) -> Any:
    """Sums of two tables over 3 ranks, and the bytes this cost."""
    lanes = rank.lanes()
    tables = [table(), table(embedding_dim=6)]
    placements = [ec.Placement("column_wise", (2, 0)), ec.Placement("column_wise", (1, 2, 1))]
    first, second = (pieces_of(t, *pair) for t, pair in enumerate(zip(tables, placements, strict=True)))
    pieces = [first[0], second[0], *first[1:], *second[1:]]
    rows = {0: 5, 1: 2}
    mine = {
        p: torch.full(
            (rows[piece.table] if piece.rank == rank.rank else 0, 2 - piece.table), 10.0 * p + piece.columns[0]
        )
        for p, piece in enumerate(pieces)
    }
    mark = lanes.ledger.mark()
    found = ColumnSums(pieces, lanes)("sums", mine)
    report = lanes.ledger.since(mark)
    lanes.close()
    return {p: x.tolist() for p, x in found.items() if x.numel()}, report["lanes"]["grads"]["sent"]


def test_sums_go_where_they_are_needed_and_no_further() -> None:
    results = ranks.run(3, exchanged)
    # pieces: t0 [0, 5) at 2; t1 [0, 2) at 1; t0 [5, 11) at 0; t1 [2, 4) at 2; t1 [4, 6) at 1
    of_first = [[[0.0] * 2] * 5, [[25.0] * 2] * 5]
    of_second = [[[10.0]] * 2, [[32.0]] * 2, [[44.0]] * 2]
    assert [r[0] for r in results] == [
        {2: of_first}, {1: of_second, 4: of_second}, {0: of_first, 3: of_second},
    ]  # fmt: skip
    assert [r[1] for r in results] == [[0, 0, 40], [0, 0, 16], [40, 8, 0]]
