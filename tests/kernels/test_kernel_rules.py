"""Every optimizer rule on every backend: against fp64, against torch.optim, and the edge cases."""

from __future__ import annotations

from types import ModuleType

import kernel_problems as kp
import pytest
import torch
from kernel_problems import Batch, Tables, dense_gradient, hyper_row, make_batch, update
from torch import Tensor

from embcache.kernels import rules

DIMS = [1, 3, 4, 7, 16, 64, 100, 128, 1000, 2048]
RULES = {
    "sgd": (kp.SGD, 0, {"wd": 0.02}),
    "adagrad": (kp.ADAGRAD, 0, {}),
    "row_wise": (kp.ROW_WISE, 0, {}),
    "row_wise_l2": (kp.ROW_WISE, 1 << 1, {"wd": 0.02}),
    "row_wise_decoupled": (kp.ROW_WISE, 2 << 1, {"wd": 0.02}),
    "row_wise_max_norm": (kp.ROW_WISE, 0, {"max_norm": 0.7}),
    "row_wise_c": (kp.ROW_WISE, 0, {"c": 3.0}),
    "adam": (kp.ADAM, 0, {"wd": 0.02}),
    "adam_row_steps": (kp.ADAM, 8, {"wd": 0.02}),
    "row_wise_adam": (kp.ROW_WISE_ADAM, 0, {"wd": 0.02}),
    "row_wise_adam_row_steps": (kp.ROW_WISE_ADAM, 8, {}),
    "lamb": (kp.LAMB, 0, {"wd": 0.02}),
    "lamb_row_steps": (kp.LAMB, 8, {}),
    "lars": (kp.LARS, 0, {"wd": 0.02}),
    "ftrl": (kp.FTRL, 0, {"l1": 0.01, "l2": 0.02}),
}
TIGHT = ("sgd", "adagrad", "row_wise", "row_wise_l2", "row_wise_decoupled", "row_wise_max_norm", "row_wise_c")


def oracle_steps(tables: Tables, batches: list[Batch], options: list[dict[str, float]]) -> list[tuple[Tensor, Tensor]]:
    """(weights, state) of each table in fp64 after the steps, from the formulas in double precision."""
    out = []
    for t in range(len(tables.dims)):
        w, s = tables.weights(tables.slabs, t).double(), tables.state(tables.slabs, t).double()
        for batch, changes in zip(batches, options, strict=True):
            grad, seen = dense_gradient(tables, batch, t)
            new_w, new_s = rules.apply(tables.rule, tables.flags, hyper_row(**changes), w[seen], s[seen], grad[seen])
            w, s = w.index_put((seen,), new_w), s.index_put((seen,), new_s)
        out.append((w, s))
    return out


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dim", DIMS)
def test_three_steps_agree_with_fp64(backend: ModuleType, name: str, dim: int) -> None:
    rule, flags, changes = RULES[name]
    tables = Tables([dim, dim], rule, flags=flags, capacity=12, seed=dim)
    # tables 0 and 1 begin with different constants of state; the last two features share table 1
    batches = [make_batch(tables, [0, 1, 1], 4, longest=3, seed=s) for s in range(3)]
    options = [{**changes, "step": s + 1.0} for s in range(3)]
    slabs = tables.copy()
    for batch, o in zip(batches, options, strict=True):
        update(backend, tables, batch, hyper_row(**o), slabs)
    tolerance = 1e-6 if name in TIGHT else 1e-5
    for t, (w, s) in enumerate(oracle_steps(tables, batches, options)):
        scale = torch.maximum(w.abs(), (w - tables.weights(tables.slabs, t)).abs()).clamp(min=1.0)
        assert ((tables.weights(slabs, t) - w).abs() / scale).max() <= tolerance
        if s.numel():
            assert (tables.state(slabs, t).double() - s).abs().max() <= 2e-6 * max(1.0, float(s.abs().max()))


def torch_reference(name: str, w: Tensor) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD([w], lr=0.05, weight_decay=0.02)
    if name == "adagrad":
        return torch.optim.Adagrad([w], lr=0.05, eps=1e-8, initial_accumulator_value=0.5)
    return torch.optim.AdamW([w], lr=0.05, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.02)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_touched_rows_follow_torch_optim(backend: ModuleType, name: str) -> None:
    rule, flags, changes = RULES[name]
    tables = Tables([24], rule, flags=flags, capacity=10)
    if name == "adam":
        tables.state(tables.slabs, 0).zero_()
    batch = make_batch(tables, [0, 0], 12, longest=4, seed=5)
    grad, seen = dense_gradient(tables, batch, 0)
    w = tables.weights(tables.slabs, 0).double()[seen].requires_grad_()
    optimizer, slabs = torch_reference(name, w), tables.copy()
    for step in range(1, 4):
        w.grad = grad[seen].clone()
        optimizer.step()
        update(backend, tables, batch, hyper_row(**changes, step=step), slabs)
    assert torch.allclose(tables.weights(slabs, 0)[seen].double(), w.detach(), rtol=1e-5, atol=1e-6)


def test_row_wise_equals_elementwise_adagrad_for_constant_gradients(backend: ModuleType) -> None:
    row, full = Tables([32], kp.ROW_WISE, capacity=20), Tables([32], kp.ADAGRAD, capacity=20)
    batch = make_batch(row, [0], 10, seed=3)
    batch.grads = [batch.grads[0].reshape(-1, 32)[:, :1].repeat(1, 32).reshape(-1)]
    a, _ = update(backend, row, batch, hyper_row())
    b, _ = update(backend, full, batch, hyper_row())
    assert torch.allclose(row.weights(a, 0), full.weights(b, 0), atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_untouched_rows_and_padding_keep_every_bit(backend: ModuleType, name: str) -> None:
    rule, flags, changes = RULES[name]
    tables = Tables([20, 5], rule, flags=flags, capacity=40)
    batch = make_batch(tables, [0, 1], 5, longest=2, seed=1)
    slabs, rows = update(backend, tables, batch, hyper_row(**changes))
    touched = 0
    for t in range(2):
        _, seen = dense_gradient(tables, batch, t)
        touched += int(seen.sum())
        assert torch.equal(slabs[t][~seen], tables.slabs[t][~seen])
        assert not torch.equal(slabs[t][seen], tables.slabs[t][seen])
    assert rows == touched


def test_written_bitmap_marks_exactly_the_touched_rows(backend: ModuleType) -> None:
    tables = Tables([4, 4], capacity=45)
    batch = make_batch(tables, [0, 1], 9)
    written = [torch.zeros(6, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
    update(backend, tables, batch, hyper_row(), written=written)
    _, seen = dense_gradient(tables, batch, 0)
    bits = (written[0][:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().bool()
    assert torch.equal(bits[:45], seen)
    assert not bits[45:].any()
    assert written[1].numel() == 0


@pytest.mark.parametrize("rule", [kp.LAMB, kp.LARS])
def test_zero_norms_leave_the_ratio_at_one(backend: ModuleType, rule: int) -> None:
    tables = Tables([8], rule, capacity=4)
    tables.weights(tables.slabs, 0)  # fp32: a view
    tables.slabs[0].view(torch.float32)[:, :8] = 0.0
    tables.state(tables.slabs, 0).zero_()
    batch = make_batch(tables, [0], 6, seed=2)
    expected = oracle_steps(tables, [batch], [{}])[0][0]
    slabs, _ = update(backend, tables, batch, hyper_row())
    assert torch.isfinite(tables.weights(slabs, 0)).all()
    assert torch.allclose(tables.weights(slabs, 0).double(), expected, rtol=1e-5)
    batch.grads = [torch.zeros_like(batch.grads[0])]  # |w| = 0 and |r| = 0
    slabs, _ = update(backend, tables, batch, hyper_row())
    assert torch.equal(tables.weights(slabs, 0), torch.zeros(4, 8))


@pytest.mark.parametrize("name", RULES)
def test_zero_gradient_with_zero_eps_gives_no_nan(backend: ModuleType, name: str) -> None:
    rule, flags, changes = RULES[name]
    tables = Tables([8], rule, flags=flags, capacity=6)
    tables.state(tables.slabs, 0).zero_()
    batch = make_batch(tables, [0], 6, seed=2)
    batch.grads = [torch.zeros_like(batch.grads[0])]
    slabs, _ = update(backend, tables, batch, hyper_row(**{**changes, "eps": 0.0}))
    assert torch.isfinite(tables.weights(slabs, 0)).all()


def test_row_step_counts_advance_where_touched_only(backend: ModuleType) -> None:
    tables = Tables([6, 6], kp.ADAM, flags=8, capacity=16)
    batch = make_batch(tables, [0, 1], 4, longest=2)
    slabs = tables.copy()
    for step in (1, 2, 3):
        update(backend, tables, batch, hyper_row(step=step), slabs)
    for t in range(2):
        _, seen = dense_gradient(tables, batch, t)
        assert torch.equal(tables.state(slabs, t)[:, -1], torch.where(seen, t + 3.0, float(t)))


def test_gradient_multiplier_scales_the_sum(backend: ModuleType) -> None:
    tables = Tables([16])
    batch = make_batch(tables, [0], 8)
    a, _ = update(backend, tables, batch, hyper_row(multiplier=0.25))
    batch.grads = [batch.grads[0] * 0.25]
    b, _ = update(backend, tables, batch, hyper_row())
    assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("rule", range(8))
def test_native_and_reference_agree_to_the_last_bits(native: ModuleType, rule: int) -> None:
    from embcache.kernels import reference

    tables = Tables([33], rule, capacity=32)
    batch = make_batch(tables, [0, 0], 20)
    a, b = update(native, tables, batch, hyper_row())[0], update(reference, tables, batch, hyper_row())[0]
    few = 16 if rule == kp.FTRL else 2  # FTRL divides a difference of roots by its rate
    assert torch.allclose(tables.weights(a, 0), tables.weights(b, 0), rtol=few * 1.2e-7, atol=few * 1.2e-7)
    assert torch.allclose(tables.state(a, 0), tables.state(b, 0), rtol=few * 1.2e-7, atol=few * 1.2e-7)
