"""What one rank refuses all ranks refuse, and nothing has changed; bytes are those of the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ranks
import torch

import embcache as ec

SGD = ec.optim.SGD(lr=0.5)


def build(lanes: Any, placement: ec.Placement, wire: str = "fp32", dim: int = 8) -> ec.EmbeddingBagCollection:
    tables = [
        ec.TableConfig("u", 1000, dim, ["u"], "sum", SGD, init=ec.init.Constant(1.0)),
        ec.TableConfig("v", None, dim, ["v"], "sum", SGD, init=ec.init.Constant(1.0)),
    ]
    model = ec.EmbeddingBagCollection(tables, tiers=[ec.tiers.Unplaced()])
    return ec.shard(model, ec.ShardingPlan(lanes.world, dict.fromkeys("uv", placement), wire), lanes=lanes)


def batch(u: list[int], v: list[int]) -> ec.KeyedJaggedTensor:
    return ec.KeyedJaggedTensor(["u", "v"], torch.tensor(u + v), lengths=torch.tensor([len(u), len(v)]))


def fault_case(rank: ranks.Rank) -> list[tuple[str, str]]:
    lanes, seen = rank.lanes(), []
    model = build(lanes, ec.Placement("row_wise"))
    optimizer = ec.optim.SparseOptimizer(model)

    def expect(action: Any) -> None:
        with pytest.raises(Exception) as caught:
            action()
        seen.append((type(caught.value).__name__, str(caught.value)))

    good = batch([1, 2, 3], [5, -7])
    model(good).values().sum().backward()
    optimizer.step()
    before = model.store.whole_weight("u")[1]
    expect(lambda: model(batch([1, 1000] if rank.rank == 1 else [1], [5])))
    out = model(good).values()
    out.backward(torch.full_like(out, float("nan") if rank.rank == 0 else 1.0))
    expect(optimizer.step)
    optimizer.zero_grad()
    del out
    model(good).values().sum().backward()
    if rank.rank == 1:
        good.values()[0] = 9
    expect(optimizer.step)
    optimizer.zero_grad()
    assert torch.equal(model.store.whole_weight("u")[1], before)
    assert model.store.front.pins() == 0
    if rank.rank == 1:
        good.values()[0] = 1
    model(good).values().sum().backward()
    optimizer.step()
    seen.append(("row", str(model.store.read_rows("u", torch.tensor([1]))[0][0, 0].item())))
    assert model.store.steps[0] == 2
    lanes.close()
    return seen


def test_what_one_rank_refuses_all_refuse() -> None:
    first, second = ranks.run(2, fault_case, delays=5)
    assert [kind for kind, _ in second] == ["IdOutOfRange", "RemoteFault", "StaleLookup", "row"]
    assert [kind for kind, _ in first] == ["RemoteFault", "NonFiniteGradient", "RemoteFault", "row"]
    assert first[0][1] == f"rank 1: IdOutOfRange: {second[0][1]}"
    assert first[2][1] == f"rank 1: StaleLookup: {second[2][1]}"
    assert first[3] == second[3] == ("row", "-1.0")


def ledger_case(rank: ranks.Rank, wire: str, pooled: bool) -> dict[str, Any]:
    lanes = rank.lanes()
    model = build(lanes, ec.Placement("row_wise", traffic="pooled" if pooled else "rows"), wire)
    optimizer = ec.optim.SparseOptimizer(model)
    rng = np.random.default_rng(rank.rank)
    sent = {"ids": 0, "rows": 0, "grads": 0}
    asked = []
    for _ in range(3):
        u, v = rng.integers(0, 300, 40).tolist(), rng.integers(-50, 50, 30).tolist()
        asked.append((u, v))
        model(batch(u, v)).values().sum().backward()
        optimizer.step()
    for name in sent:
        sent[name] = lanes.ledger.sent(name)
    owner = {
        name: [model.store.plan.owner(name, np.array(ids[k])).tolist() for ids in asked] for k, name in enumerate("uv")
    }
    lanes.close()
    return {"sent": sent, "asked": asked, "owner": owner}


@pytest.mark.parametrize(("wire", "row"), [("fp32", 32), ("bf16", 16), ("int8", 16)])
def test_bytes_are_unique_remote_rows_times_their_width(wire: str, row: int) -> None:
    results = ranks.run(3, ledger_case, wire=wire, pooled=False)
    for rank, result in enumerate(results):
        ids = rows = grads = 0
        for step in range(3):
            for k, (name, width) in enumerate((("u", 4), ("v", 8))):
                pairs = set(zip(result["asked"][step][k], result["owner"][name][step], strict=True))
                remote = sum(owner != rank for _, owner in pairs)
                ids, grads = ids + remote * width, grads + remote * row
                for other, theirs in enumerate(results):
                    if other != rank:
                        them = set(zip(theirs["asked"][step][k], theirs["owner"][name][step], strict=True))
                        rows += row * sum(owner == rank for _, owner in them)
        assert result["sent"] == {"ids": ids, "rows": rows, "grads": grads}


def test_bytes_of_pooled_traffic() -> None:
    results = ranks.run(2, ledger_case, wire="fp32", pooled=True)
    for rank, result in enumerate(results):
        ids = 0
        for step in range(3):
            for k, (name, width) in enumerate((("u", 4), ("v", 8))):
                remote = sum(owner != rank for owner in result["owner"][name][step])
                assert len(result["asked"][step][k]) == len(result["owner"][name][step])
                ids += remote * width + 4  # one bag with ids of the other rank, its length
        assert result["sent"] == {"ids": ids, "rows": 3 * 2 * 32, "grads": 3 * 2 * 32}
