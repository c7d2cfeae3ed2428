"""SparseOptimizer as a torch optimizer: accumulation, losses, schedulers, GradScaler, freezing, skipping, resuming."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from jagged_twins import close, jagged
from torch.optim import lr_scheduler

import embcache as ec
from embcache.errors import (
    BadConfig,
    DoubleBackward,
    NonFiniteGradient,
    NoOptimizer,
    SchemaMismatch,
    StaleLookup,
    UnshardedReplicas,
)

TABLES = [
    ec.TableConfig("a", 30, 4, features=["a1", "a2"], optimizer=ec.optim.Adam(lr=0.1)),
    ec.TableConfig("b", 20, 8, features=["b"], pooling="mean", optimizer=ec.optim.RowWiseAdagrad(lr=0.2)),
]
FEATURES, ROWS = ["a1", "b", "a2"], [30, 20, 30]


def make(backend: str = "auto") -> tuple[ec.EmbeddingBagCollection, ec.optim.SparseOptimizer]:
    ebc = ec.EmbeddingBagCollection(TABLES, backend=backend)
    return ebc, ec.optim.SparseOptimizer(ebc)


def state(module: Any) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in module.store.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_several_losses_and_accumulation_equal_one_sum(backend: str) -> None:
    """Two backwards before one step give the bits of one backward of the concatenated batch."""
    whole, optimizer = make(backend)
    kjts = [jagged(FEATURES, ROWS, 6, seed=s) for s in range(3)]
    g = [torch.randn(6, 16, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    for kjt, grad in zip(kjts, g, strict=True):
        whole(kjt).values().backward(grad)
    optimizer.step()
    losses, optimizer2 = make(backend)
    outs = [losses(kjt).values() for kjt in kjts]
    sum((o * w).sum() for o, w in zip(reversed(outs), reversed(g), strict=True)).backward()  # type: ignore[union-attr]
    optimizer2.step()
    for key, tensor in state(whole).items():
        assert close(tensor, state(losses)[key], 1e-6)


def test_backward_twice_doubles(backend: str) -> None:
    bag = ec.EmbeddingBag(10, 4, optimizer=ec.optim.SGD(lr=1.0), mode="sum", backend=backend)
    optimizer = ec.optim.SparseOptimizer(bag)
    before = bag.weight[3].clone()
    loss = bag(torch.tensor([[3]])).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    assert torch.equal(bag.weight[3], before - 2)


def test_int32_int64_weighted_and_unpooled_calls_join(backend: str) -> None:
    store = ec.EmbeddingStore(
        [ec.TableConfig("t", 10, 4, optimizer=ec.optim.SGD(lr=1.0), init=ec.init.Zeros())], backend=backend
    )
    plain = ec.EmbeddingBagCollection(store.tables, store=store)
    weighted = ec.EmbeddingBagCollection(store.tables, is_weighted=True, store=store)
    optimizer = ec.optim.SparseOptimizer([plain, weighted])
    for dtype in (torch.int32, torch.int64):
        plain(ec.KeyedJaggedTensor(["t"], torch.tensor([1, 2], dtype=dtype), lengths=torch.tensor([2]))).values().sum(
        ).backward()  # fmt: skip
    kjt = ec.KeyedJaggedTensor(["t"], torch.tensor([2, 3]), torch.tensor([0.5, 2.0]), lengths=torch.tensor([2]))
    weighted(kjt).values().sum().backward()
    optimizer.step()
    assert store.weight("t")[:, 0].tolist() == [0, -2, -2.5, -2, 0, 0, 0, 0, 0, 0]


def test_strided_and_expanded_gradients(backend: str) -> None:
    """Gradients arrive as expanded, transposed or column slices of larger tensors; all mean the same numbers."""
    results = []
    for shape in range(4):
        ebc, optimizer = make(backend)
        out = ebc(jagged(FEATURES, ROWS, 6)).values()
        if shape == 0:
            out.sum().backward()
        elif shape == 1:
            torch.cat([torch.zeros(6, 5), out, torch.ones(6, 3)], 1).sum().backward()
        elif shape == 2:
            out.backward(torch.ones(16, 6).t())
        else:
            out.backward(torch.ones(6, 20)[:, 2:18])
        optimizer.step()
        results.append(state(ebc))
    assert all(equal(results[0], r) for r in results)


@pytest.mark.parametrize("schedule", [
    lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    lambda o: lr_scheduler.LambdaLR(o, [lambda e: 1 / (1 + e), lambda e: 1.0 + e]),
    lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.5, 0.3], total_steps=8, cycle_momentum=False),
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)], [2]),
])  # fmt: skip
def test_schedulers_of_torch_drive_the_rate(schedule: Any) -> None:
    """Constant gradients under SGD: the weights move by the sum of the scheduled rates, as torch's SGD's do."""
    tables = [ec.TableConfig(n, 4, 2, optimizer=ec.optim.SGD(lr=0.1), init=ec.init.Zeros()) for n in "ab"]
    ebc = ec.EmbeddingBagCollection(tables)
    ours = ec.optim.SparseOptimizer(ebc)
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    theirs = torch.optim.SGD([{"params": [p]} for p in params], lr=0.1)
    schedules = [schedule(ours), schedule(theirs)]
    for _ in range(6):
        kjt = ec.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 1]), lengths=torch.tensor([1, 1]))
        ebc(kjt).values().sum().backward()
        for p in params:
            p.grad = torch.ones(2)
        ours.step()
        theirs.step()
        for s in schedules:
            s.step()
    for name, p in zip("ab", params, strict=True):
        assert torch.allclose(ebc.store.weight(name)[1], p.detach(), rtol=1e-5)


def test_param_groups_are_tables() -> None:
    _, optimizer = make()
    assert [(g["name"], g["rule"], g["lr"]) for g in optimizer.param_groups] == [
        ("a", "Adam", 0.1), ("b", "RowWiseAdagrad", 0.2)]  # fmt: skip
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.param_groups[0]["beta1"] = 0.5
    assert "beta1: 0.5" in repr(optimizer)


def test_closure_and_hooks() -> None:
    ebc, optimizer = make()
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ebc(jagged(FEATURES, ROWS, 6)).values().sum()
        loss.backward()
        return loss

    before = state(ebc)
    with torch.no_grad():
        expected = float(ebc(jagged(FEATURES, ROWS, 6)).values().sum())
    assert float(optimizer.step(closure)) == expected
    assert seen == ["pre", "post"]
    assert not equal(before, state(ebc))


def test_step_without_gradient_and_zero_grad_change_nothing(backend: str) -> None:
    ebc, optimizer = make(backend)
    before = state(ebc)
    optimizer.step()
    ebc(jagged(FEATURES, ROWS, 6)).values().sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert equal(before, state(ebc))


def test_freezing(backend: str) -> None:
    ebc, optimizer = make(backend)
    ebc.freeze("a")
    before = state(ebc)
    ebc(jagged(FEATURES, ROWS, 6)).values().sum().backward()
    optimizer.step()
    after = state(ebc)
    assert torch.equal(before["a.weight"], after["a.weight"])
    assert torch.equal(before["a.state"], after["a.state"])
    assert not torch.equal(before["b.weight"], after["b.weight"])
    ebc.requires_grad_(False)
    assert not ebc(jagged(FEATURES, ROWS, 6)).values().requires_grad
    ebc.requires_grad_(True)
    assert ebc(jagged(FEATURES, ROWS, 6)).values().requires_grad
    with pytest.raises(BadConfig, match=r"no table 'x'; tables are \['a', 'b'\]"):
        ebc.freeze("x")


def test_backward_without_an_optimizer_raises_unless_frozen() -> None:
    ebc = ec.EmbeddingBagCollection(TABLES)
    with pytest.raises(NoOptimizer, match="table 'a', which no SparseOptimizer holds"):
        ebc(jagged(FEATURES, ROWS, 6)).values().sum().backward()
    optimizer = ec.optim.SparseOptimizer(ebc)
    with pytest.raises(BadConfig, match="already belong to another SparseOptimizer"):
        ec.optim.SparseOptimizer(ebc)
    del optimizer
    with pytest.raises(NoOptimizer):
        ebc(jagged(FEATURES, ROWS, 6)).values().sum().backward()
    ebc.freeze("a")
    with pytest.raises(NoOptimizer, match="table 'b'"):
        ebc(jagged(FEATURES, ROWS, 6)).values().sum().backward()
    with pytest.raises(BadConfig, match="holds no embedding table"):
        ec.optim.SparseOptimizer(torch.nn.Linear(2, 2))
    with pytest.raises(BadConfig, match="on_nonfinite = 'ignore'"):
        ec.optim.SparseOptimizer(ebc, on_nonfinite="ignore")


def poisoned(ebc: ec.EmbeddingBagCollection, value: float) -> torch.Tensor:
    out = ebc(jagged(FEATURES, ROWS, 6)).values()
    g = torch.ones_like(out)
    g[4, 10] = value  # columns 8..15 belong to feature b
    return (out * g).sum()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_raises_in_backward_and_refuses_the_step(backend: str, value: float) -> None:
    ebc, optimizer = make(backend)
    before = state(ebc)
    message = f"table 'b', feature 'b': gradient of bag 4, column 2 is {value}; the step is refused"
    with pytest.raises(NonFiniteGradient, match=message):
        poisoned(ebc, value).backward()
    with pytest.raises(FloatingPointError, match=message):
        optimizer.step()
    optimizer.zero_grad()
    assert equal(before, state(ebc))
    ebc(jagged(FEATURES, ROWS, 6)).values().sum().backward()
    optimizer.step()
    assert not equal(before, state(ebc))


def test_non_finite_skipped_or_allowed(backend: str) -> None:
    ebc = ec.EmbeddingBagCollection(TABLES, backend=backend)
    optimizer = ec.optim.SparseOptimizer(ebc, on_nonfinite="skip")
    before = state(ebc)
    ebc(jagged(FEATURES, ROWS, 6, seed=3)).values().sum().backward()
    poisoned(ebc, float("nan")).backward()
    optimizer.step()
    assert equal(before, state(ebc))
    assert optimizer.skipped_steps == 1
    ebc(jagged(FEATURES, ROWS, 6)).values().sum().backward()
    optimizer.step()
    assert not equal(before, state(ebc))
    loose = ec.EmbeddingBagCollection(TABLES, backend=backend)
    optimizer = ec.optim.SparseOptimizer(loose, on_nonfinite="allow")
    poisoned(loose, float("nan")).backward()
    optimizer.step()
    assert bool(loose.store.weight("b").isnan().any())


@pytest.mark.parametrize("explicit", [False, True])
def test_grad_scaler(backend: str, explicit: bool) -> None:
    """Scaled by a power of two, found infinite once, unscaled by the scaler or by hand: the bits of the plain run."""
    runs = []
    for scale in (None, 2.0**10):
        ebc = ec.EmbeddingBagCollection(TABLES, backend=backend)
        optimizer = ec.optim.SparseOptimizer(ebc, on_nonfinite="skip")
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None, growth_interval=1000)
        for step in range(4):
            out = ebc(jagged(FEATURES, ROWS, 6, seed=step)).values()
            loss = out.sum() * (float("inf") if step == 2 and scale else 1.0)
            if step == 2 and not scale:
                continue
            scaler.scale(loss).backward()
            if explicit:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        runs.append(state(ebc))
        if scale:
            assert scaler.get_scale() == scale / 2
    assert equal(*runs)


def test_double_backward_is_refused() -> None:
    ebc, optimizer = make()
    out = ebc(jagged(FEATURES, ROWS, 6)).values()
    with pytest.raises(DoubleBackward, match="create_graph=True"):
        torch.autograd.backward(out.sin().sum(), create_graph=True)
    optimizer.zero_grad()


def test_weight_gradient_after_the_update_raises(backend: str) -> None:
    ebc = ec.EmbeddingBagCollection(TABLES, is_weighted=True, backend=backend)
    optimizer = ec.optim.SparseOptimizer(ebc)
    kjt = jagged(FEATURES, ROWS, 6, weighted=True)
    kjt.weights().requires_grad_()
    late, early = ebc(kjt).values().sum(), ebc(kjt).values().sum()
    early.backward()
    optimizer.step()
    with pytest.raises(StaleLookup, match=r"call backward\(\) before step\(\)"):
        late.backward()


def test_state_dict_resumes_in_bits(backend: str) -> None:
    def run(ebc: Any, optimizer: Any, steps: range) -> None:
        for s in steps:
            ebc(jagged(FEATURES, ROWS, 6, seed=s)).values().sin().sum().backward()
            optimizer.step()

    straight, optimizer = make(backend)
    run(straight, optimizer, range(6))
    first, optimizer1 = make(backend)
    optimizer1.param_groups[1]["lr"] = 0.2
    run(first, optimizer1, range(3))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer1.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second, optimizer2 = make(backend)
    second.load_state_dict(saved["model"])
    optimizer2.load_state_dict(saved["optimizer"])
    run(second, optimizer2, range(3, 6))
    a, b = state(straight), state(second)
    assert all(torch.equal(a[k], b[k]) for k in a if not k.endswith("written"))
    third = ec.EmbeddingBagCollection([TABLES[0]])
    with pytest.raises(SchemaMismatch, match=r"tables and rules of the optimizer: saved .*declared"):
        ec.optim.SparseOptimizer(third).load_state_dict(saved["optimizer"])


def test_store_state_dict_round_trip(backend: str) -> None:
    ebc, optimizer = make(backend)
    ebc(jagged(FEATURES, ROWS, 6)).values().sum().backward()
    with pytest.raises(BadConfig, match=r"gradients are waiting for step\(\)"):
        ebc.store.state_dict()
    optimizer.step()
    other, _ = make(backend)
    other.store.load_state_dict(ebc.store.state_dict())
    assert equal(state(other), state(ebc))
    assert other.store.steps == [1, 1]
    saved = copy.copy(ebc.store.state_dict())
    saved["a.weight"] = saved["a.weight"][:5]
    with pytest.raises(SchemaMismatch, match=r"a.weight: saved \(\(5, 4\).*declared"):
        other.store.load_state_dict(saved)
    assert equal(state(other), state(ebc))


def test_weights_of_a_frozen_table_still_get_a_gradient(backend: str) -> None:
    ebc = ec.EmbeddingBagCollection(TABLES, is_weighted=True, backend=backend)
    ebc.freeze()
    kjt = jagged(FEATURES, ROWS, 6, weighted=True)
    kjt.weights().requires_grad_()
    ebc(kjt).values().sum().backward()
    rows = torch.cat([ebc.store.weight("b" if f == "b" else "a")[kjt[f].values()].sum(1) / (
        torch.repeat_interleave(kjt[f].lengths(), kjt[f].lengths()) if f == "b" else 1) for f in FEATURES])  # fmt: skip
    assert close(kjt.weights().grad, rows, 1e-6)
    assert not ebc.store.pending_tables()


def test_recomputed_forwards_and_autocast(backend: str) -> None:
    """Activation checkpointing runs the forward twice, autocast lowers what follows; the update is the plain one's."""
    from torch.utils.checkpoint import checkpoint

    runs = []
    for way in range(3):
        ebc, optimizer = make(backend)
        kjt = jagged(FEATURES, ROWS, 6)
        if way == 0:
            ebc(kjt).values().sin().sum().backward()
        elif way == 1:
            x = torch.zeros(1, requires_grad=True)
            checkpoint(lambda y, m=ebc, b=kjt: (m(b).values() + y).sin().sum(), x, use_reentrant=False).backward()
        else:
            with torch.autocast("cpu", torch.bfloat16):
                out = ebc(kjt).values()
                assert out.dtype == torch.float32
                out.sin().sum().backward()
        optimizer.step()
        runs.append(state(ebc))
    assert equal(runs[0], runs[1])
    assert equal(runs[0], runs[2])


def test_a_batch_staged_for_reading_cannot_be_trained_on() -> None:
    ebc, optimizer = make()
    with torch.no_grad():
        handle = ebc.stage(jagged(FEATURES, ROWS, 6))
    with pytest.raises(StaleLookup, match="staged for reading only"):
        ebc(handle).values().sum().backward()
    optimizer.step()
    with torch.inference_mode():
        assert not ebc(jagged(FEATURES, ROWS, 6)).values().requires_grad


def test_two_stores_step_together_or_not_at_all(backend: str) -> None:
    bags = [ec.EmbeddingBag(9, 4, mode="sum", name=n, optimizer=ec.optim.SGD(1.0), backend=backend) for n in "ab"]
    model = torch.nn.ModuleList(bags)
    optimizer = ec.optim.SparseOptimizer(model, on_nonfinite="skip")
    optimizer.param_groups[1]["lr"] = torch.tensor(2.0)
    before = [bag.weight.clone() for bag in bags]
    ids = torch.tensor([[3]])
    bags[0](ids).sum().backward()
    (bags[1](ids) * float("inf")).sum().backward()
    optimizer.step()
    assert all(torch.equal(bag.weight, w) for bag, w in zip(bags, before, strict=True))
    sum(bag(ids).sum() for bag in bags).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert torch.equal(bags[0].weight[3], before[0][3] - 1)
    assert torch.equal(bags[1].weight[3], before[1][3] - 2)


def test_ids_or_gradients_changed_before_the_step_are_refused() -> None:
    """Both are kept, not copied: overwriting them would train other rows, or by other numbers, without a word."""
    ebc, optimizer = make()
    before = state(ebc)
    kjt = jagged(FEATURES, ROWS, 6)
    ebc(kjt).values().sum().backward()
    kjt.values().zero_()
    with pytest.raises(StaleLookup, match="ids of a batch were changed in place"):
        optimizer.step()
    optimizer.zero_grad()
    g = torch.ones(6, 16)
    ebc(jagged(FEATURES, ROWS, 6)).values().backward(g)
    g.mul_(2)
    with pytest.raises(StaleLookup, match="gradient given to backward"):
        optimizer.step()
    optimizer.zero_grad()
    assert equal(before, state(ebc))


def test_unsharded_step_refused_at_world_size_two(monkeypatch: pytest.MonkeyPatch) -> None:
    ebc, optimizer = make()
    before = state(ebc)
    ebc(jagged(FEATURES, ROWS, 6)).values().sum().backward()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UnshardedReplicas, match="world size 2"):
        optimizer.step()
    optimizer.zero_grad()
    assert equal(before, state(ebc))


def test_same_bits_for_one_and_two_threads(backend: str) -> None:
    kjts = [jagged(FEATURES, ROWS, 200, longest=40, seed=s) for s in range(3)]
    hot = ec.KeyedJaggedTensor(FEATURES, torch.full((150_000,), 7), lengths=torch.full((600,), 250))
    runs = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            ebc, optimizer = make(backend)
            for kjt in [*kjts, hot]:
                ebc(kjt).values().sin().sum().backward()
                optimizer.step()
            runs.append(state(ebc))
    finally:
        torch.set_num_threads(threads)
    assert equal(*runs)


def test_backends_agree(backend: str) -> None:
    ours, optimizer = make(backend)
    oracle, optimizer2 = make("reference")
    for s in range(4):
        for module, own in ((ours, optimizer), (oracle, optimizer2)):
            module(jagged(FEATURES, ROWS, 9, seed=s)).values().sin().sum().backward()
            own.step()
    a, b = state(ours), state(oracle)
    assert all(close(a[k], b[k], 1e-5) for k in a)
    assert torch.equal(a["a.written"], b["a.written"])


def test_adams_clock_is_the_optimizers_step_also_where_a_table_gets_no_gradient() -> None:
    rule = ec.optim.Adam(lr=0.1, eps=0.0)
    tables = [ec.TableConfig(name, 4, 1, optimizer=rule, init=ec.init.Constant(0.0)) for name in ("a", "b")]
    store = ec.EmbeddingStore(tables)

    def step(name: str) -> None:
        batch = ec.KeyedJaggedTensor([name], torch.tensor([2]), lengths=torch.tensor([1]))
        with store.stage(batch, (name,)) as handle:
            store.update(handle, {name: torch.ones(1, 1)})
        store.step()

    for _ in range(3):
        step("a")
    step("b")
    # step 4 of the optimizer, first gradient of the row: mhat = .1 / (1 - .9^4), vhat = .001 / (1 - .999^4)
    expected = -0.1 * (0.1 / (1 - 0.9**4)) / (0.001 / (1 - 0.999**4)) ** 0.5
    assert store.steps == [4, 4]
    assert abs(float(store.weight("b")[2]) - expected) < 1e-6
