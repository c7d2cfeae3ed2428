"""Wire formats by value: against torch's conversions, against the formula in fp64, and at the edges."""

import numpy as np
import pytest
import torch

from embcache.errors import BadConfig
from embcache.sharded.wire import WIRES, Wire, decode_ids, encode_ids, id_bytes

EDGES = np.array(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, -65536, 1e38, 3.4028235e38, 6.1e-5,
     6.0976e-5, 5.96e-8, 2.98e-8, 2.9802322e-8, 2.99e-8, 8.9e-8, -1e-7, 1e-40, -1.4e-45, 1.1754944e-38, 2.0**-14,
     2.0**-24, 2.0**-25, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-9],
    np.float32,
)  # fmt: skip


def there_and_back(name, rows):
    wire = Wire(name)
    data = np.full(rows.shape[0] * wire.row_bytes(rows.shape[1]) + 5, 77, np.uint8)
    used = wire.encode(rows, data)
    assert used == rows.shape[0] * wire.row_bytes(rows.shape[1])
    assert data[used:].tolist() == [77] * 5
    back = np.full_like(rows, 9)
    assert wire.decode(data, back) == used
    return back, data[:used]


def every_float(count, seed):
    """Random bit patterns: every exponent, NaNs and infinities among them."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return bits.view(np.float32)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_sixteen_bits_are_torchs_round_to_nearest_even(name, dtype):
    values = np.concatenate([EDGES, every_float(300_000, 1), np.float32(2) ** np.linspace(-30, 18, 5000, dtype="f4")])
    rows = values[: len(values) // 7 * 7].reshape(-1, 7)
    back, data = there_and_back(name, rows)
    half = torch.from_numpy(rows).to(dtype)
    nan = np.isnan(rows)
    assert np.array_equal(data.view(np.int16).reshape(rows.shape)[~nan], half.view(torch.int16).numpy()[~nan])
    assert np.array_equal(np.isnan(back), nan)
    assert np.array_equal(back.view(np.int32)[~nan], half.float().numpy().view(np.int32)[~nan])


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_all_sixteen_bit_patterns_decode_as_torch_does(name, dtype):
    data = np.arange(65536, dtype=np.uint16)
    back = np.empty((256, 256), np.float32)
    Wire(name).decode(data.view(np.uint8), back)
    want = torch.from_numpy(data.view(np.int16)).view(dtype).float().numpy().reshape(256, 256)
    assert np.array_equal(back, want, equal_nan=True)
    again = np.empty(65536 * 2, np.uint8)
    Wire(name).encode(back, again)
    real = ~np.isnan(want.reshape(-1))
    assert np.array_equal(again.view(np.uint16)[real], data[real])


@pytest.mark.parametrize("dim", [1, 3, 16, 64, 100])
def test_int8_is_within_half_a_scale_and_keeps_its_ends(dim):
    rng = np.random.default_rng(dim)
    rows = (rng.standard_normal((500, dim)) * 10.0 ** rng.integers(-20, 20, (500, 1))).astype(np.float32)
    back, data = there_and_back("int8", rows)
    head = data[: 500 * 8].view(np.float32).reshape(500, 2).astype(np.float64)
    low, high = rows.min(1).astype(np.float64), rows.max(1).astype(np.float64)
    assert np.array_equal(head[:, 1], low)
    assert np.allclose(head[:, 0], (high - low) / 255, rtol=1e-6)
    ulp = np.spacing(np.abs(rows).max(1, keepdims=True)).astype(np.float64)
    error = np.abs(back.astype(np.float64) - rows)
    assert (error <= 0.5001 * head[:, :1] + 2 * ulp).all()
    assert np.array_equal(back[np.arange(500), rows.argmin(1)], rows.min(1))
    q = data[500 * 8 :].reshape(500, dim)
    inverse = np.float32(255) / (rows.max(1) - rows.min(1)).astype(np.float32) if dim > 1 else np.zeros(500, "f4")
    want = np.rint((rows - rows.min(1, keepdims=True)) * inverse[:, None])
    assert np.array_equal(q, want.astype(np.uint8))


def test_int8_at_the_edges():
    rows = np.float32([
        [0, 0, 0], [-0.0, -0.0, -0.0], [1.1, 1.1, 1.1], [-0.0, 0.0, -0.0], [1e-45, 0, 3e-45], [-3e38, 0, 3e38],
        [1, np.nan, 2], [1, np.inf, 2], [-np.inf, 0, 0], [-np.nan, 0, 0], [3.4e38, 3.4e38, 3.4e38],
        [1e-38, 2e-38, 3e-38],
    ])  # fmt: skip
    back, _ = there_and_back("int8", rows)
    for constant in (0, 1, 2, 10):
        assert np.array_equal(back[constant].view(np.int32), rows[constant].view(np.int32))
    assert back[3].tolist() == [0, 0, 0]
    assert np.abs(back[4] - rows[4]).max() <= 3e-45
    assert np.allclose(back[5], rows[5], atol=3e38 / 250)
    assert back[5][0] == rows[5][0]
    assert np.isnan(back[6:10]).all()
    assert np.allclose(back[11], rows[11], atol=1e-40)


@pytest.mark.parametrize("name", WIRES)
def test_rows_by_index_and_several_tables_in_one_buffer(name):
    rng = np.random.default_rng(3)
    wire = Wire(name)
    tables = [rng.standard_normal((n, d)).astype(np.float32) for n, d in ((40, 5), (0, 8), (17, 1), (30, 64))]
    index = [rng.permutation(40)[:23].astype(np.int32), None, None, rng.integers(0, 30, 90)]
    counts = [23, 0, 17, 90]
    size = sum(n * wire.row_bytes(t.shape[1]) for n, t in zip(counts, tables, strict=True))
    data = torch.zeros(size, dtype=torch.uint8)
    assert wire.encode_many(list(zip(tables, index, strict=True)), data) == size
    at = 0
    for table, which, count in zip(tables, index, counts, strict=True):
        alone = np.zeros(count * wire.row_bytes(table.shape[1]), np.uint8)
        wire.encode(table if which is None else np.ascontiguousarray(table[which]), alone)
        assert np.array_equal(data[at : at + len(alone)].numpy(), alone)
        at += len(alone)
    got = [torch.full((2 * c, t.shape[1]), 5.0) for t, c in zip(tables, counts, strict=True)]
    places = [rng.permutation(2 * c)[:c] for c in counts]
    assert wire.decode_many(data, list(zip(got, places, strict=True))) == size
    for table, which, place, rows in zip(tables, index, places, got, strict=True):
        want = there_and_back(name, np.ascontiguousarray(table if which is None else table[which]))[0]
        assert np.array_equal(rows.numpy()[place], want)
        assert (np.delete(rows.numpy(), place, axis=0) == 5).all()


def test_fp32_passes_every_bit():
    rows = every_float(10_000, 2).reshape(100, 100)
    back, data = there_and_back("fp32", rows)
    assert np.array_equal(back.view(np.int32), rows.view(np.int32))
    assert np.array_equal(data, rows.view(np.uint8).reshape(-1))


def test_what_cannot_be_is_refused():
    with pytest.raises(BadConfig, match="must be one of fp32"):
        Wire("fp8")
    wire = Wire("bf16")
    rows = np.zeros((3, 4), np.float32)
    for bad, why in (
        ((rows, np.zeros(23, np.uint8)), "holds 23 bytes, the rows take 24"),
        ((rows.astype("f8"), np.zeros(99, np.uint8)), "must be float32"),
        ((rows[:, ::2], np.zeros(99, np.uint8)), "contiguous"),
        ((rows, np.zeros(99, np.uint8)[1:]), "odd address"),
        ((rows, np.zeros(99, np.uint8), np.array([0.0])), "int32 or int64"),
    ):
        with pytest.raises(ValueError, match=why):
            wire.encode(*bad)
    with pytest.raises(IndexError):
        wire.encode(rows, np.zeros(99, np.uint8), np.array([3]))


def test_ids():
    ids = np.array([0, 1, 2**32 - 1, 7])
    data = np.zeros(19, np.uint8)
    assert encode_ids(ids, data, 4) == 16
    back = np.zeros(4, np.int64)
    assert decode_ids(data, back, 4) == 16
    assert back.tolist() == ids.tolist()
    ids = np.array([-(2**63), -1, 2**63 - 1])
    data = np.zeros(25, np.uint8)[1:]
    assert encode_ids(ids, data, 8) == 24
    back = np.zeros(3, np.int64)
    decode_ids(data, back, 8)
    assert back.tolist() == ids.tolist()
    assert encode_ids(ids[:0], data[:0], 4) == 0
    assert [id_bytes(n) for n in (10, 2**32, 2**32 + 1, None)] == [4, 4, 8, 8]
    with pytest.raises(ValueError, match="3 ids take 24"):
        encode_ids(ids, data[:20], 8)
