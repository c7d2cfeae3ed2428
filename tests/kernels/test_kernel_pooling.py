"""Pooled lookup, its gradient by weight, checks, and initial rows, on every backend."""

from __future__ import annotations

from types import ModuleType

import kernel_problems as kp
import pytest
import torch
from kernel_problems import Tables, lookup, make_batch
from torch import nn

from embcache import init

DIMS = [1, 3, 4, 7, 16, 64, 100, 128, 1000, 2048]


def expected(tables: Tables, batch: kp.Batch) -> torch.Tensor:
    """The same through torch.nn.functional.embedding_bag, feature by feature."""
    out = []
    for table, pooling, first, bags, *_ in batch.features.tolist():
        w = tables.weights(tables.slabs, table)
        if batch.offsets is None:
            part = w[batch.values[first : first + bags].long()]
            if batch.weights is not None:
                part = part * batch.weights[first : first + bags, None]
        else:
            start, stop = int(batch.offsets[first]), int(batch.offsets[first + bags])
            scale = None if batch.weights is None else batch.weights[start:stop]
            part = nn.functional.embedding_bag(
                batch.values[start:stop].long(), w, batch.offsets[first : first + bags + 1].long() - start,
                mode="mean" if pooling == 1 and scale is None else "sum", per_sample_weights=scale,
                include_last_offset=True,
            )  # fmt: skip
            if pooling == 1 and scale is not None:
                part = part / batch.offsets[first : first + bags + 1].diff().clamp(min=1)[:, None]
        out.append(part.reshape(-1))
    return torch.cat(out)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("pooling", [0, 1, 2])
def test_unweighted_fp32_has_the_bits_of_torch(backend: ModuleType, dim: int, pooling: int) -> None:
    tables = Tables([dim, 5])
    batch = make_batch(tables, [0, 1, 0], [9, 4, 1], longest=30, pooling=pooling)
    assert torch.equal(lookup(backend, tables, batch), expected(tables, batch))


@pytest.mark.parametrize("dim", [1, 7, 64, 100, 130])
@pytest.mark.parametrize("pooling", [0, 1, 2])
@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_weighted_and_half_storage(backend: ModuleType, dim: int, pooling: int, dtype: int, ids: torch.dtype) -> None:
    tables = Tables([dim, 24], dtype=dtype)
    batch = make_batch(tables, [0, 1, 0], 8, pooling=pooling, weighted=True, ids=ids)
    assert torch.allclose(lookup(backend, tables, batch), expected(tables, batch), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("out", [1, 2])
def test_output_in_half_precision_is_the_fp32_output_rounded(backend: ModuleType, out: int) -> None:
    tables = Tables([45])
    batch = make_batch(tables, [0], 20)
    half = lookup(backend, tables, batch, out_dtype=out)
    assert half.dtype == kp.DTYPES[out]
    assert torch.equal(half, lookup(backend, tables, batch).to(kp.DTYPES[out]))


def test_half_conversions_cover_every_value(native: ModuleType) -> None:
    """All 65,536 bit patterns widen as torch's do, and all finite ones come back."""
    patterns = torch.arange(65_536, dtype=torch.int32).to(torch.int16)
    before = native.isa()
    for dtype in (1, 2):
        tables = Tables([16], dtype=dtype, capacity=4096)
        tables.slabs[0].view(torch.int16)[:, :16] = patterns.view(4096, 16)
        batch = kp.Batch(torch.tensor([[0, 2, 0, 4096, 0, 0, 16]]), torch.arange(4096), None, None, [], 65_536)
        widened = patterns.view(kp.DTYPES[dtype]).float()
        for name in native.isas():
            native.set_isa(name)
            out = lookup(native, tables, batch)
            number = ~widened.isnan()
            assert torch.equal(out[number], widened[number])
            assert out[~number].isnan().all()
            back = lookup(native, tables, batch, out_dtype=dtype)
            assert torch.equal(back[number], patterns.view(kp.DTYPES[dtype])[number])
            assert back[~number].isnan().all()
    native.set_isa(before)


def test_rounding_to_half_is_torchs(native: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator).to(torch.int32)
    exponents = torch.randint(98, 146, (1 << 16,), generator=generator).to(torch.int32)  # around fp16's range
    bits = torch.cat([bits, (bits & ~0x7F800000) | exponents << 23])
    values = bits.view(torch.float32)
    values[values.isnan()] = 65_519.9
    tables = Tables([16], capacity=values.numel() // 16)
    tables.slabs[0].view(torch.float32)[:, :16] = values.view(-1, 16)
    rows = tables.capacity
    batch = kp.Batch(torch.tensor([[0, 2, 0, rows, 0, 0, 16]]), torch.arange(rows), None, None, [], values.numel())
    before = native.isa()
    for name in native.isas():
        native.set_isa(name)
        for out in (1, 2):
            assert torch.equal(lookup(native, tables, batch, out_dtype=out), values.to(kp.DTYPES[out]))
    native.set_isa(before)


def test_empty_bags_batches_and_features(backend: ModuleType) -> None:
    tables = Tables([6, 20])
    batch = make_batch(tables, [0, 1], 3, longest=0)
    assert torch.equal(lookup(backend, tables, batch), torch.zeros(78))
    assert lookup(backend, tables, make_batch(tables, [0, 1], 0)).shape == (0,)
    assert lookup(backend, tables, make_batch(tables, [], 0)).shape == (0,)
    none = Tables([])
    assert lookup(backend, none, make_batch(none, [], 0)).shape == (0,)


def test_thread_counts_and_instruction_sets_give_equal_bits(native: ModuleType) -> None:
    tables = Tables([100, 16], capacity=2000)
    batch = make_batch(tables, [0, 1, 0], [3000, 500, 1], longest=20, weighted=True)
    threads, before, results = torch.get_num_threads(), native.isa(), []
    try:
        for name in native.isas():
            native.set_isa(name)
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                weights = native.grad_weights(
                    tables.slabs, tables.described, batch.features, batch.values, batch.offsets, batch.grads
                )
                results.append((lookup(native, tables, batch), weights))
    finally:
        torch.set_num_threads(threads)
        native.set_isa(before)
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        assert torch.equal(results[0][1], other[1])


@pytest.mark.parametrize("pooling", [0, 1, 2])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [1, 17, 64])
def test_gradient_by_weight(backend: ModuleType, pooling: int, grad_dtype: torch.dtype, dim: int) -> None:
    tables = Tables([dim, 8])
    batch = make_batch(tables, [0, 1], 9, pooling=pooling, weighted=True, grad_dtype=grad_dtype)
    found = backend.grad_weights(
        tables.slabs, tables.described, batch.features, batch.values, batch.offsets, batch.grads
    )
    assert batch.weights is not None
    batch.weights.requires_grad_()
    expected(tables, batch).backward(batch.grads[0].float())
    assert torch.allclose(found, batch.weights.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_finite(backend: ModuleType, dtype: torch.dtype) -> None:
    x = torch.full((150_001,), torch.finfo(dtype).max, dtype=dtype)
    x[::2] = -torch.finfo(dtype).tiny
    assert backend.all_finite([x, x[:0]])
    assert backend.all_finite([])
    for at in (0, 77_777, 150_000):
        for bad in (float("nan"), float("inf"), -float("inf")):
            y = x.clone()
            y[at] = bad
            assert not backend.all_finite([x, y])
    wide = torch.ones(4, 20, dtype=dtype)
    wide[2, 15] = float("nan")
    assert backend.all_finite([wide[:, :15]])
    assert not backend.all_finite([wide[:, 10:]])


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_check_ids_finds_the_first_bad_position(backend: ModuleType, ids: torch.dtype) -> None:
    tables = Tables([2, 2], capacity=50)
    batch = make_batch(tables, [0, 1], 400, longest=9, ids=ids)
    rows = torch.tensor([50, 50])
    assert backend.check_ids(batch.values, batch.offsets, batch.features, rows) == -1
    lowest, highest = torch.iinfo(ids).min, torch.iinfo(ids).max
    for at in (0, 777, batch.values.numel() - 1):
        for bad in (50, -1, lowest, highest):
            values = batch.values.clone()
            values[at] = bad
            values[-1] = bad
            assert backend.check_ids(values, batch.offsets, batch.features, rows) == at
    assert backend.check_ids(batch.values, batch.offsets, batch.features, torch.tensor([50, 0])) >= 0
    assert backend.check_ids(batch.values[:0], None, batch.features[:0], rows) == -1
    assert backend.check_ids(batch.values.neg(), batch.offsets, batch.features, torch.tensor([-1, -1])) == -1


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_check_offsets(backend: ModuleType, ids: torch.dtype) -> None:
    def check(*offsets: int) -> int:
        return backend.check_offsets(torch.tensor(offsets, dtype=ids), 5)

    assert check(0, 2, 2, 5) == -1
    assert backend.check_offsets(torch.tensor([0], dtype=ids), 0) == -1
    assert check(1, 2, 5) == 0
    assert check(0, 3, 2, 5) == 2
    assert check(0, 3, 4) == 2
    assert check(0, 3, 6) == 2


@pytest.mark.parametrize(
    ("code", "p0", "p1"), [(0, 0.5, 0.0), (1, 0.1, 0.0), (1, 0.1, 2.0), (2, 1.5, 0.25), (3, 1.0, 0.0)]
)
@pytest.mark.parametrize(("dim", "dtype"), [(1, 0), (70, 0), (33, 1), (128, 2)])
def test_initial_rows_are_those_of_the_formula(
    backend: ModuleType, code: int, p0: float, p1: float, dim: int, dtype: int
) -> None:
    offset = -(-dim * kp.DTYPES[dtype].itemsize // 4) * 4
    slab = torch.full((40, offset + 8), 9, dtype=torch.uint8)
    state, key = torch.tensor([0.25, 3.0]), -(2**60) + 7
    place = (dim, dtype, offset, code, p0, p1, key, state, init.normal_table())
    backend.init_rows(slab, None, None, -5, *place)
    ids = torch.arange(40) - 5
    wanted = init.values(code, p0, p1, key, ids, dim).to(kp.DTYPES[dtype])
    assert torch.equal(slab.view(kp.DTYPES[dtype])[:, :dim], wanted)
    assert torch.equal(slab.view(torch.float32)[:, offset // 4 :], state.expand(40, 2))
    # some slots, any ids
    other = slab.clone()
    slots, some = torch.tensor([3, 0]), torch.tensor([2**63 - 1, -(2**63)])
    backend.init_rows(other, slots, some, 0, *place)
    wanted = init.values(code, p0, p1, key, some, dim).to(kp.DTYPES[dtype])
    assert torch.equal(other.view(kp.DTYPES[dtype])[slots, :dim], wanted)
    assert torch.equal(other[4:], slab[4:])


def test_normal_rows_come_from_the_table_that_is_given(backend: ModuleType) -> None:
    slab = torch.full((40, 24), 9, dtype=torch.uint8)
    flat = torch.zeros_like(init.normal_table())  # every quantile 0: only the mean is left
    backend.init_rows(slab, None, None, 0, 5, 0, 20, init.NORMAL, 0.5, 0.25, 7, torch.tensor([1.0]), flat)
    assert torch.equal(slab.view(torch.float32)[:, :5], torch.full((40, 5), 0.25))


def test_arguments_are_checked(native: ModuleType) -> None:
    tables = Tables([4])
    batch = make_batch(tables, [0], 3)

    def call(**changes: object) -> None:
        arguments = {
            "slabs": tables.slabs, "tables": tables.described, "features": batch.features, "values": batch.values,
            "offsets": batch.offsets, "weights": None, "out_numel": batch.numel, "out_dtype": 0,
        }  # fmt: skip
        native.pooled_lookup(*{**arguments, **changes}.values())

    call()
    for changes, message in [
        ({"slabs": []}, "0 slabs for 1 tables"),
        ({"slabs": [tables.slabs[0].float()]}, "slab is float32, must be uint8"),
        ({"slabs": [tables.slabs[0][:, :4]]}, "must be contiguous"),
        ({"values": batch.values.float()}, "values is float32"),
        ({"out_numel": batch.numel - 1}, "vectors from 0 by 4 in a tensor of"),
        ({"out_dtype": 7}, "out_dtype 7"),
        ({"features": batch.features[:, :5]}, r"shape \[n, 7\]"),
        ({"features": batch.features + torch.tensor([1, 0, 0, 0, 0, 0, 0])}, "names table 1 of 1"),
        ({"features": batch.features + torch.tensor([0, 0, 1, 0, 0, 0, 0])}, "bags"),
        ({"weights": torch.ones(1 + batch.values.numel())}, "weights for"),
        ({"tables": tables.described + torch.tensor([0, 9, 0, 0, 0, 0, 0, 0])}, "weight dtype code 9"),
        ({"tables": tables.described + torch.tensor([4, 0, 0, 0, 0, 0, 0, 4])}, "does not fit dim 8"),
        ({"tables": tables.described + torch.tensor([0, 0, 0, 0, 0, 0, 1, 0])}, "4 columns from 1 of 4"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call(**changes)
    tables.described[0, 3] = kp.ADAM
    with pytest.raises(RuntimeError, match="state needs rows of"):
        kp.update(native, tables, batch, kp.hyper_row())
    with pytest.raises(RuntimeError, match="'sse9' is not one of portable"):
        native.set_isa("sse9")


def test_lookup_traces_under_fake_tensors(native: ModuleType) -> None:
    tables = Tables([4])
    batch = make_batch(tables, [0], 3)
    op = torch.ops.embcache.pooled_lookup
    arguments = (tables.slabs, tables.described, batch.features, batch.values, batch.offsets, None, batch.numel, 0)
    torch.library.opcheck(op.default, arguments)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert op(*arguments).shape == (batch.numel,)
