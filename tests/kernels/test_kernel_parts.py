"""Tables that are some columns of a wider one: together they hold what the wider one holds, on every backend."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import kernel_problems as kp
import pytest
import torch
from kernel_problems import NO_TENSOR, Tables, hyper_row
from test_kernel_rules import RULES
from torch import Tensor

from embcache import init
from embcache.kernels import get, rules

CUTS = {1: [0, 1], 7: [0, 3, 4, 7], 70: [0, 1, 66, 70], 130: [0, 5, 69, 130]}
STATS = ("row_wise", "row_wise_l2", "row_wise_decoupled", "row_wise_max_norm", "row_wise_c", "row_wise_adam",
         "row_wise_adam_row_steps", "lamb", "lamb_row_steps", "lars")  # fmt: skip


class Split:
    """The columns of table 0 of `tables`, cut into tables of their own."""

    def __init__(self, tables: Tables, cuts: list[int]) -> None:
        self.cuts, self.tables = list(pairwise(cuts)), tables
        dim = tables.dims[0]
        self.wide = rules.state_floats(tables.rule, 1, 0) - rules.state_floats(tables.rule, 0, 0)
        self.slabs, self.described = [], []
        for first, last in self.cuts:
            d = last - first
            part = Tables([d], tables.rule, dtype=tables.dtype, flags=tables.flags, capacity=tables.capacity)
            slab = part.slabs[0]
            w, s = tables.weights(tables.slabs, 0), tables.state(tables.slabs, 0)
            part.weights([slab], 0)  # the view below is in the table's dtype
            slab.view(kp.DTYPES[tables.dtype])[:, :d] = w[:, first:last].to(kp.DTYPES[tables.dtype])
            state = part.state([slab], 0)
            state[:, : self.wide * d] = torch.cat(
                [s[:, k * dim + first : k * dim + last] for k in range(self.wide)] or [s[:, :0]], 1
            )
            state[:, self.wide * d :] = s[:, self.wide * dim :]
            self.slabs.append(slab)
            self.described.append(part.described.clone())
            self.described[-1][0, 4] = tables.described[0, 4]
            self.described[-1][0, 6], self.described[-1][0, 7] = first, dim

    def joined(self) -> tuple[Tensor, Tensor]:
        """(weights [n, dim], state) as the whole table has them; scalars must be the same in every part."""
        weights, states, scalars = [], [[] for _ in range(self.wide)], []
        for slab, described in zip(self.slabs, self.described, strict=True):
            d, offset = int(described[0, 0]), int(described[0, 2])
            weights.append(slab.view(kp.DTYPES[self.tables.dtype])[:, :d].float())
            state = slab.view(torch.float32)[:, offset // 4 :]
            for k in range(self.wide):
                states[k].append(state[:, k * d : (k + 1) * d])
            scalars.append(state[:, self.wide * d :])
        assert all(torch.equal(scalars[0], other) for other in scalars)
        return torch.cat(weights, 1), torch.cat([*(block for each in states for block in each), scalars[0]], 1)

    def step(self, kernels: ModuleType, hyper: list[float], slots: Tensor, grads: Tensor, ids: Tensor) -> None:
        """One step, sums exchanged as the rule asks for them."""
        h = torch.tensor([hyper], dtype=torch.float64)
        cut = [grads[:, first:last].contiguous() for first, last in self.cuts]
        before = [slab.clone() for slab in self.slabs]

        def total(given: Tensor | None) -> Tensor:
            sums = torch.zeros(slots.numel(), 3)
            for slab, described, g in zip(self.slabs, self.described, cut, strict=True):
                sums = sums + kernels.row_sums(slab, described, h, slots, g, given)
            return sums

        given = total(None)
        given[:, 2] = total(given)[:, 2]
        assert all(torch.equal(a, b) for a, b in zip(self.slabs, before, strict=True))
        for slab, described, g in zip(self.slabs, self.described, cut, strict=True):
            kernels.apply_rows(slab, NO_TENSOR.to(torch.uint8), described, h, slots, g, given, ids)


def whole_step(kernels: ModuleType, tables: Tables, hyper: list[float], slots: Tensor, g: Tensor, ids: Tensor) -> None:
    h = torch.tensor([hyper], dtype=torch.float64)
    features = torch.tensor([[0, 0, 0, slots.numel(), 0, 0, tables.dims[0]]])
    kernels.fused_update(tables.slabs, [NO_TENSOR.to(torch.uint8)], tables.described,
                         h, features, slots, None, None, [g], [ids])  # fmt: skip


@pytest.mark.parametrize("dim", CUTS)
@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("name", RULES)
def test_parts_hold_what_the_whole_table_holds(backend: ModuleType, name: str, dim: int, dtype: int) -> None:
    rule, flags, changes = RULES[name]
    tables = Tables([dim], rule, dtype=dtype, flags=flags | (1 if dtype else 0), capacity=12, seed=dim)
    split = Split(tables, CUTS[dim])
    ids = torch.arange(12) * 2**33 - 7
    generator = torch.Generator().manual_seed(3)
    for step in range(3):
        slots = torch.randperm(12, generator=generator)[:5]
        g = torch.randn(5, dim, generator=generator)
        hyper = hyper_row(**changes, step=step + 1.0)
        whole_step(backend, tables, hyper, slots, g, ids)
        split.step(backend, hyper, slots, g, ids)
    w, s = split.joined()
    if name not in STATS:
        assert torch.equal(w, tables.weights(tables.slabs, 0))
        assert torch.equal(s, tables.state(tables.slabs, 0))
    else:  # 16-bit weights: a value on the edge may round to the other side
        assert torch.allclose(w, tables.weights(tables.slabs, 0), rtol=(1e-6, 1.6e-2, 2e-3)[dtype], atol=1e-6)
        assert torch.allclose(s, tables.state(tables.slabs, 0), rtol=1e-5 if dtype == 0 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("name", STATS)
def test_bits_are_equal_where_sums_are_exact(backend: ModuleType, name: str) -> None:
    rule, flags, changes = RULES[name]
    tables = Tables([70], rule, flags=flags, capacity=9)
    tables.slabs[0].view(torch.float32)[:, :70] = torch.arange(9 * 70).view(9, 70) % 5 - 2.0
    tables.state(tables.slabs, 0)[:] = 0
    split = Split(tables, CUTS[70])
    slots, g = torch.tensor([8, 0, 3]), (torch.arange(210) % 7 - 3.0).view(3, 70)
    hyper = hyper_row(**{**changes, "wd": 0.0, "max_norm": 2.0 if rule == kp.ROW_WISE else 0.0, "lr": 0.25, "eps": 1.0})
    if rule == kp.LAMB:  # |r| is of the quotient's rounding: with moments of one value a row it is exact
        g = torch.tensor([[1.0], [2.0], [4.0]]).expand(3, 70).contiguous()
        hyper = hyper_row(lr=0.25, eps=0.0)
    whole_step(backend, tables, hyper, slots, g, NO_TENSOR)
    split.step(backend, hyper, slots, g, NO_TENSOR)
    w, s = split.joined()
    if name == "row_wise_max_norm" or (rule == kp.ROW_WISE and hyper[11] > 0):  # squares of the new row are not exact
        assert torch.allclose(w, tables.weights(tables.slabs, 0), rtol=1e-6)
    else:
        assert torch.equal(w, tables.weights(tables.slabs, 0))
    assert torch.equal(s, tables.state(tables.slabs, 0))


@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("name", RULES)
def test_whole_rows_are_those_of_the_fused_update(backend: ModuleType, name: str, dtype: int) -> None:
    rule, flags, changes = RULES[name]
    tables = Tables([33], rule, dtype=dtype, flags=flags | 1, capacity=700)
    slots = torch.randperm(700, generator=torch.Generator().manual_seed(0))[:600]
    g, hyper = torch.randn(600, 33, generator=torch.Generator().manual_seed(1)), hyper_row(**changes)
    slab, written = tables.slabs[0].clone(), torch.zeros(88, dtype=torch.uint8)
    backend.apply_rows(slab, written, tables.described, torch.tensor([hyper], dtype=torch.float64), slots, g, None,
                       NO_TENSOR)  # fmt: skip
    whole_step(backend, tables, hyper, slots, g, NO_TENSOR)
    assert torch.equal(slab, tables.slabs[0])
    bits = (written[:, None] >> torch.arange(8) & 1).reshape(-1)
    assert bits.nonzero().flatten().tolist() == sorted(slots.tolist())


@pytest.mark.parametrize("name", STATS)
def test_sums_are_those_of_plain_torch(backend: ModuleType, name: str) -> None:
    rule, flags, changes = RULES[name]
    tables = Tables([50], rule, flags=flags, capacity=40)
    described = tables.described.clone()
    described[0, 6:] = torch.tensor([9, 100])
    slots, g = torch.arange(40), torch.randn(40, 50, generator=torch.Generator().manual_seed(5))
    hyper, given = torch.tensor([hyper_row(**changes)], dtype=torch.float64), torch.rand(40, 3) + 0.5
    for sums in (None, given):
        found, wanted = (
            kernels.row_sums(tables.slabs[0], described, hyper, slots, g, sums)
            for kernels in (backend, get("reference"))
        )
        assert torch.allclose(found, wanted, rtol=1e-6)
        assert bool((found[:, 0] > 0).all())
        assert bool((found[:, 1] > 0).all()) == (rule in (kp.LAMB, kp.LARS))
        assert bool((found[:, 2] > 0).all()) == ("max_norm" in changes)
    nothing = backend.row_sums(tables.slabs[0], described, hyper, slots[:0], g[:0], given[:0])
    assert nothing.shape == (0, 3)


@pytest.mark.parametrize(("code", "p0", "p1"), [(0, 0.5, 0.0), (1, 0.1, 2.0), (2, 1.5, 0.25), (3, 1.0, 0.0)])
@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("dim", CUTS)
def test_initial_rows_of_parts(backend: ModuleType, code: int, p0: float, p1: float, dtype: int, dim: int) -> None:
    ids = torch.tensor([0, -1, 2**63 - 1, -(2**63), 12345])
    wanted = init.values(code, p0, p1, 77, ids, dim)
    for first, last in pairwise(CUTS[dim]):
        d = last - first
        assert torch.equal(init.values(code, p0, p1, 77, ids, d, None, first), wanted[:, first:last])
        offset = -(-d * kp.DTYPES[dtype].itemsize // 4) * 4
        slab = torch.zeros(5, offset + 8, dtype=torch.uint8)
        state = torch.tensor([0.25, 3.0])
        backend.init_rows(slab, torch.arange(5), ids, 0, d, dtype, offset, code, p0, p1, 77, state,
                          init.normal_table(), first)  # fmt: skip
        assert torch.equal(slab.view(kp.DTYPES[dtype])[:, :d], wanted[:, first:last].to(kp.DTYPES[dtype]))
        assert torch.equal(slab.view(torch.float32)[:, offset // 4 :], state.expand(5, 2))
