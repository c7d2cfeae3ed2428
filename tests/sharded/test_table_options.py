"""What a table may be told beside its shape, under every placement, against one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ranks
import torch
from table_twins import Case, check, train

import embcache as ec

pytestmark = pytest.mark.soak  # minutes together

EDGES = (-(2**63), 2**63 - 1, -1, 0, 5, *range(100, 130))
FIXED = {"num_embeddings": None, "embedding_dim": 6, "features": ["f", "g"], "init": ec.init.Normal(0.5), "seed": 3}


def table(**changes: Any) -> ec.TableConfig:
    return ec.TableConfig("t", **{"optimizer": ec.optim.RowWiseAdam(lr=0.1), **FIXED, **changes})


def placements(world: int, pooled: bool) -> list[ec.Placement]:
    found = [
        ec.Placement("row_wise"),
        ec.Placement("table_wise", (world - 1,)),
        ec.Placement("column_wise", tuple(reversed(range(world)))),
        ec.Placement("data_parallel"),
    ]
    return [*found, ec.Placement("row_wise", traffic="pooled"), ec.Placement("table_wise", (0,), "pooled")][
        : 6 if pooled else 4
    ]


def cases(world: int, given: ec.TableConfig, **more: Any) -> list[Case]:
    return [Case(given, p, **{"pool": EDGES, **more}) for p in placements(world, given.pooling != "none")]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_admission_counts_what_all_ranks_saw(world: int, pooling: str) -> None:
    """With more than one micro-batch, ids that one of them holds, and a filter so small that ids share counters."""
    known = []
    for count, cells in ((3, 1 << 12), (7, 256), (300, 1 << 12)):
        given = table(admission=ec.Admission(count, cells=cells), pooling=pooling)
        often = {"pool": (-1, 1, 2**40), "size": 60, "steps": 5} if count == 300 else {}
        results = check(world, cases(world, given, micro=2, **often), 2e-5)
        known.append(len({i for r in results for i in r[0][1]["t"][0].tolist()}))
    assert known[0] > known[1] > 3 >= known[2] > 0


def test_filters_hold_the_same_counts_as_in_one_process() -> None:
    given = table(admission=ec.Admission(5, cells=64 * 3))
    results = ranks.run(3, filters_on_ranks, cases=cases(3, given, steps=3))
    for k, case in enumerate(cases(3, given, steps=3)):
        model = case.model(case.tiers())
        train(case, model, 0, 1)
        wanted = model.store.front.extra_state()["t.admission"]
        mine = [result[k] for result in results]
        assert bool(wanted.any())
        if case.placement.kind == "row_wise":  # a row of counters a hash bucket, each with one rank
            assert torch.equal(torch.stack([state["t.admission"] for state in mine]).sum(0), wanted)
        else:
            held = [v for state in mine for v in state.values() if bool(v.any())]
            assert len(held) == {"table_wise": 1}.get(case.placement.kind, 3)
            assert all(torch.equal(v, wanted) for v in held)


def filters_on_ranks(rank: ranks.Rank, cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    lanes, out = rank.lanes(), []
    for case in cases:
        model = ec.shard(case.model([ec.tiers.Unplaced()]), case.plan(rank.world), tiers=case.tiers(), lanes=lanes)
        train(case, model, rank.rank, rank.world)
        out.append(model.store.local.front.extra_state())
        model.store.close()
    lanes.close()
    return out


@pytest.mark.parametrize("rule", [ec.Expiry(idle=1, every=2), ec.Expiry(below=3, idle=0, every=3)])
def test_expiry_runs_on_the_same_clock(rule: ec.Expiry) -> None:
    given = table(expiry=rule, optimizer=ec.optim.Adagrad(lr=0.1))
    check(3, cases(3, given, steps=7, size=6, cache=4), 2e-6)


def test_expiry_and_admission_together() -> None:
    given = table(expiry=ec.Expiry(idle=1, every=2), admission=ec.Admission(2, cells=1 << 12))
    check(2, cases(2, given, steps=7, size=6), 1e-4, delays=3)


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_padding_is_never_trained(pooling: str) -> None:
    given = table(padding_idx=5, pooling=pooling, optimizer=ec.optim.Adagrad(lr=0.1))
    for result in check(3, cases(3, given, weighted=pooling == "sum"), 2e-6)[0:1]:
        assert all(5 not in ids.tolist() for case in result for ids, _ in case[1].values())


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_gradients_are_divided_by_the_occurrences_on_all_ranks(pooling: str) -> None:
    given = table(scale_grad_by_freq=True, pooling=pooling, optimizer=ec.optim.SGD(lr=0.5), padding_idx=101)
    check(3, cases(3, given, micro=2, weighted=pooling == "sum"), 2e-6)
    bounded = table(scale_grad_by_freq=True, pooling=pooling, num_embeddings=9, optimizer=ec.optim.Adagrad(lr=0.5))
    check(2, cases(2, bounded, pool=tuple(range(9)), micro=2), 2e-6, delays=5)


def test_frequencies_are_exact() -> None:
    """An id twice with one rank and twice with another: its gradient is divided by 4."""
    given = table(scale_grad_by_freq=True, optimizer=ec.optim.SGD(lr=1.0), init=ec.init.Zeros(), features=["f"])
    results = ranks.run(2, four_times, cases=cases(2, given))
    for rows in zip(*results, strict=True):
        weights = [w for ranked in rows for w in ranked.values()]
        assert weights
        assert all(torch.equal(w, torch.full_like(w, -1.5)) for w in weights)


def four_times(rank: ranks.Rank, cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    lanes, out = rank.lanes(), []
    for case in cases:
        model = ec.shard(case.model([ec.tiers.Unplaced()]), case.plan(2), tiers=case.tiers(), lanes=lanes)
        optimizer = ec.optim.SparseOptimizer(model)
        batch = ec.KeyedJaggedTensor(["f"], torch.tensor([-7, -7]), lengths=torch.tensor([2]))
        (model(batch)["f"] * (rank.rank + 1)).sum().backward()
        optimizer.step()
        local = model.store.local
        out.append({name: w for name in local.names for _, w, _ in local.written_rows(name)})
        model.store.close()
    lanes.close()
    return out


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_max_norm_under_every_placement(norm_type: float) -> None:
    given = table(max_norm=0.7, norm_type=norm_type, num_embeddings=12, optimizer=ec.optim.SGD(lr=0.2))
    check(3, cases(3, given, pool=tuple(range(12))), 5e-6)
    check(2, cases(2, table(max_norm=0.7, pooling="none"), cache=3), 1e-4)


@pytest.mark.parametrize("what", ["drop", "map"])
def test_ids_out_of_range_are_dropped_or_mapped(what: str) -> None:
    given = table(num_embeddings=8, out_of_range=what, reserved_row=2, optimizer=ec.optim.SGD(lr=0.2))
    check(3, cases(3, given, pool=(*range(8), -1, 8, 2**62)), 2e-6)


def bad_id(rank: ranks.Rank, cases: list[Case]) -> list[Any]:
    lanes, out = rank.lanes(), []
    for case in cases:
        model = ec.shard(case.model([ec.tiers.Unplaced()]), case.plan(rank.world), tiers=case.tiers(), lanes=lanes)
        ids = torch.tensor([3, 8 if rank.rank == 1 else 4])
        batch = ec.KeyedJaggedTensor(["f", "g"], ids, lengths=torch.tensor([1, 1]))
        try:
            model(batch)
        except Exception as error:
            out.append((type(error).__name__, str(error), isinstance(error, IndexError)))
        assert model.store.front.pins() == 0
        train(case, model, rank.rank, rank.world)  # and all goes on
        model.store.close()
    lanes.close()
    return out


def test_an_id_out_of_range_is_everybodys_error() -> None:
    given = table(num_embeddings=8, optimizer=ec.optim.SGD(lr=0.2))
    own = "table 't', feature 'g': values[1] = 8, valid range [0, 8)"
    for rank, found in enumerate(ranks.run(3, bad_id, cases=cases(3, given, pool=tuple(range(8)), steps=1))):
        told = ("IdOutOfRange", own, True) if rank == 1 else ("RemoteFault", f"rank 1: IdOutOfRange: {own}", True)
        assert found == [told] * 6


def test_filters_that_would_be_shared_by_ranks_are_refused() -> None:
    given = table(admission=ec.Admission(3))
    plan = ec.ShardingPlan(100, {"t": ec.Placement("row_wise")}, buckets=128)
    with pytest.raises(ec.errors.BadConfig, match="table 't' counts ids before it admits them, 64 hash buckets apart"):
        plan.check([given])
    ec.ShardingPlan(32, {"t": ec.Placement("row_wise")}, buckets=128).check([given])
    plan.check([table()])
    np.testing.assert_array_equal(np.unique(plan.map), np.arange(100))
