"""Rows by id across ranks."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch

import embcache as ec

PLACEMENTS = {
    "a": ec.Placement("row_wise"),
    "b": ec.Placement("table_wise", (1,)),
    "c": ec.Placement("data_parallel"),
    "d": ec.Placement("row_wise"),
    "e": ec.Placement("column_wise", (1, 0, 1)),
}


def build() -> ec.EmbeddingBagCollection:
    rule = ec.optim.Adagrad(lr=0.5)
    tables = [ec.TableConfig(n, None if n == "d" else 300, 4, [n], "sum", rule, seed=k) for k, n in enumerate("abcde")]
    return ec.EmbeddingBagCollection(tables)


def rows_case(rank: ranks.Rank) -> dict[str, Any]:
    lanes, out = rank.lanes(), {}
    model = build()
    for name in "abcde":  # every rank has the same rows before: each takes over its own
        model.store.load_rows(name, torch.arange(5), torch.full((5, 4), 2.0))
    ec.shard(model, ec.ShardingPlan(rank.world, PLACEMENTS), lanes=lanes)
    store = model.store
    for name in "abcde":
        mine = torch.arange(10 + 20 * rank.rank, 30 + 20 * rank.rank)
        weight = mine[:, None].to(torch.float32).expand(-1, 4)
        store.load_rows(name, mine, weight, torch.full((20, 4), float(rank.rank)))
        far = torch.tensor([-(2**63), 2**63 - 1] if name == "d" and rank.rank == 0 else [], dtype=torch.int64)
        store.load_rows(name, far, torch.ones(len(far), 4))
        store.delete(name, torch.tensor([rank.rank, 12]))
        asked = torch.tensor([29, 30, 12, 3, 40][: 5 - rank.rank])
        out[name] = {
            "read": store.read_rows(name, asked),
            "count": store.count_written(name),
            "walk": [(ids.clone(), w) for ids, w, _ in store.written_rows(name, 7)],
        }
    out["local"] = {name: store.local.count_written(name) for name in "abcde"}
    out["weight"] = store.whole_weight("a")[1][:50]
    state = store.state_dict()
    store.load_weight("a", torch.zeros(300, 4))
    zeros = float(store.read_rows("a", torch.arange(300))[0].abs().max())
    store.load_state_dict(state)
    out["again"] = zeros, torch.equal(store.whole_weight("a")[1][:50], out["weight"])
    with pytest.raises(IndexError) as caught:
        store.read_rows("a", torch.tensor([300 if rank.rank == 1 else 3]))
    out["error"] = str(caught.value)
    out["rows"] = store.stats()["tables"]["a"]["rows_written"]
    lanes.close()
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_rows_are_read_replaced_deleted_and_walked_wherever_they_live(world: int) -> None:
    results = ranks.run(world, rows_case)
    initial = build()
    for name in "abcde":
        gone = {*range(world), 12}
        there = [i for i in [*range(5), *range(10, 10 + 20 * world)] if i not in gone]
        far = [2**63 - 1, -(2**63)] if name == "d" else []
        first = initial.store.read_rows(name, torch.tensor([12]))[0]
        for rank, result in enumerate(results):
            weight, state = result[name]["read"]
            wanted = [29.0, 30.0, None, 2.0 if 3 not in gone else None, 40.0][: 5 - rank]
            for row, value in zip(weight, wanted, strict=True):
                assert torch.equal(row, first[0] if value is None else torch.full((4,), value))
            assert state[:2, 0].tolist() == [0.0, 1.0]
            assert result[name]["count"] == len(there) + len(far)
            ids = torch.cat([block[0] for block in result[name]["walk"]])
            assert ids.tolist() == [*there, *far]
            rows = torch.cat([block[1] for block in result[name]["walk"]])
            assert rows[ids.tolist().index(29)].tolist() == [29.0] * 4
    owned = [result["local"] for result in results]
    assert sum(o["a"] for o in owned) == results[0]["a"]["count"]
    assert min(o["a"] for o in owned) > 0
    assert [o["b"] > 0 for o in owned] == [rank == 1 for rank in range(world)]
    assert all(o["c"] == results[0]["c"]["count"] for o in owned)
    for rank, result in enumerate(results):
        assert torch.equal(result["weight"], results[0]["weight"])
        assert result["again"] == (0.0, True)
        assert result["error"].startswith("table 'a'" if rank == 1 else "rank 1: IdOutOfRange: table 'a'")
        assert result["rows"] == results[0]["a"]["count"]
