"""Every rule, through the modules, against an fp64 restatement of its formula: tolerance, corners, equivalences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import embcache as ec
from embcache import optim
from embcache.errors import BadConfig

Oracle = Callable[[dict[str, Any], int, Tensor, Tensor], Tensor]


class Row:
    """fp64 weights and state of touched rows; one method a rule, written from the formulas."""

    def __init__(self, rule: optim.Rule, w: Tensor, state: Tensor) -> None:
        self.rule, self.w, self.s = rule, w.double(), state.double()

    def step(self, t: int, g: Tensor) -> Tensor:
        getattr(self, type(self.rule).__name__)(self.rule, t, g.double())
        return self.w

    def SGD(self, r: Any, t: int, g: Tensor) -> None:
        self.w = self.w - r.lr * (g + r.weight_decay * self.w)

    def Adagrad(self, r: Any, t: int, g: Tensor) -> None:
        self.s = self.s + g**2
        self.w = self.w - divide(r.lr * g, self.s.sqrt() + r.eps)

    def RowWiseAdagrad(self, r: Any, t: int, g: Tensor) -> None:
        l2, decoupled = r.weight_decay_mode == "l2", r.weight_decay_mode == "decoupled"
        used = g + r.weight_decay * self.w if l2 else g
        self.s = self.s + (used**2).mean(1, keepdim=True)
        mul = divide(torch.tensor(r.lr, dtype=torch.float64), (self.s / r.c).sqrt() + r.eps)
        k = 1 - mul * r.weight_decay if l2 else 1 - r.lr * r.weight_decay if decoupled else 1.0
        self.w = k * self.w - mul * g
        if r.max_norm > 0:
            norm = self.w.norm(dim=1, keepdim=True)
            self.w = torch.where(norm > r.max_norm, self.w * r.max_norm / norm, self.w)

    def _moments(self, r: Any, t: int, g: Tensor, square: Tensor) -> Tensor:
        dim = g.shape[1]
        wide = square.shape[1]
        m = r.beta1 * self.s[:, :dim] + (1 - r.beta1) * g
        v = r.beta2 * self.s[:, dim : dim + wide] + (1 - r.beta2) * square
        parts, steps = [m, v], torch.tensor(float(t), dtype=torch.float64)
        if r.per_row_step:
            steps = self.s[:, -1:] + 1
            parts.append(steps)
        self.s = torch.cat(parts, 1)
        return divide(m / (1 - r.beta1**steps), (v / (1 - r.beta2**steps)).sqrt() + r.eps)

    def Adam(self, r: Any, t: int, g: Tensor) -> None:
        self.w = self.w - r.lr * (self._moments(r, t, g, g**2) + r.weight_decay * self.w)

    def RowWiseAdam(self, r: Any, t: int, g: Tensor) -> None:
        self.w = self.w - r.lr * (self._moments(r, t, g, (g**2).mean(1, keepdim=True)) + r.weight_decay * self.w)

    def LAMB(self, r: Any, t: int, g: Tensor) -> None:
        u = self._moments(r, t, g, g**2) + r.weight_decay * self.w
        nw, nu = self.w.norm(dim=1, keepdim=True), u.norm(dim=1, keepdim=True)
        self.w = self.w - r.lr * torch.where((nw == 0) | (nu == 0), torch.ones_like(nw), nw / nu) * u

    def LARS(self, r: Any, t: int, g: Tensor) -> None:
        nw, ng = self.w.norm(dim=1, keepdim=True), g.norm(dim=1, keepdim=True)
        a = torch.where(nw == 0, r.lr, divide(r.lr * r.eta * nw, ng + r.weight_decay * nw))
        self.s = r.momentum * self.s + a * (g + r.weight_decay * self.w)
        self.w = self.w - self.s

    def FTRL(self, r: Any, t: int, g: Tensor) -> None:
        dim = g.shape[1]
        z, n = self.s[:, :dim], self.s[:, dim:]
        grown = n + g**2
        z = z + g - (grown.sqrt() - n.sqrt()) / r.lr * self.w
        self.s = torch.cat([z, grown], 1)
        new = divide(-(z - z.sign() * r.l1), (r.beta + grown.sqrt()) / r.lr + r.l2)
        self.w = torch.where(z.abs() <= r.l1, torch.zeros_like(z), new)


def divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, torch.zeros_like(a * b), a / b)


RULES: list[optim.Rule] = [
    optim.SGD(lr=0.1),
    optim.SGD(lr=0.1, weight_decay=0.01),
    optim.Adagrad(lr=0.1, initial_accumulator_value=0.3),
    optim.RowWiseAdagrad(lr=0.1),
    optim.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.2, weight_decay=0.05),
    optim.RowWiseAdagrad(lr=0.1, weight_decay=0.05, weight_decay_mode="decoupled", c=2.0),
    optim.RowWiseAdagrad(lr=0.1, max_norm=0.3),
    optim.Adam(lr=0.1),
    optim.Adam(lr=0.1, weight_decay=0.1, beta1=0.5, beta2=0.9),
    optim.Adam(lr=0.1, per_row_step=True),
    optim.RowWiseAdam(lr=0.1, weight_decay=0.1),
    optim.RowWiseAdam(lr=0.1, per_row_step=True),
    optim.LAMB(lr=0.1, weight_decay=0.1),
    optim.LARS(lr=0.5, eta=0.5, weight_decay=0.1),
    optim.FTRL(lr=0.1, l1=0.01, l2=0.1),
    optim.FTRL(lr=0.1, initial_accumulator_value=0.5),
]
DIMS = [1, 3, 4, 7, 16, 64, 100, 128, 1000, 2048]
SOME = [1, 7, 100]


def tolerance(rule: optim.Rule) -> float:
    return 1e-5 if isinstance(rule, optim.Adam | optim.FTRL | optim.LARS) else 1e-6


def collection(rule: optim.Rule, dim: int, backend: str, rows: int = 12) -> ec.EmbeddingBagCollection:
    """Two tables with different constants in their state (offset mistakes show), one of them read by two features."""
    tables = [
        ec.TableConfig("a", rows, dim, features=["a1", "a2"], optimizer=rule, init=ec.init.Uniform(0.5)),
        ec.TableConfig("b", rows, dim + 3, features=["b"], pooling="mean", optimizer=rule, init=ec.init.Uniform(0.5)),
    ]
    ebc = ec.EmbeddingBagCollection(tables, backend=backend)
    if not isinstance(rule, optim.FTRL):
        for k, name in enumerate("ab"):
            ebc.store.state(name).fill_(0.0 if isinstance(rule, optim.Adam) and rule.per_row_step else 0.125 * (k + 1))
    return ebc


def batch(seed: int, bags: int = 4, rows: int = 12) -> ec.KeyedJaggedTensor:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, rows - 3, (3 * bags * 2,), generator=g)  # the last three rows stay untouched
    return ec.KeyedJaggedTensor(["a1", "a2", "b"], ids, lengths=torch.full((3 * bags,), 2))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_three_steps_against_fp64(backend: str, rule: optim.Rule) -> None:
    for dim in DIMS if backend == "native" else SOME:
        ebc = collection(rule, dim, backend)
        optimizer = ec.optim.SparseOptimizer(ebc)
        rows = {n: Row(rule, ebc.store.weight(n).clone(), ebc.store.state(n).clone()) for n in "ab"}
        first = {n: (ebc.store.weight(n).clone(), ebc.store.state(n).clone()) for n in "ab"}
        for t in range(1, 4):
            kjt = batch(t)
            out = ebc(kjt)
            g = torch.randn(out.values().shape, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
            out.values().backward(g.float())
            optimizer.step()
            check_against(ebc, rows, kjt, g.float().double(), t, rule)
        for n in "ab":
            touched = touched_rows(n)
            assert torch.equal(ebc.store.weight(n)[~touched], first[n][0][~touched])
            assert torch.equal(ebc.store.state(n)[~touched], first[n][1][~touched])


def touched_rows(name: str) -> Tensor:
    mask = torch.zeros(12, dtype=torch.bool)
    for t in range(1, 4):
        for feature in ("a1", "a2") if name == "a" else ("b",):
            mask[batch(t)[feature].values()] = True
    return mask


def check_against(
    ebc: ec.EmbeddingBagCollection, rows: dict[str, Row], kjt: Any, g: Tensor, t: int, rule: optim.Rule
) -> None:
    columns = dict(zip(ebc(kjt).keys(), torch.split(g, ebc._dims, dim=1), strict=True))
    for name, features, scale in (("a", ("a1", "a2"), 1.0), ("b", ("b",), 0.5)):
        row = rows[name]
        total = torch.zeros_like(row.w)
        seen = torch.zeros(12, dtype=torch.bool)
        for f in features:
            ids = kjt[f].values()
            total.index_add_(0, ids, scale * columns[f].repeat_interleave(2, 0))
            seen[ids] = True
        before_w, before_s = row.w, row.s
        row.step(t, total)
        row.w = torch.where(seen[:, None], row.w, before_w)
        row.s = torch.where(seen[:, None], row.s, before_s) if row.s.numel() else row.s
        ours = ebc.store.weight(name).double()
        size = torch.max(row.w.abs(), (row.w - before_w).abs()).amax(1, keepdim=True).clamp(min=1e-3)
        assert bool(((ours - row.w).abs() <= 3 * tolerance(rule) * size).all()), (rule, name, t)
        if row.s.numel():
            state = ebc.store.state(name).double()
            assert torch.allclose(state, row.s, rtol=1e-4, atol=1e-5), (rule, name, t)


@pytest.mark.parametrize(
    ("rule", "twin"),
    [
        (optim.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (optim.Adagrad(lr=0.1, eps=1e-10), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-10)),
        (optim.Adam(lr=0.1, eps=1e-15), lambda p: torch.optim.SparseAdam(p, lr=0.1, eps=1e-15)),  # eps sits elsewhere
    ],
)
def test_against_torchs_sparse_optimizers(backend: str, rule: optim.Rule, twin: Any) -> None:
    theirs = torch.nn.EmbeddingBag(40, 8, mode="sum", sparse=True)
    ours = ec.EmbeddingBag(40, 8, mode="sum", _weight=theirs.weight, optimizer=rule, backend=backend)
    a, b = ec.optim.SparseOptimizer(ours), twin(list(theirs.parameters()))
    for t in range(5):
        ids = torch.randint(0, 40, (16, 3), generator=torch.Generator().manual_seed(t))
        for module in (ours, theirs):
            module(ids).sin().sum().backward()
        a.step()
        b.step()
        b.zero_grad()
    assert torch.allclose(ours.weight, theirs.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [
    optim.Adagrad(lr=0.1, eps=0.0), optim.RowWiseAdagrad(lr=0.1, eps=0.0), optim.Adam(lr=0.1, eps=0.0),
    optim.RowWiseAdam(lr=0.1, eps=0.0), optim.LAMB(lr=0.1, eps=0.0), optim.LARS(lr=0.1), optim.SGD(lr=0.1),
], ids=repr)  # fmt: skip
def test_zero_gradient_without_eps_changes_nothing(backend: str, rule: optim.Rule) -> None:
    bag = ec.EmbeddingBag(5, 6, mode="sum", optimizer=rule, backend=backend)
    before = bag.weight.clone()
    optimizer = ec.optim.SparseOptimizer(bag)
    (bag(torch.tensor([[1, 2]])) * 0.0).sum().backward()
    optimizer.step()
    assert torch.equal(bag.weight, before)


@pytest.mark.parametrize("rule", [optim.LAMB(lr=0.1), optim.LARS(lr=0.1)], ids=repr)
def test_a_row_of_zeros_uses_ratio_one(backend: str, rule: optim.Rule) -> None:
    bag = ec.EmbeddingBag(5, 6, mode="sum", optimizer=rule, init=ec.init.Zeros(), backend=backend)
    optimizer = ec.optim.SparseOptimizer(bag)
    bag(torch.tensor([[1]])).sum().backward()
    optimizer.step()
    assert torch.allclose(bag.weight[1], torch.full((6,), -0.1), rtol=1e-5)
    assert torch.equal(bag.weight[2], torch.zeros(6))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_splitting_a_bag_and_reordering_ids_is_rounding_only(backend: str, rule: optim.Rule) -> None:
    def final(ids: list[int], lengths: list[int]) -> Tensor:
        bag = ec.EmbeddingBag(9, 6, mode="sum", optimizer=rule, seed=3, backend=backend)
        optimizer = ec.optim.SparseOptimizer(bag)
        offsets = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        bag(torch.tensor(ids), offsets).sum().backward()
        optimizer.step()
        return bag.weight.clone()

    whole = final([1, 5, 1, 3, 5, 1], [6])
    assert torch.allclose(whole, final([1, 5, 1, 3, 5, 1], [2, 4]), rtol=1e-6, atol=1e-7)
    assert torch.allclose(whole, final([3, 1, 1, 5, 5, 1], [6]), rtol=1e-6, atol=1e-7)


def test_row_wise_is_element_wise_for_a_constant_gradient(backend: str) -> None:
    weights = []
    for rule in (optim.Adagrad(lr=0.1), optim.RowWiseAdagrad(lr=0.1)):
        bag = ec.EmbeddingBag(9, 16, mode="sum", optimizer=rule, seed=3, backend=backend)
        optimizer = ec.optim.SparseOptimizer(bag)
        for _ in range(4):
            bag(torch.tensor([[1, 2, 2]])).sum().backward()
            optimizer.step()
        weights.append(bag.weight.clone())
    assert torch.allclose(weights[0], weights[1], rtol=1e-6)


def test_a_hundred_steps_of_fp16_move_by_their_sum(backend: str) -> None:
    """200 SGD steps of 1e-4, far below half a unit in the last place of 1.0, move the mean by 0.02."""
    bag = ec.EmbeddingBag(4, 512, mode="sum", dtype=torch.float16, init=ec.init.Constant(1.0), seed=1,
                          optimizer=optim.SGD(lr=1e-4), backend=backend)  # fmt: skip
    optimizer = ec.optim.SparseOptimizer(bag)
    for _ in range(200):
        bag(torch.tensor([[2]])).sum().backward()
        optimizer.step()
    assert abs(float(bag.weight[2].float().mean()) - 0.98) < 1e-3
    assert torch.equal(bag.weight[1], torch.ones(512, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_of_many_roundings_is_the_value(dtype: torch.dtype) -> None:
    from embcache.kernels import reference

    x = torch.tensor([[0.3, -1.7, 3e-6, 1e-3]]).expand(40_000, 4).contiguous()
    code = 1 if dtype == torch.bfloat16 else 2
    rounded = reference.round_stochastically(x, code, 77, torch.arange(40_000), 1)
    assert torch.equal(rounded.to(dtype).float(), rounded)
    mean, deviation = rounded.double().mean(0), rounded.double().std(0)
    assert bool(((mean - x[0].double()).abs() < 5 * deviation / math.sqrt(40_000)).all())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: optim.SGD(lr=-1.0), "optim.SGD: lr = -1.0, must be a finite number >= 0"),
        (lambda: optim.Adam(beta1=1.0), r"optim.Adam: beta1 = 1.0, must be in \[0, 1\)"),
        (lambda: optim.Adagrad(eps=float("nan")), "optim.Adagrad: eps = nan"),
        (lambda: optim.RowWiseAdagrad(weight_decay_mode="l1"), "weight_decay_mode = 'l1', must be one of"),
        (lambda: optim.RowWiseAdagrad(weight_decay=0.1, weight_decay_mode="none"), "weight_decay is set but"),
        (lambda: optim.RowWiseAdagrad(c=0.0), "c = 0.0, must be > 0"),
        (lambda: optim.FTRL(lr=0.0), "optim.FTRL: lr = 0.0, must be > 0"),
        (lambda: optim.LARS(momentum=1.5), "optim.LARS: momentum = 1.5"),
    ],
)
def test_bad_values_raise_when_written_down(build: Any, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        build()
