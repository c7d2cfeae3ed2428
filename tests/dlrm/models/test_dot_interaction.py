"""The dot interaction and the factorisation machine against their definitions."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dlrm.models.interaction import (
    dot_interaction,
    dot_interaction_reference,
    fm_interaction,
    native_interaction,
    padded_width,
)

SHAPES = [(1, 1, 1), (3, 1, 4), (2, 2, 3), (5, 7, 16), (4, 26, 64), (3, 33, 20), (2, 40, 65), (7, 3, 128)]
needs_native = pytest.mark.skipif(not native_interaction(), reason="the native kernels are not built")


def inputs(batch: int, features: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * 1000 + features * 10 + dim)
    dense = torch.randn(batch, dim, generator=generator)
    return dense.to(dtype), torch.randn(batch, features * dim, generator=generator)


def by_definition(dense: Tensor | None, sparse: Tensor, dim: int) -> Tensor:
    """A double loop over pairs in fp64."""
    vectors = [] if dense is None else [dense.double()]
    vectors += list(sparse.double().split(dim, dim=1))
    columns = [] if dense is None else [dense.double()]
    columns += [(vectors[i] * vectors[j]).sum(1, keepdim=True) for i in range(len(vectors)) for j in range(i)]
    return torch.cat(columns, dim=1) if columns else sparse[:, :0].double()


@pytest.mark.parametrize(("batch", "features", "dim"), SHAPES)
@pytest.mark.parametrize("with_dense", [True, False])
@pytest.mark.parametrize("function", [dot_interaction, dot_interaction_reference])
def test_values_follow_the_definition(function, batch: int, features: int, dim: int, with_dense: bool) -> None:
    dense, sparse = inputs(batch, features, dim)
    expected = by_definition(dense if with_dense else None, sparse, dim)
    actual = function(dense if with_dense else None, sparse, dim)
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6 * dim**0.5)


@needs_native
@pytest.mark.parametrize(("batch", "features", "dim"), SHAPES)
@pytest.mark.parametrize("with_dense", [True, False])
def test_native_gradients_are_those_of_the_definition(batch: int, features: int, dim: int, with_dense: bool) -> None:
    dense, sparse = inputs(batch, features, dim)
    leaves = [dense.requires_grad_(), sparse.requires_grad_()] if with_dense else [sparse.requires_grad_()]
    first = dense if with_dense else None
    out = dot_interaction(first, sparse, dim)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    actual = torch.autograd.grad(out, leaves, grad)
    expected = torch.autograd.grad(by_definition(first, sparse, dim), leaves, grad.double())
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6 * features)


def test_reference_passes_gradcheck() -> None:
    dense, sparse = inputs(3, 4, 5)
    args = (dense.double().requires_grad_(), sparse.double().requires_grad_())
    assert torch.autograd.gradcheck(lambda d, s: dot_interaction(d, s, 5), args)


@needs_native
def test_bits_do_not_depend_on_threads() -> None:
    dense, sparse = inputs(501, 26, 64)
    dense.requires_grad_()
    sparse.requires_grad_()
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = dot_interaction(dense, sparse, 64)
            results.append((out.detach(), *torch.autograd.grad(out.square().sum(), (dense, sparse))))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_native
def test_a_sample_does_not_depend_on_its_batch() -> None:
    dense, sparse = inputs(37, 5, 24)
    whole = dot_interaction(dense, sparse, 24)
    assert torch.equal(whole[11:20], dot_interaction(dense[11:20], sparse[11:20], 24))


@needs_native
@pytest.mark.parametrize("slicing", ["columns", "transposed", "expanded"])
def test_strided_inputs(slicing: str) -> None:
    dense, sparse = inputs(6, 4, 8)
    if slicing == "columns":
        dense, sparse = torch.cat([dense, dense], 1)[:, 3:11], torch.cat([sparse, sparse], 1)[:, 5:37]
    elif slicing == "transposed":
        dense, sparse = dense.t().contiguous().t(), sparse.t().contiguous().t()
    else:
        dense, sparse = dense[:1].expand(6, 8), sparse[:1].expand(6, 32)
    expected = dot_interaction(dense.contiguous(), sparse.contiguous(), 8)
    assert torch.equal(dot_interaction(dense, sparse, 8), expected)
    d, s = dense.detach().requires_grad_(), sparse.detach().requires_grad_()
    grad = torch.randn(expected.shape[::-1]).t()
    actual = torch.autograd.grad(dot_interaction(d, s, 8), (d, s), grad)
    contiguous = [x.detach().contiguous().requires_grad_() for x in (dense, sparse)]
    wanted = torch.autograd.grad(dot_interaction(*contiguous, 8), contiguous, grad.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(actual, wanted, strict=True))


@needs_native
def test_output_rows_are_padded_not_its_shape() -> None:
    dense, sparse = inputs(4, 26, 64)
    out = dot_interaction(dense, sparse, 64)
    assert out.shape == (4, 415)
    assert out.stride() == (padded_width(415), 1) == (416, 1)


@needs_native
def test_bf16_dense_part() -> None:
    dense, sparse = inputs(9, 26, 64, torch.bfloat16)
    out = dot_interaction(dense, sparse, 64)
    assert out.dtype == torch.bfloat16
    expected = dot_interaction(dense.float(), sparse, 64)
    assert torch.equal(out, expected.to(torch.bfloat16))
    d, s = dense.clone().requires_grad_(), sparse.clone().requires_grad_()
    grad = torch.randn(out.shape).to(torch.bfloat16)
    got = torch.autograd.grad(dot_interaction(d, s, 64), (d, s), grad)
    d32, s32 = dense.float().requires_grad_(), sparse.clone().requires_grad_()
    wanted = torch.autograd.grad(dot_interaction(d32, s32, 64), (d32, s32), grad.float())
    assert got[0].dtype == torch.bfloat16
    assert torch.equal(got[0], wanted[0].to(torch.bfloat16))
    assert got[1].dtype == torch.float32
    assert torch.equal(got[1], wanted[1])


@needs_native
def test_bf16_rounding_of_special_values() -> None:
    special = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0 + 2**-8, 1.0 + 3 * 2**-8, 3.3895e38, -0.0]])
    sparse = torch.cat([special, torch.zeros_like(special)], dim=1)
    out = dot_interaction(special.to(torch.bfloat16), sparse, 7)
    assert torch.equal(out[:, :7].view(torch.int16), special.to(torch.bfloat16).view(torch.int16))
    one = torch.ones(7, 1, dtype=torch.bfloat16)
    products = dot_interaction(one, special.t().contiguous(), 1)[:, 1]
    assert torch.equal(products.isnan(), special[0].isnan())
    assert torch.equal(products[1:], special[0, 1:].to(torch.bfloat16))


@needs_native
def test_non_finite_values_stay_in_their_sample() -> None:
    dense, sparse = inputs(3, 5, 8)
    sparse[1, 9] = float("nan")
    out = dot_interaction(dense, sparse, 8)
    assert torch.isfinite(out[[0, 2]]).all()
    assert torch.isnan(out[1]).sum() == 5  # vector 2 meets five others


@pytest.mark.parametrize("with_dense", [True, False])
def test_empty_batch(with_dense: bool) -> None:
    dense, sparse = torch.zeros(0, 8, requires_grad=True), torch.zeros(0, 24, requires_grad=True)
    out = dot_interaction(dense if with_dense else None, sparse, 8)
    assert out.shape == (0, 14 if with_dense else 3)
    out.sum().backward()
    assert sparse.grad is not None
    assert sparse.grad.shape == (0, 24)


def test_one_vector_has_no_pairs() -> None:
    assert dot_interaction(None, torch.ones(3, 4), 4).shape == (3, 0)
    assert torch.equal(dot_interaction(torch.ones(3, 4), torch.ones(3, 0), 4), torch.ones(3, 4))


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sparse must be \[B, F \* 4\], got \[2, 10\]"):
        dot_interaction(None, torch.zeros(2, 10), 4)
    with pytest.raises(ValueError, match=r"dense must be \[2, 4\], got \[3, 4\]"):
        dot_interaction(torch.zeros(3, 4), torch.zeros(2, 8), 4)


@needs_native
def test_operator_passes_torchs_own_checks() -> None:
    dense, sparse = inputs(3, 4, 8)
    for first in (dense, None):
        leaf = first.clone().requires_grad_() if first is not None else None
        torch.library.opcheck(torch.ops.embcache.dot_interaction, (leaf, sparse.clone().requires_grad_(), 8))


@needs_native
def test_compiles_without_graph_breaks() -> None:
    dense, sparse = inputs(6, 4, 8)

    def function(d: Tensor, s: Tensor) -> Tensor:
        return dot_interaction(d * 2.0, s, 8).relu()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    args = dense.requires_grad_(), sparse.requires_grad_()
    expected = torch.autograd.grad(function(*args).sum(), args)
    actual = torch.autograd.grad(compiled(*args).sum(), args)
    assert torch.equal(compiled(*args), function(*args))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_fm_is_the_sum_over_pairs() -> None:
    fields = torch.randn(5, 6, 7, dtype=torch.float64, requires_grad=True)
    pairs = [(fields[:, i] * fields[:, j]).sum(1) for i, j in itertools.combinations(range(6), 2)]
    expected = torch.stack(pairs, 1).sum(1, keepdim=True)
    torch.testing.assert_close(fm_interaction(fields), expected)
    assert torch.autograd.gradcheck(fm_interaction, (fields,))
    assert torch.equal(fm_interaction(fields[:, :1]), torch.zeros(5, 1, dtype=torch.float64))
    assert fm_interaction(fields[:0]).shape == (0, 1)


@needs_native
@pytest.mark.parametrize(("batch", "features", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set_gives_the_same_bits(batch: int, features: int, dim: int, dtype: torch.dtype) -> None:
    from embcache.kernels import native

    dense, sparse = inputs(batch, features, dim, dtype)
    results, before = [], native.isa()
    try:
        for isa in native.isas():
            native.set_isa(isa)
            out = torch.ops.embcache.dot_interaction(dense, sparse, dim)
            grads = torch.ops.embcache.dot_interaction_backward(out, dense, sparse, dim)
            results.append([t.contiguous().view(torch.uint8) for t in (out, *grads)])
    finally:
        native.set_isa(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
