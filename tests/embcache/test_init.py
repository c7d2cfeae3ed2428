"""Initial rows: known answers, distribution, and the integer normal table."""

from __future__ import annotations

import math

import pytest
import torch

import embcache as ec
from embcache import init


def words(*counter: int) -> list[torch.Tensor]:
    return [torch.tensor(c) for c in counter]


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_known_answers(key: int, counter: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert tuple(int(w) for w in init.philox(key, *words(*counter))) == expected


def test_normal_table_checksum() -> None:
    table = init.normal_table()
    assert table.shape == (init.NORMAL_KNOTS,)
    assert init.normal_checksum(table) == init.NORMAL_CHECKSUM
    assert bool((table[1:] < table[:-1]).all())


def test_truncation_bound_is_the_cdf_at_minus_two() -> None:
    assert round(0.5 * math.erfc(2 / math.sqrt(2)) * 2**32) == init.TRUNCATED_LOW


def test_normal_is_within_two_hundred_thousandths_of_the_exact_inverse() -> None:
    special = pytest.importorskip("scipy.special")
    x = torch.cat([torch.arange(100_000), torch.randint(0, 2**31, (200_000,)), torch.tensor([2**31 - 1])])
    exact = torch.from_numpy(-special.ndtri((x.numpy() + 0.5) / 2**32))
    assert torch.allclose(init.normal_fixed(x, False).double() / 2**28, exact, rtol=0, atol=2e-5)
    assert torch.equal(init.normal_fixed(x + 2**31, False), -init.normal_fixed(x, False))


@pytest.mark.parametrize(
    ("which", "std", "low", "high"),
    [
        (init.Uniform(0.5), 0.5 / math.sqrt(3), -0.5, 0.5),
        (init.Uniform(0.5, center=2.0), 0.5 / math.sqrt(3), 1.5, 2.5),
        (init.Normal(2.0), 2.0, -13, 13),
        (init.Normal(1.0, mean=-3.0), 1.0, -9.5, 3.5),
        (init.TruncatedNormal(1.0), 0.8796, -2.0, 2.0),
    ],
)
def test_moments_and_bounds(which: init.Initializer, std: float, low: float, high: float) -> None:
    rows = init.rows(which, 3, "t", torch.arange(50_000), 8).double()
    center = getattr(which, "center", getattr(which, "mean", 0.0))
    assert abs(float(rows.mean()) - center) < 5 * std / math.sqrt(rows.numel())
    assert abs(float(rows.std()) / std - 1) < 0.01
    assert low <= float(rows.min())
    assert float(rows.max()) <= high


def test_a_row_depends_on_seed_table_id_and_column_alone() -> None:
    ids = torch.tensor([5, 2**40 + 1, -(2**63), 2**63 - 1])
    rows = init.rows(init.Normal(), 1, "a", ids, 7)
    assert torch.equal(rows[2:3], init.rows(init.Normal(), 1, "a", ids[2:3], 7))
    assert torch.equal(rows[:, :3], init.rows(init.Normal(), 1, "a", ids, 3))
    assert not torch.equal(rows, init.rows(init.Normal(), 2, "a", ids, 7))
    assert not torch.equal(rows, init.rows(init.Normal(), 1, "b", ids, 7))
    assert len({tuple(r) for r in rows.tolist()}) == 4


@pytest.mark.parametrize(
    "which",
    [init.Constant(0.3), init.Zeros(), init.Uniform(), init.Uniform(0.1, 1.0), init.Normal(0.02), init.Normal(1.0, 0.5),
     init.TruncatedNormal(0.1), init.XavierUniform()],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [1, 3, 4, 7, 16, 100])
def test_a_table_begins_with_the_function(backend: str, which: init.Initializer, dtype: torch.dtype, dim: int) -> None:
    table = ec.TableConfig("t", 37, dim, init=which, seed=9, dtype=dtype, optimizer=ec.optim.Adagrad(
        initial_accumulator_value=0.25))  # fmt: skip
    store = ec.EmbeddingStore([table], backend=backend)
    expected = init.rows(which, 9, "t", torch.arange(37), dim, 37).to(dtype)
    assert torch.equal(store.weight("t"), expected)
    assert torch.equal(store.state("t"), torch.full((37, dim), 0.25))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: init.Uniform(-1.0), "init.Uniform: scale = -1.0, must be >= 0"),
        (lambda: init.Normal(float("nan")), "init.Normal: std = nan, must be a finite number"),
        (lambda: init.TruncatedNormal(-1), "init.TruncatedNormal: std = -1, must be >= 0"),
        (lambda: init.XavierUniform().code(None, 4), "init.XavierUniform needs num_embeddings"),
    ],
)
def test_bad_values_raise(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]
