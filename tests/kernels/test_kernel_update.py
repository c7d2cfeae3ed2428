"""Sums of equal ids, jagged shapes, storage types, and bits that depend on nothing but the data."""

from __future__ import annotations

from types import ModuleType

import kernel_problems as kp
import pytest
import torch
from kernel_problems import Batch, Tables, dense_gradient, hyper_row, make_batch, update


@pytest.mark.parametrize("pooling", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("dims", [[1, 3], [16, 4], [64, 100], [130, 17]])
def test_sgd_subtracts_the_summed_gradient(
    backend: ModuleType, pooling: int, weighted: bool, ids: torch.dtype, dims: list[int]
) -> None:
    tables = Tables(dims, capacity=30)
    batch = make_batch(tables, [0, 1, 0], [7, 1, 5], pooling=pooling, weighted=weighted, ids=ids)
    slabs, _ = update(backend, tables, batch, hyper_row(lr=0.5))
    for t in range(2):
        expected = tables.weights(tables.slabs, t).double() - 0.5 * dense_gradient(tables, batch, t)[0]
        assert torch.allclose(tables.weights(slabs, t).double(), expected, atol=2e-6)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision(backend: ModuleType, grad_dtype: torch.dtype) -> None:
    tables = Tables([20])
    batch = make_batch(tables, [0], 30, grad_dtype=grad_dtype)
    slabs, _ = update(backend, tables, batch, hyper_row(lr=1.0))
    expected = tables.weights(tables.slabs, 0).double() - dense_gradient(tables, batch, 0)[0]
    assert torch.allclose(tables.weights(slabs, 0).double(), expected, atol=1e-5)


def test_gradients_of_several_forwards_in_several_tensors(backend: ModuleType) -> None:
    """Features appended for a second forward: other tensor, interleaved layout with a stride."""
    tables = Tables([8, 8])
    batch = make_batch(tables, [0, 1, 0, 1], 6)
    batch.grads = [torch.randn(6 * 16), torch.randn(6 * 16)]
    batch.features[:, 4] = torch.tensor([0, 0, 1, 1])
    batch.features[:, 5] = torch.tensor([0, 8, 0, 8])
    batch.features[:, 6] = 16
    slabs, _ = update(backend, tables, batch, hyper_row(lr=1.0))
    for t in range(2):
        expected = tables.weights(tables.slabs, t).double() - dense_gradient(tables, batch, t)[0]
        assert torch.allclose(tables.weights(slabs, t).double(), expected, atol=1e-5)


@pytest.mark.parametrize("features", [[], [0], [0, 0]])
def test_nothing_to_do(backend: ModuleType, features: list[int]) -> None:
    tables = Tables([8])
    for longest, bags in ((0, 5), (3, 0)):
        batch = make_batch(tables, features, bags, longest=longest)
        slabs, rows = update(backend, tables, batch, hyper_row())
        assert rows == 0
        assert torch.equal(slabs[0], tables.slabs[0])
    none = Tables([])
    assert update(backend, none, make_batch(none, [], 0), hyper_row())[1] == 0


def test_order_of_ids_and_splitting_a_bag_change_only_rounding(backend: ModuleType) -> None:
    tables = Tables([32], kp.ROW_WISE)
    batch = make_batch(tables, [0], 40)
    whole, _ = update(backend, tables, batch, hyper_row())
    assert batch.offsets is not None
    order = torch.cat([torch.arange(int(a), int(b)).flip(0) for a, b in batch.offsets.unfold(0, 2, 1)])
    turned = Batch(batch.features, batch.values[order], batch.offsets, None, batch.grads, batch.numel)
    assert torch.allclose(whole[0].view(torch.float32), update(backend, tables, turned, hyper_row())[0][0].view(
        torch.float32), atol=1e-6)  # fmt: skip
    # every id a bag of its own, with the gradient of the bag it came from
    rows = torch.repeat_interleave(torch.arange(40), batch.offsets.diff())
    n = batch.values.numel()
    split = Batch(
        torch.tensor([[0, 2, 0, n, 0, 0, 32]]), batch.values, None, None,
        [batch.grads[0].view(40, 32)[rows].reshape(-1)], n * 32,
    )  # fmt: skip
    assert torch.equal(whole[0], update(backend, tables, split, hyper_row())[0][0])


def long_batch(tables: Tables, n: int, weighted: bool, pooling: int) -> Batch:
    """Half of the ids of table 0 equal, table 1 small: what a skewed batch does to a fixed split of the work."""
    generator = torch.Generator().manual_seed(n)
    bags = n // 10
    values = torch.randint(0, tables.capacity, (n + 10,), generator=generator)
    values[: n // 2] = 7
    offsets = torch.cat([torch.arange(0, n + 1, 10), torch.tensor([n + 4, n + 10])])
    dim = tables.dims[0]
    features = torch.tensor([[0, pooling, 0, bags, 0, 0, dim], [1, pooling, bags, 2, 0, bags * dim, dim]])
    return Batch(
        features, values, offsets, torch.rand(n + 10, generator=generator) if weighted else None,
        [torch.randn((bags + 2) * dim, generator=generator)], (bags + 2) * dim,
    )  # fmt: skip


@pytest.mark.parametrize(("weighted", "pooling"), [(False, 0), (True, 0), (False, 1)])
@pytest.mark.parametrize("rule", [kp.ROW_WISE, kp.LAMB])
def test_bits_are_equal_for_every_thread_count_and_instruction_set(
    native: ModuleType, weighted: bool, pooling: int, rule: int
) -> None:
    tables = Tables([40, 40], rule, capacity=5000)
    batch = long_batch(tables, 60_000, weighted, pooling)
    threads, isa = torch.get_num_threads(), native.isa()
    results = {}
    try:
        for name in native.isas():
            for count in (1, 2, 3, 7):
                native.set_isa(name)
                torch.set_num_threads(count)
                written = [torch.zeros(625, dtype=torch.uint8) for _ in range(2)]
                slabs, rows = update(native, tables, batch, hyper_row(multiplier=0.5), written=written)
                results[name, count] = [*slabs, *written, torch.tensor(rows)]
    finally:
        torch.set_num_threads(threads)
        native.set_isa(isa)
    first = results.pop((native.isas()[0], 1))
    for key, other in results.items():
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), key


@pytest.mark.parametrize("dim", [1, 7, 64, 100])
def test_100_000_equal_ids(native: ModuleType, dim: int) -> None:
    tables = Tables([dim], kp.ROW_WISE, capacity=9)
    n = 100_000
    grad = torch.randn(n * dim, generator=torch.Generator().manual_seed(0))
    features = torch.tensor([[0, 2, 0, n, 0, 0, dim]])
    batch = Batch(features, torch.full((n,), 4), None, None, [grad], n * dim)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(update(native, tables, batch, hyper_row(lr=1e-3))[0][0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    summed = grad.view(n, dim).double().sum(0)
    h = 0.5 + (summed**2).mean()
    expected = tables.weights(tables.slabs, 0)[4].double() - 1e-3 / (h.sqrt() + 1e-8) * summed
    assert torch.allclose(tables.weights(results[:1], 0)[4].double(), expected, atol=1e-6)


def test_groups_longer_than_a_chunk_equal_the_documented_tree(native: ModuleType) -> None:
    """Chunks of 1024 positions summed in order, then the chunk sums in order."""
    n, dim = 2500, 16
    grad = torch.randn(n, dim)
    tables = Tables([dim], capacity=2)
    batch = Batch(torch.tensor([[0, 2, 0, n, 0, 0, dim]]), torch.zeros(n, dtype=torch.int64), None, None,
                  [grad.reshape(-1)], n * dim)  # fmt: skip
    slabs, _ = update(native, tables, batch, hyper_row(lr=1.0))
    parts = []
    for chunk in grad.split(1024):
        total = chunk[0]
        for row in chunk[1:]:
            total = total + row
        parts.append(total)
    assert torch.equal(
        tables.weights(slabs, 0)[0], tables.weights(tables.slabs, 0)[0] - ((parts[0] + parts[1]) + parts[2])
    )


@pytest.mark.parametrize("dtype", [1, 2])
def test_half_storage_rounds_to_nearest_without_the_flag(backend: ModuleType, dtype: int) -> None:
    tables, exact = Tables([37], dtype=dtype), Tables([37])
    exact.slabs[0].view(torch.float32)[:, :37] = tables.weights(tables.slabs, 0)
    batch = make_batch(tables, [0], 20)
    half, full = update(backend, tables, batch, hyper_row())[0], update(backend, exact, batch, hyper_row())[0]
    assert torch.equal(tables.weights(half, 0), exact.weights(full, 0).to(kp.DTYPES[dtype]).float())


@pytest.mark.parametrize("dtype", [1, 2])
def test_stochastic_rounding_is_unbiased_and_drawn_from_id_and_step(backend: ModuleType, dtype: int) -> None:
    """20,000 rows move from 1 by a hundredth of a unit: a hundredth of them, not none, take the step."""
    rows, unit = 20_000, 2.0**-7 if dtype == 1 else 2.0**-10
    tables = Tables([2], dtype=dtype, flags=1, capacity=rows)
    tables.slabs[0].view(kp.DTYPES[dtype])[:, :2] = 1.0
    batch = Batch(torch.tensor([[0, 2, 0, rows, 0, 0, 2]]), torch.arange(rows), None, None,
                  [torch.full((rows * 2,), -1.0)], rows * 2)  # fmt: skip
    row = hyper_row(lr=unit / 100, step=5)
    once, _ = update(backend, tables, batch, row)
    moved = tables.weights(once, 0) - 1.0
    assert set(moved.unique().tolist()) == {0.0, unit}
    assert abs(float(moved.double().mean()) / (unit / 100) - 1) < 0.2
    assert torch.equal(once[0], update(backend, tables, batch, row)[0][0])
    assert not torch.equal(once[0], update(backend, tables, batch, hyper_row(lr=unit / 100, step=6))[0][0])
    # the id counts, not the slot: the same rows in another order of slots
    ids = torch.arange(rows).flip(0)
    turned, _ = update(backend, tables, batch, row, slot_ids=[ids])
    assert torch.equal(tables.weights(turned, 0).flip(0), tables.weights(once, 0))


def test_200_small_steps_move_an_fp16_weight(backend: ModuleType) -> None:
    tables = Tables([8], dtype=2, flags=1, capacity=64)
    tables.slabs[0].view(torch.float16)[:, :8] = 1.0
    batch = Batch(torch.tensor([[0, 2, 0, 64, 0, 0, 8]]), torch.arange(64), None, None, [torch.ones(512)], 512)
    slabs = tables.copy()
    for step in range(1, 201):
        update(backend, tables, batch, hyper_row(lr=1e-4, step=step), slabs)
    assert abs(float(tables.weights(slabs, 0).mean()) - 0.98) < 0.001


@pytest.mark.parametrize("dtype", [1, 2])
def test_stochastic_rounding_has_the_same_bits_everywhere(native: ModuleType, dtype: int) -> None:
    from embcache.kernels import reference

    tables = Tables([70], kp.SGD, dtype=dtype, flags=1, capacity=200)
    view = tables.slabs[0].view(kp.DTYPES[dtype])
    view[:, :20] *= 1e-6  # fp16 subnormals
    view[:, 20:30] = 0.0
    batch = Batch(torch.tensor([[0, 2, 0, 200, 0, 0, 70]]), torch.arange(200), None, None,
                  [torch.randn(200 * 70) * 1e-3], 200 * 70)  # fmt: skip
    ids = [torch.randint(-(2**62), 2**62, (200,))]
    expected = update(reference, tables, batch, hyper_row(step=9), slot_ids=ids)[0][0]
    before = native.isa()
    for name in native.isas():
        native.set_isa(name)
        assert torch.equal(update(native, tables, batch, hyper_row(step=9), slot_ids=ids)[0][0], expected), name
    native.set_isa(before)


def test_update_beyond_2_31_elements(native: ModuleType, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A sparse file stands for a slab of 2.4e9 fp32 weights; only the touched pages exist."""
    rows, dim = 38_000_000, 63
    with open(tmp_path / "slab", "wb") as file:
        try:
            file.truncate(rows * 256)
        except OSError:
            pytest.skip("this file system has no sparse files")
    slab = torch.from_file(str(tmp_path / "slab"), shared=True, size=rows * 256, dtype=torch.uint8).view(rows, 256)
    tables = Tables([dim], kp.ROW_WISE)
    tables.slabs, tables.capacity = [slab], rows
    values = torch.tensor([rows - 1, 0, rows - 1, 35_000_000])
    batch = Batch(torch.tensor([[0, 2, 0, 4, 0, 0, dim]]), values, None, None, [torch.ones(4 * dim)], 4 * dim)
    _, count = update(native, tables, batch, hyper_row(lr=1.0), slabs=[slab])
    assert count == 3
    w = slab.view(torch.float32)
    assert torch.equal(w[rows - 1], torch.tensor([-1.0] * 63 + [4.0]))
    assert torch.equal(w[35_000_000], torch.tensor([-1.0] * 63 + [1.0]))
    out = native.pooled_lookup([slab], tables.described, batch.features, values, None, None, 4 * dim, 0)
    assert torch.equal(out, torch.full((4 * dim,), -1.0))
