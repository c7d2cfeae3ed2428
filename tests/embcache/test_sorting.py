"""Sorting inside kernels beside numpy's stable sort."""

from __future__ import annotations

import numpy as np
import pytest

from embcache.kernels.jit import kernel
from embcache.kernels.sorting import sort_pairs


@kernel
def sort(keys: np.ndarray, payload: np.ndarray) -> None:
    sort_pairs(keys, payload)


@pytest.mark.parametrize("n", [0, 1, 2, 23, 24, 25, 300, 5000])
@pytest.mark.parametrize("high", [1, 3, 200, 2**17, 2**40, 2**64])
def test_pairs_are_sorted_equal_ones_in_their_order(n: int, high: int) -> None:
    rng = np.random.default_rng(n)
    for first in (0, 2**64 - high):
        given = rng.integers(first, first + high - 1, n, dtype=np.uint64, endpoint=True)
        keys, payload = given.copy(), np.arange(n, dtype=np.int64)
        sort(keys, payload)
        order = np.argsort(given, kind="stable")
        assert np.array_equal(payload, order)
        assert np.array_equal(keys, given[order])
