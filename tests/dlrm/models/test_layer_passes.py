"""The C++ passes around the products (bias, ReLU, their gradients) against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from embcache import kernels

kernels.get("auto")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.embcache, "bias_relu_"), reason="the native kernels are not built"
)

SHAPES = [(1, 1), (3, 5), (130, 16), (300, 33), (128, 64), (257, 7)]
DTYPES = [torch.float32, torch.bfloat16]


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int = 0, stride: int | None = None) -> Tensor:
    x = torch.randn(rows, stride or columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x[:, :columns]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("gap", [0, 3])
def test_bias_and_relu(rows: int, columns: int, dtype: torch.dtype, relu: bool, gap: int) -> None:
    x = matrix(rows, columns, dtype, stride=columns + gap)
    bias = matrix(1, columns, torch.float32, 1)[0].contiguous()
    expected = x.float() + bias
    expected = (expected.relu() if relu else expected).to(dtype)
    torch.ops.embcache.bias_relu_(x, bias, relu)
    assert torch.equal(x, expected)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gap", [0, 3])
def test_mask_and_bias_gradient(rows: int, columns: int, dtype: torch.dtype, gap: int) -> None:
    grad = matrix(rows, columns, dtype, stride=columns + gap)
    output = matrix(rows, columns, dtype, 1).relu()
    into = torch.empty(rows, columns, dtype=dtype)
    expected = grad * (output > 0)
    total = torch.ops.embcache.relu_backward(grad, output, into)
    assert torch.equal(into, expected)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), expected.double().sum(0), rtol=1e-5, atol=1e-5)
    unmasked = torch.ops.embcache.relu_backward(grad, None, into)
    torch.testing.assert_close(unmasked.double(), grad.double().sum(0), rtol=1e-5, atol=1e-5)
    assert torch.equal(into, expected)


def test_in_place_mask() -> None:
    grad, output = matrix(9, 20, torch.float32), matrix(9, 20, torch.float32, 1)
    expected = grad * (output > 0)
    torch.ops.embcache.relu_backward(grad, output, grad)
    assert torch.equal(grad, expected)


def test_expanded_gradient() -> None:
    grad = torch.randn(1, 20).expand(300, 20)
    total = torch.ops.embcache.relu_backward(grad, None, grad)
    torch.testing.assert_close(total, grad[0] * 300, rtol=1e-5, atol=0.0)


def test_nan_is_not_hidden() -> None:
    x = torch.tensor([[float("nan"), -1.0, float("inf"), -0.0]])
    torch.ops.embcache.bias_relu_(x, torch.zeros(4), True)
    assert torch.isnan(x[0, 0])
    assert x[0, 1:].tolist() == [0.0, float("inf"), 0.0]
    grad = torch.full((1, 4), float("nan"))
    total = torch.ops.embcache.relu_backward(grad, x, grad)
    assert total.isnan().tolist() == [False, False, True, False]  # a NaN output is not positive, as in torch


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_neither_threads_nor_instruction_set(dtype: torch.dtype) -> None:
    from embcache.kernels import native

    grad, output, results, before = matrix(1000, 77, dtype), matrix(1000, 77, dtype, 1), [], native.isa()
    try:
        for isa in native.isas():
            native.set_isa(isa)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                into, x = torch.empty_like(grad), output.clone()
                total = torch.ops.embcache.relu_backward(grad, output, into)
                torch.ops.embcache.bias_relu_(x, torch.ones(77), True)
                results.append((total, into, x))
    finally:
        native.set_isa(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    x = torch.zeros(shape)
    torch.ops.embcache.bias_relu_(x, torch.zeros(shape[1]), True)
    assert torch.equal(torch.ops.embcache.relu_backward(x, x, x), torch.zeros(shape[1]))


def test_wrong_arguments_are_refused() -> None:
    x = torch.zeros(3, 4)
    with pytest.raises(RuntimeError, match="bias must be float32, contiguous, one value a column"):
        torch.ops.embcache.bias_relu_(x, torch.zeros(3), True)
    with pytest.raises(RuntimeError, match="x must be a float32 or bfloat16 CPU matrix with contiguous rows"):
        torch.ops.embcache.bias_relu_(x.double(), torch.zeros(4), True)
    with pytest.raises(RuntimeError, match="output must have the shape and dtype of the first argument"):
        torch.ops.embcache.relu_backward(x, torch.zeros(3, 5), x)
    with pytest.raises(RuntimeError, match="to must have the shape and dtype of the first argument"):
        torch.ops.embcache.relu_backward(x, x, x.bfloat16())
