"""Known answers, and permutations that are permutations."""

import numpy as np
import pytest

from dlrm.data import cells, hashing
from dlrm.data.order import SHUFFLES, epoch_order
from embcache.kernels.jit import kernel

MASK = 2**64 - 1


@kernel
def _mix(z):
    return hashing.mix64(z)


@kernel
def _row(key, size):
    return hashing.hashed_row(key, size)


@kernel
def _string(buf):
    return cells.parse_string(buf, 0, buf.shape[0])


def test_mix64_is_splitmix64() -> None:
    # First outputs of SplitMix64 from state 0 (the reference implementation's).
    state, known = 0, (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    for want in known:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        assert int(_mix(np.uint64(state))) == want
        assert hashing.mix_python(state - 0x9E3779B97F4A7C15 & MASK) == want


def test_fnv1a_known_answers() -> None:
    # FNV-1a 64 of "a" and "foobar" from the authors' test vectors, then mixed.
    for text, fnv in ((b"a", 0xAF63DC4C8601EC8C), (b"foobar", 0x85944171F73967E8)):
        got = int(_string(np.frombuffer(bytearray(text), np.uint8))) & MASK
        assert got == int(_mix(np.uint64(fnv)))


def test_hashed_rows_are_pinned_and_leave_row_0() -> None:
    assert [int(_row(np.int64(k), np.int64(1000))) for k in (0, 1, -1, 2**63 - 1, -(2**63), 0x68FD1E64)] == [
        1 + hashing.mix_python(k & MASK) % 999 for k in (0, 1, -1, 2**63 - 1, -(2**63), 0x68FD1E64)
    ]
    assert int(_row(np.int64(0), np.int64(1000))) == 1 + 0xE220A8397B1DCDAF % 999
    rows = {int(_row(np.int64(k), np.int64(5))) for k in range(200)}
    assert rows == {1, 2, 3, 4}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 17, 1000, 4096, 100_003])
def test_feistel_is_a_permutation_that_depends_on_its_key(n) -> None:
    orders = []
    for key in (1, 2):
        out = np.empty(n, np.int64)
        hashing.permute_range(0, out, n, np.uint64(key))
        assert np.array_equal(np.sort(out), np.arange(n))
        orders.append(out)
    if n >= 17:
        assert not np.array_equal(*orders)


@pytest.mark.parametrize("rows", [0, 1, 5, 2047, 2048, 2049, 131072, 131073, 300_000])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_an_epochs_order_visits_every_row_once(shuffle, rows) -> None:
    whole = epoch_order(shuffle, 5, 2, rows, 0, rows)
    assert np.array_equal(np.sort(whole), np.arange(rows))
    low, high = rows // 3, rows // 2 + (1 if rows else 0)
    assert np.array_equal(epoch_order(shuffle, 5, 2, rows, low, high), whole[low:high])


def test_block_shuffle_keeps_blocks_inside_their_window() -> None:
    from dlrm.data.order import BLOCK, WINDOW

    rows = 3 * BLOCK * WINDOW + 100
    order = epoch_order("blocks", 0, 0, rows, 0, BLOCK * WINDOW)
    assert len(set((order // BLOCK).tolist())) == WINDOW
    assert not np.array_equal(order, np.arange(BLOCK * WINDOW))


def test_a_permutation_looks_random() -> None:
    out = np.empty(100_000, np.int64)
    hashing.permute_range(0, out, 100_000, np.uint64(9))
    # Correlation with the identity of a random permutation: standard deviation 1/sqrt(n).
    assert abs(np.corrcoef(out, np.arange(100_000))[0, 1]) < 5 / np.sqrt(100_000)
    assert abs((np.diff(out) > 0).mean() - 0.5) < 0.01
