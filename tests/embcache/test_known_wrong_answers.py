"""Answers that FBGEMM 1.8 and TorchRec 1.8 get wrong on CPU; ours are right. Where they are installed, each
of the peer's answers is shown to be wrong still, so that this list stays true."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import embcache as ec

IDS = torch.tensor([1, 2, 2, 3])
OFFSETS = torch.tensor([0, 3, 4])


def peer(pooling: str, rows: torch.Tensor, **options: Any) -> Any:
    fbgemm = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    modes = {"sum": common.PoolingMode.SUM, "mean": common.PoolingMode.MEAN}
    op = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows.shape[0], rows.shape[1], common.EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU)],
        optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD, pooling_mode=modes[pooling], **options)  # fmt: skip
    op.split_embedding_weights()[0].copy_(rows)
    return op


def ours(mode: str, rows: torch.Tensor, rule: ec.optim.Rule, backend: str, **options: Any) -> Any:
    bag = ec.EmbeddingBag(*rows.shape, mode=mode, _weight=rows, optimizer=rule, backend=backend, **options)
    return bag, ec.optim.SparseOptimizer(bag)


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.arange(20.0).view(5, 4) / 10 + 0.1


def row_wise(w: torch.Tensor, g: torch.Tensor, lr: float, decay: float) -> torch.Tensor:
    used = g + decay * w
    mul = lr / ((used**2).mean().sqrt() + 1e-8)
    return (1 - mul * decay) * w - mul * g


def test_row_wise_adagrad_weight_decay_counts(backend: str, rows: torch.Tensor) -> None:
    bag, optimizer = ours("sum", rows, ec.optim.RowWiseAdagrad(lr=0.1, weight_decay=0.5), backend)
    bag(IDS, OFFSETS[:-1]).sum().backward()
    optimizer.step()
    assert torch.allclose(bag.weight[3], row_wise(rows[3], torch.ones(4), 0.1, 0.5), rtol=1e-6)
    assert not torch.allclose(bag.weight[3], row_wise(rows[3], torch.ones(4), 0.1, 0.0), rtol=1e-4)


def test_peer_still_ignores_weight_decay(rows: torch.Tensor) -> None:
    op = peer("sum", rows, learning_rate=0.1, weight_decay=0.5)
    op(IDS, OFFSETS).sum().backward()
    assert torch.allclose(op.split_embedding_weights()[0][3], row_wise(rows[3], torch.ones(4), 0.1, 0.0), rtol=1e-4)


def test_peer_still_ignores_max_norm(rows: torch.Tensor) -> None:
    op = peer("sum", rows * 10, learning_rate=0.1, max_norm=1.0)
    op(IDS, OFFSETS).sum().backward()
    assert bool((op.split_embedding_weights()[0][IDS].norm(dim=1) > 1.5).all())


def test_peer_still_rounds_to_nearest() -> None:
    types = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    op = peer("sum", torch.ones(4, 256), learning_rate=1e-4, weights_precision=types.SparseType.FP16,
              stochastic_rounding=True)  # fmt: skip
    for _ in range(100):
        op(torch.tensor([2]), torch.tensor([0, 1])).sum().backward()
    assert torch.equal(op.split_embedding_weights()[0][2].float(), torch.ones(256))


def test_peer_still_errs_in_the_weighted_mean(rows: torch.Tensor) -> None:
    """Its rows move as if the bag's length did not divide the gradient that its forward divided."""
    op = peer("mean", rows, learning_rate=1.0)
    weights = torch.tensor([0.5, 2.0, 3.0, 4.0])
    out = op(IDS, OFFSETS, weights)
    assert torch.allclose(out[0], (0.5 * rows[1] + 5 * rows[2]) / 3, rtol=1e-5)
    weights.requires_grad_()
    op(IDS, OFFSETS, weights).sum().backward()
    right = rows.sum(1)[IDS] / torch.tensor([3.0, 3.0, 3.0, 1.0])
    assert not torch.allclose(weights.grad, right, rtol=1e-2)


def test_peer_still_drops_ids_before_the_first_offset(rows: torch.Tensor) -> None:
    op = peer("sum", rows, learning_rate=0.1)
    assert torch.allclose(op(IDS, torch.tensor([1, 3, 4]))[0], 2 * rows[2])


def test_peer_still_puts_row_zero_in_place_of_a_bad_id(rows: torch.Tensor) -> None:
    op = peer("sum", rows, learning_rate=0.1)
    assert torch.allclose(op(torch.tensor([1, 2, 7, 3]), OFFSETS)[0], rows[1] + rows[2] + rows[0])


def test_peer_still_raises_without_samples() -> None:
    torchrec = pytest.importorskip("torchrec")
    config = torchrec.EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=5, feature_names=["f"])
    none = torch.tensor([], dtype=torch.int64)
    with pytest.raises(IndexError):
        torchrec.EmbeddingBagCollection(tables=[config])(torchrec.KeyedJaggedTensor(["f"], none, lengths=none))


def test_peer_still_lets_nan_into_a_row(rows: torch.Tensor) -> None:
    op = peer("sum", rows, learning_rate=0.1)
    g = torch.ones(2, 4)
    g[1, 2] = float("nan")
    op(IDS, OFFSETS).backward(g)
    assert bool(op.split_embedding_weights()[0][3].isnan().all())


def test_max_norm_bounds_rows(backend: str, rows: torch.Tensor) -> None:
    bag, optimizer = ours("sum", rows * 10, ec.optim.RowWiseAdagrad(lr=0.1, max_norm=1.0), backend)
    bag(IDS, OFFSETS[:-1]).sum().backward()
    optimizer.step()
    assert torch.allclose(bag.weight[IDS].norm(dim=1), torch.ones(4), rtol=1e-6)
    assert torch.equal(bag.weight[4], rows[4] * 10)


def test_stochastic_rounding_moves_a_half_weight(backend: str) -> None:
    ones = torch.ones(4, 256)
    bag, optimizer = ours("sum", ones, ec.optim.SGD(lr=1e-4), backend, dtype=torch.float16, seed=0)
    for _ in range(100):
        bag(torch.tensor([[2]])).sum().backward()
        optimizer.step()
    assert abs(float(bag.weight[2].float().mean()) - 0.99) < 1e-3  # rounding to nearest would leave 1.0


def test_weighted_mean_has_the_gradient_of_its_forward(backend: str, rows: torch.Tensor) -> None:
    weights = torch.tensor([0.5, 2.0, 3.0, 4.0], requires_grad=True)
    bag, optimizer = ours("mean", rows, ec.optim.SGD(lr=1.0), backend)
    out = bag(IDS, OFFSETS[:-1], weights)
    assert torch.allclose(out[0], (0.5 * rows[1] + 5 * rows[2]) / 3, rtol=1e-6)
    out.sum().backward()
    optimizer.step()
    moved = rows - bag.weight
    assert torch.allclose(moved[1], torch.full((4,), 0.5 / 3), rtol=1e-5)
    assert torch.allclose(moved[2], torch.full((4,), 5.0 / 3), rtol=1e-5)
    assert torch.allclose(moved[3], torch.full((4,), 4.0), rtol=1e-5)
    sums = rows.sum(1)[IDS] / torch.tensor([3.0, 3.0, 3.0, 1.0])
    assert torch.allclose(weights.grad, sums, rtol=1e-6)


def test_a_bad_id_is_named(backend: str, rows: torch.Tensor) -> None:
    bag, _ = ours("sum", rows, ec.optim.SGD(), backend, name="user")
    with pytest.raises(IndexError, match=r"table 'user', feature 'user': values\[2\] = 7, valid range \[0, 5\)"):
        bag(torch.tensor([1, 2, 7, 3]), OFFSETS[:-1])


def test_offsets_that_do_not_start_at_zero_raise(backend: str, rows: torch.Tensor) -> None:
    bag, _ = ours("sum", rows, ec.optim.SGD(), backend, include_last_offset=True)
    with pytest.raises(ValueError, match=r"offsets\[0\] = 1, must be 0"):
        bag(IDS, torch.tensor([1, 3, 4]))
    with pytest.raises(ValueError, match=r"offsets\[0\] = 1, must be 0"):
        ec.KeyedJaggedTensor(["f"], IDS, offsets=torch.tensor([1, 3, 4]))


def test_a_collection_takes_no_samples(backend: str) -> None:
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("t", 5, 4, features=["f", "g"])], backend=backend)
    none = torch.tensor([], dtype=torch.int64)
    assert ebc(ec.KeyedJaggedTensor(["f", "g"], none, lengths=none)).values().shape == (0, 8)


def test_one_nan_gradient_poisons_nothing(backend: str, rows: torch.Tensor) -> None:
    bag, optimizer = ours("sum", rows, ec.optim.RowWiseAdagrad(lr=0.1), backend, name="user")
    g = torch.ones(2, 4)
    g[1, 2] = float("nan")
    with pytest.raises(FloatingPointError, match="table 'user', feature 'user': gradient of bag 1, column 2 is nan"):
        bag(IDS, OFFSETS[:-1]).backward(g)
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(bag.weight, rows)
    assert torch.equal(bag.store.state("user"), torch.zeros(5, 1))
