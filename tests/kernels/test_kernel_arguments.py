"""Arguments of the C++ ops that lead outside their tensors raise, and nothing is written."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from embcache.init import normal_table

BIG = (-(2**63), -(2**62), -1, 2**31, 2**32, 2**40, 2**61, 2**62, 2**62 + 1, 2**63 - 1)


@pytest.fixture
def problem() -> dict[str, Any]:
    """Two tables of 10 and 20 rows, a feature of 3 bags each."""
    return {
        "slabs": [torch.zeros(10, 64, dtype=torch.uint8), torch.zeros(20, 128, dtype=torch.uint8)],
        "tables": torch.tensor([[4, 0, 16, 3, 5, 0, 0, 4], [8, 1, 16, 2, 9, 1, 3, 16]]),
        "features": torch.tensor([[0, 0, 0, 3, 0, 0, 12], [1, 1, 3, 3, 0, 4, 12]]),
        "values": torch.arange(1, 7),
        "offsets": torch.arange(7),
        "grads": [torch.ones(36)],
    }


def run(native: ModuleType, p: dict[str, Any], op: str) -> None:
    ids = p["features"], p["values"], p["offsets"]
    if op == "pooled_lookup":
        native.pooled_lookup(p["slabs"], p["tables"], *ids, None, 36, 0)
    elif op == "grad_weights":
        native.grad_weights(p["slabs"], p["tables"], *ids, p["grads"])
    elif op == "touch_rows":
        torch.ops.embcache.touch_rows(p["slabs"], p["tables"], *ids)
    else:
        nothing = [torch.empty(0, dtype=torch.int64)] * 2
        native.fused_update(p["slabs"], nothing, p["tables"], torch.ones(2, 16, dtype=torch.float64), *ids, None,
                            p["grads"], nothing)  # fmt: skip


OPS = ("pooled_lookup", "grad_weights", "touch_rows", "fused_update")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_ids_and_offsets_outside_their_tensors(
    native: ModuleType, problem: dict[str, Any], op: str, index: torch.dtype
) -> None:
    run(native, problem, op)
    before = [slab.clone() for slab in problem["slabs"]]
    last = torch.iinfo(index).max
    for what, at, value in [
        ("values", 0, 10), ("values", 5, 20), ("values", 2, -1), ("values", 2, last), ("values", 2, -last - 1),
        ("offsets", 0, 1), ("offsets", 3, 1), ("offsets", 6, 7), ("offsets", 3, last), ("offsets", 3, -last - 1),
        ("offsets", 6, last),
    ]:  # fmt: skip
        bad = {**problem, what: problem[what].to(index)}
        bad[what][at] = value
        with pytest.raises(RuntimeError, match=rf"embcache\.{op}: {what}\["):
            run(native, bad, op)
    assert all(torch.equal(a, b) for a, b in zip(problem["slabs"], before, strict=True))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("what", "columns"), [("features", (0, 2, 3, 4, 5, 6)), ("tables", (0, 1, 2, 3, 6))])
def test_descriptors_that_overflow(
    native: ModuleType, problem: dict[str, Any], op: str, what: str, columns: tuple[int, ...]
) -> None:
    unread = {"touch_rows": (4, 5, 6)}.get(op, ()) if what == "features" else ()
    for column in columns:
        for value in BIG:
            bad = {**problem, what: problem[what].clone()}
            bad[what][1, column] = value
            if column in unread:
                run(native, bad, op)
                continue
            with pytest.raises(RuntimeError, match=rf"embcache\.{op}: "):
                run(native, bad, op)


def test_summed_rows_outside_their_tensors(native: ModuleType, problem: dict[str, Any]) -> None:
    slab, table = problem["slabs"][1], problem["tables"][1:]
    hyper, slots, grads = torch.ones(1, 16, dtype=torch.float64), torch.tensor([3, 19]), torch.ones(2, 8)
    nothing = torch.empty(0, dtype=torch.int64)
    good = {"slots": slots, "grads": grads, "given": torch.ones(2, 3)}

    def call(op: str, **changes: Any) -> None:
        if op == "row_sums":
            native.row_sums(slab, table, hyper, **{**good, **changes})
        else:
            native.apply_rows(slab, nothing.to(torch.uint8), table, hyper, **{**good, **changes}, slot_ids=nothing)

    for op in ("row_sums", "apply_rows"):
        call(op)
        before = slab.clone()
        for value in (20, *BIG):
            with pytest.raises(RuntimeError, match=rf"embcache\.{op}: slots\[1\]"):
                call(op, slots=torch.tensor([3, value]))
        for what in ({"grads": grads[:1]}, {"grads": grads[:, :7].contiguous()}, {"given": torch.ones(2, 2)},
                     {"given": torch.ones(3, 3)}, {"grads": grads.double()}, {"slots": slots.int()}):  # fmt: skip
            with pytest.raises(RuntimeError, match=rf"embcache\.{op}: "):
                call(op, **what)
        assert torch.equal(slab, before)


@pytest.mark.parametrize("argument", ["dim", "state_offset", "weight_dtype", "init_code", "slot", "first_column"])
def test_initial_rows_outside_the_slab(native: ModuleType, argument: str) -> None:
    slab = torch.zeros(10, 64, dtype=torch.uint8)
    for value in BIG:
        given = {"slot": 3, "dim": 4, "weight_dtype": 0, "state_offset": 16, "init_code": 2, argument: value}
        if argument == "first_column" and 0 <= value <= 2**40:
            continue
        slots = torch.tensor([given.pop("slot")])
        with pytest.raises(RuntimeError, match=r"embcache\.init_rows: "):
            native.init_rows(slab, slots, slots, 0, **given, p0=0.1, p1=0.0, key=5, state_init=torch.zeros(4),
                             normal_table=normal_table())  # fmt: skip
    assert not bool(slab.any())


def test_check_ids_and_check_offsets_take_anything(native: ModuleType, problem: dict[str, Any]) -> None:
    rows = torch.tensor([10, 20])
    for value in BIG:
        offsets = problem["offsets"].clone()
        offsets[3] = value
        assert native.check_offsets(offsets, 6) == (3 if value < 2 else 4)
        with pytest.raises(RuntimeError, match=r"embcache\.check_ids: offsets\["):
            native.check_ids(problem["values"], offsets, problem["features"], rows)
