"""The MLP: its fused autograd node against nn.Linear and relu, buffers, precision, refusals."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

from dlrm.models import fused_mlp as fused
from dlrm.models.layers import MLP, DenseFields, check_sizes, dlrm_init, xavier_init


def plain(mlp: MLP, x: Tensor) -> Tensor:
    for i, layer in enumerate(mlp.layers):
        x = layer(x)
        if i + 1 < len(mlp.layers) or mlp.last_relu:
            x = torch.relu(x)
    return x


def same_as_plain(mlp: MLP, x: Tensor, needs_input_grad: bool = True) -> None:
    x = x.detach().requires_grad_(needs_input_grad)
    leaves = [*mlp.parameters(), *([x] if needs_input_grad else [])]
    expected, actual = plain(mlp, x), mlp(x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    wanted = torch.autograd.grad(expected, leaves, grad)
    for a, b in zip(torch.autograd.grad(actual, leaves, grad), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("sizes", [[1], [5], [8, 3], [32, 16, 8, 1]])
@pytest.mark.parametrize("last_relu", [True, False])
@pytest.mark.parametrize("needs_input_grad", [True, False])
def test_fused_equals_plain(sizes: list[int], last_relu: bool, needs_input_grad: bool) -> None:
    torch.manual_seed(0)
    mlp = MLP(7, sizes, last_relu)
    x = torch.randn(33, 7)
    assert fused.fused_mlp_applies(x, mlp.layers)
    same_as_plain(mlp, x, needs_input_grad)


def test_strided_input_and_expanded_gradient() -> None:
    torch.manual_seed(0)
    mlp = MLP(15, [8, 4])
    same_as_plain(mlp, torch.randn(12, 16)[:, :15])
    x = torch.randn(12, 15)
    mlp(x).sum().backward()  # an expanded gradient of stride 0
    actual = [p.grad.clone() for p in mlp.parameters()]
    mlp.zero_grad()
    plain(mlp, x).sum().backward()
    for a, p in zip(actual, mlp.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)


def test_the_incoming_gradient_is_left_alone() -> None:
    mlp = MLP(4, [6, 5])
    grad = torch.randn(9, 5)
    kept = grad.clone()
    mlp(torch.randn(9, 4)).backward(grad)
    assert torch.equal(grad, kept)


def test_forwards_in_flight_do_not_share_buffers() -> None:
    torch.manual_seed(0)
    mlp = MLP(6, [16, 16, 2], last_relu=False)
    a, b = torch.randn(8, 6), torch.randn(8, 6)
    first, second = mlp(a), mlp(b)
    (second.sum() * 3.0).backward()
    first.sum().backward()
    actual = [p.grad.clone() for p in mlp.parameters()]
    mlp.zero_grad()
    (plain(mlp, a).sum() + plain(mlp, b).sum() * 3.0).backward()
    for got, p in zip(actual, mlp.parameters(), strict=True):
        torch.testing.assert_close(got, p.grad)


def test_retained_graph_gives_the_same_gradient_twice() -> None:
    mlp = MLP(6, [16, 4])
    x = torch.randn(8, 6)
    loss = mlp(x).square().sum()
    first = torch.autograd.grad(loss, list(mlp.parameters()), retain_graph=True)
    mlp(torch.randn(8, 6)).sum().backward()  # would take the buffers if they had been given back
    second = torch.autograd.grad(loss, list(mlp.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_buffers_come_back_and_are_used_again() -> None:
    pool = fused.BufferPool()
    lease = fused.Lease(pool)
    address = lease.take(4, 8, torch.float32).data_ptr()
    assert pool.take(4, 8, torch.float32).data_ptr() != address
    del lease
    gc.collect()
    assert pool.take(8, 4, torch.bfloat16).data_ptr() != address
    assert pool.take(8, 4, torch.float32).data_ptr() == address


def test_pool_forgets_the_oldest_beyond_its_bound() -> None:
    pool = fused.BufferPool(max_bytes=100)
    old, new = torch.empty(20), torch.empty(10)
    pool.give([old, new])
    assert pool.take(2, 5, torch.float32).data_ptr() == new.data_ptr()
    assert pool.take(2, 10, torch.float32).data_ptr() != old.data_ptr()


def test_changing_a_weight_between_forward_and_backward_is_noticed() -> None:
    mlp = MLP(3, [4, 2])
    out = mlp(torch.randn(5, 3))
    with torch.no_grad():
        mlp.layers[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("case", ["double", "empty", "no_grad", "hook", "parametrized", "dropout", "vmap"])
def test_where_the_fused_node_does_not_apply(case: str) -> None:
    torch.manual_seed(0)
    mlp = MLP(4, [6, 2])
    x = torch.randn(5, 4)
    if case == "double":
        mlp.double()
        assert torch.autograd.gradcheck(mlp, (torch.randn(3, 4, dtype=torch.float64, requires_grad=True),))
        return
    if case == "empty":
        assert mlp(x[:0]).shape == (0, 2)
        mlp(x[:0]).sum().backward()
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in mlp.parameters())
    elif case == "no_grad":
        with torch.no_grad():
            assert not fused.fused_mlp_applies(x, mlp.layers)
            torch.testing.assert_close(mlp(x), plain(mlp, x))
    elif case == "hook":
        seen = []
        mlp.layers[0].register_forward_hook(lambda m, i, o: seen.append(o.shape))
        mlp(x)
        assert seen == [torch.Size([5, 6])]
    elif case == "parametrized":
        nn.utils.parametrizations.weight_norm(mlp.layers[0])
        same_as_plain(mlp, x)
    elif case == "dropout":
        mlp = MLP(4, [1000], dropout=0.5)
        share = (mlp(x.abs() + 1) == 0).float().mean()
        mlp.eval()
        assert share > (mlp(x.abs() + 1) == 0).float().mean() + 0.1
        with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\), got 1.0"):
            MLP(4, [2], dropout=1.0)
    else:
        torch.testing.assert_close(torch.func.vmap(mlp)(x.unsqueeze(1)).squeeze(1), plain(mlp, x))


def test_autocast_runs_products_in_bf16_and_keeps_fp32_gradients() -> None:
    torch.manual_seed(0)
    mlp = MLP(16, [32, 8])
    x = torch.randn(64, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert fused.fused_mlp_applies(x, mlp.layers)
        actual, expected = mlp(x), plain(mlp, x)
    assert actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), plain(mlp, x), rtol=0.05, atol=0.05)
    leaves = [x, *mlp.parameters()]
    got = torch.autograd.grad(actual.float().sum(), leaves)
    wanted = torch.autograd.grad(plain(mlp, x).sum(), leaves)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * b.abs().max().item())


def test_compiles_without_graph_breaks() -> None:
    mlp = MLP(6, [8, 3])
    x = torch.randn(5, 6)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), mlp(x))


def test_deepcopy_and_state_dict() -> None:
    torch.manual_seed(0)
    mlp = MLP(6, [8, 3])
    other = copy.deepcopy(mlp)
    x = torch.randn(5, 6)
    assert torch.equal(mlp(x), other(x))
    fresh = MLP(6, [8, 3])
    fresh.load_state_dict(mlp.state_dict())
    assert torch.equal(fresh(x), mlp(x))


def test_identity_without_layers() -> None:
    x = torch.randn(3, 4)
    assert MLP(4, [])(x) is x


def test_published_initial_values() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(300, 500)
    dlrm_init(linear)
    assert abs(linear.weight.std().item() / (2 / 800) ** 0.5 - 1) < 0.02
    assert abs(linear.bias.std().item() / (1 / 500) ** 0.5 - 1) < 0.1
    xavier_init(linear)
    assert abs(linear.weight.std().item() / (2 / 800) ** 0.5 - 1) < 0.02
    assert torch.equal(linear.bias, torch.zeros(500))
    without = nn.Linear(3, 4, bias=False)
    dlrm_init(without)
    xavier_init(without)


def test_dense_fields() -> None:
    fields = DenseFields(3, 5)
    dense = torch.randn(4, 3)
    out = fields(dense)
    assert out.shape == (4, 3, 5)
    torch.testing.assert_close(out[2, 1], dense[2, 1] * fields.weight[1])
    assert DenseFields(0, 5)(torch.zeros(4, 0)).shape == (4, 0, 5)


@pytest.mark.parametrize("sizes", [(0,), (-1, 3), (2.0,), (True,)])
def test_wrong_sizes(sizes: tuple) -> None:
    with pytest.raises(ValueError, match="mlp1: layer sizes must be positive integers"):
        check_sizes("mlp1", sizes)


@pytest.mark.parametrize("columns", [70, 96])
@pytest.mark.parametrize("layout", ["own rows", "padded rows", "last rows of a storage", "transposed"])
def test_ragged_products(columns: int, layout: str) -> None:
    a = torch.randn(5, 9)
    if layout == "own rows":
        b = torch.randn(9, columns)
    elif layout == "padded rows":
        b = torch.full((9, 112), float("nan"))[:, :columns]
        b.copy_(torch.randn(9, columns))
    elif layout == "last rows of a storage":
        b = torch.randn(9, 112)[:, 112 - columns :]  # widening the last row would leave the storage
    else:
        b = torch.randn(columns, 9).t()
    torch.testing.assert_close(fused._product(a, b), a @ b)
