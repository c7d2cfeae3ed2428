"""W ranks against one process."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from twins import RULES, Data, Model, compare, merged, rows_of, single, train

import embcache as ec

PLANS: dict[str, dict[str, ec.Placement]] = {
    "row_wise": {name: ec.Placement("row_wise") for name in "abcde"},
    "table_wise": {name: ec.Placement("table_wise", (k,)) for k, name in enumerate("abcde")},
    "data_parallel": {name: ec.Placement("data_parallel") for name in "abcde"},
    "pooled": {
        "a": ec.Placement("row_wise", traffic="pooled"),
        "b": ec.Placement("row_wise", traffic="pooled"),
        "c": ec.Placement("table_wise", (1,), "pooled"),
        "d": ec.Placement("row_wise"),
        "e": ec.Placement("row_wise"),
    },
    "both": {
        "a": ec.Placement("row_wise", traffic="pooled"),
        "b": ec.Placement("data_parallel"),
        "c": ec.Placement("row_wise"),
        "d": ec.Placement("row_wise"),
        "e": ec.Placement("table_wise", (0,)),
    },
    "mixed": {
        "a": ec.Placement("data_parallel"),
        "b": ec.Placement("row_wise"),
        "c": ec.Placement("row_wise"),
        "d": ec.Placement("table_wise", (1,)),
        "e": ec.Placement("data_parallel"),
    },
}


def plan_of(name: str, world: int, wire: str = "fp32") -> ec.ShardingPlan:
    placements = {
        table: ec.Placement(p.kind, tuple(r % world for r in p.ranks), p.traffic) for table, p in PLANS[name].items()
    }
    return ec.ShardingPlan(world, placements, wire)


def many(rank: ranks.Rank, cases: list[dict[str, Any]]) -> list[Any]:
    """Several trainings in one run."""
    lanes = rank.lanes()
    out = []
    for case in cases:
        torch.manual_seed(0)
        model = Model(RULES[case["rule"]], [ec.tiers.Unplaced()], integers=case["integers"], weighted=case["weighted"])
        ec.shard(
            model, plan_of(case["plan"], rank.world, case.get("wire", "fp32")), tiers=[ec.tiers.Ram()], lanes=lanes
        )
        data = Data(case["seed"], case["steps"], case["size"], case["integers"], case["weighted"])
        ways = {key: case[key] for key in ("micro", "depth") if key in case}
        losses = train(model, data, rank.rank, rank.world, 0, case["steps"], **ways)
        pins = [s.front.pins() for s in (model.pooled.store, model.rows.store)]
        out.append((losses, rows_of(model), pins))
    lanes.close()
    return out


def reference(case: dict[str, Any]) -> tuple[list[float], Any]:
    model = single(Model(RULES[case["rule"]], [ec.tiers.Ram()], integers=case["integers"], weighted=case["weighted"]))
    data = Data(case["seed"], case["steps"], case["size"], case["integers"], case["weighted"])
    return train(model, data, 0, 1, 0, case["steps"]), rows_of(model)


def check(world: int, cases: list[dict[str, Any]], tolerance: float | None, **options: Any) -> None:
    results = ranks.run(world, many, cases=cases, **options)
    for k, case in enumerate(cases):
        losses, rows = reference(case)
        mine = [result[k] for result in results]
        replicated = {name for name, p in PLANS[case["plan"]].items() if p.kind == "data_parallel"}
        compare(merged([m[1] for m in mine], replicated), rows, tolerance)
        assert all(m[2] == [0, 0] for m in mine)
        if case.get("micro", 1) == 1:
            assert [sum(each) for each in zip(*(m[0] for m in mine), strict=True)] == pytest.approx(
                losses, rel=max(1e-4, tolerance or 0.0)
            )


def case(rule: str, plan: str, *, integers: bool, steps: int, **more: Any) -> dict[str, Any]:
    fixed = {"size": 13, "seed": 7, "weighted": False}
    return {"rule": rule, "plan": plan, "integers": integers, "steps": steps, **fixed, **more}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_integer_data_is_equal_in_every_bit(world: int) -> None:
    check(world, [case("sgd", plan, integers=True, steps=6) for plan in PLANS], None)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_one_step_from_equal_state(world: int) -> None:
    check(world, [case(rule, plan, integers=False, steps=1) for rule in RULES for plan in ("row_wise", "mixed")], 1e-6)


def test_micro_batches_and_look_ahead_change_no_bit() -> None:
    cases = [
        case("sgd", plan, integers=True, steps=4, **ways)
        for plan in ("row_wise", "mixed")
        for ways in ({"micro": 3}, {"depth": 2}, {"micro": 2, "depth": 3, "weighted": True})
    ]
    check(2, cases, None, delays=3)


def test_wires_round_what_travels_and_nothing_else() -> None:
    exact = [
        case("sgd", plan, integers=True, steps=1, wire=wire)
        for plan in ("row_wise", "mixed")
        for wire in ("bf16", "fp16")
    ]
    check(2, exact, None)
    check(2, [case("adagrad", "mixed", integers=False, steps=1, wire="fp16")], 2e-3)
    check(2, [case("sgd", "mixed", integers=False, steps=1, wire="bf16")], 2e-2)
    check(3, [case("sgd", "row_wise", integers=False, steps=1, wire="int8")], 5e-2)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_of_bags_travel(world: int) -> None:
    ways: list[dict[str, Any]] = [{}, {"weighted": True}, {"micro": 2, "depth": 1, "weighted": True}]
    check(world, [case("sgd", plan, integers=True, steps=4, **w) for plan in ("pooled", "both") for w in ways], None)
    check(world, [case("adam", plan, integers=False, steps=1, wire="fp32") for plan in ("pooled", "both")], 1e-6)
