"""Initial rows, serial and without the interpreter lock, for the threads that fill caches: the same bits as the native
``init_rows`` and as ``embcache.init.values``.

Philox runs over 16 counters at once, four columns each, in straight-line integer code that the compiler vectorises.

>>> from embcache.init import Constant
>>> table = TableConfig("t", num_embeddings=None, embedding_dim=2, init=Constant(0.5))
>>> rows = np.zeros((2, table.row_bytes), dtype=np.uint8)
>>> InitialRows(table).fill(rows, None, np.array([7, -1]))
>>> rows.view(np.float32)[:, :2].tolist()
[[0.5, 0.5], [0.5, 0.5]]
"""

from __future__ import annotations

import numpy as np

from ..config import DTYPES, TableConfig
from ..init import CONSTANT, TRUNCATED, TRUNCATED_LOW, UNIFORM, normal_table, table_key
from .jit import I64, U64, inline, kernel

DRAWN = 64  # columns drawn together
ROUNDS = 10
_MASK = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_FLOAT32, _BFLOAT16 = 0, 1


@inline
def _draw(key: U64, row_id: U64, first: I64, words: np.ndarray) -> None:
    """Random words of columns first .. first + 63 of an id (first a multiple of 4), stream 0; uint32 [64]."""
    low, high, block = row_id & _MASK, row_id >> _32, np.uint64(first // 4)
    for i in range(16):
        c0, c1, c2, c3 = low, high, block + np.uint64(i), np.uint64(0)
        k0, k1 = key & _MASK, key >> _32
        for _ in range(ROUNDS):
            p0, p1 = _M0 * c0, _M1 * c2
            c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _MASK, (p0 >> _32) ^ c3 ^ k1, p0 & _MASK
            k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
        words[4 * i] = np.uint32(c0)
        words[4 * i + 1] = np.uint32(c1)
        words[4 * i + 2] = np.uint32(c2)
        words[4 * i + 3] = np.uint32(c3)


@inline
def _normal_fixed(knots: np.ndarray, x: np.uint32, truncated: bool) -> np.int32:
    """Standard normal in units of 2^-28: linear interpolation between integer knots (``init.normal_table``)."""
    u = np.int64(x & np.uint32(0x7FFFFFFF))
    if truncated:
        u = TRUNCATED_LOW + ((u * (0x80000000 - TRUNCATED_LOW)) >> 31)
    w = u + 64
    s = (np.float64(w).view(np.int64) >> 52) - 1029  # floor(log2(w)) - 6, from the exponent
    i = s * 64 + (w >> s) - 64
    low = np.int64(knots[i])
    z = low + (((np.int64(knots[i + 1]) - low) * (w - ((w >> s) << s))) >> s)
    return np.int32(-z if x >> np.uint32(31) else z)


@inline
def _values(code: I64, p0: np.float32, p1: np.float32, words: np.ndarray, knots: np.ndarray, out: np.ndarray) -> None:
    """fp32 values of random words, as many as ``out`` holds."""
    if code == UNIFORM:
        step = p0 / np.float32(8388608.0)
        for i in range(out.shape[0]):
            out[i] = np.float32(np.int32(words[i] >> np.uint32(8)) - np.int32(8388608)) * step
    else:
        for i in range(out.shape[0]):
            fixed = np.float32(_normal_fixed(knots, words[i], code == TRUNCATED))
            out[i] = fixed * np.float32(2.0**-28) * p0
    if p1 != 0:
        for i in range(out.shape[0]):
            out[i] += p1


@inline
def _to_bfloat16(x: np.uint32) -> np.uint16:
    """Nearest, ties to even; ``x`` are the bits of a number that is no NaN."""
    wide, half = np.uint64(x), np.uint64(0x7FFF)
    return np.uint16((wide + half + ((wide >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16))


@inline
def _to_float16(x: np.uint32, value: np.float32) -> np.uint16:
    """Nearest, ties to even; ``x`` are the bits of ``value``, no NaN."""
    sign, a = np.int64((x >> np.uint32(16)) & np.uint32(0x8000)), np.int64(x & np.uint32(0x7FFFFFFF))
    if a >= 0x47800000:  # 65536 and beyond
        return np.uint16(sign | 0x7C00)
    if a < 0x38800000:  # below 2^-14 the unit is 2^-24
        return np.uint16(sign | np.int64(np.rint(abs(np.float64(value)) * 16777216.0)))
    return np.uint16(sign | ((a + 0xFFF + ((a >> 13) & 1) - 0x38000000) >> 13))


@inline
def _narrow(values: np.ndarray, bits: np.ndarray, dtype: I64, out: np.ndarray) -> None:
    """``values``, whose memory is ``bits``, as 16-bit numbers."""
    if dtype == _BFLOAT16:
        for i in range(out.shape[0]):
            out[i] = _to_bfloat16(bits[i])
    else:
        for i in range(out.shape[0]):
            out[i] = _to_float16(bits[i], values[i])


@kernel
def _fill(
    floats: np.ndarray,
    halves: np.ndarray,
    slots: np.ndarray,
    ids: np.ndarray,
    shape: tuple[int, int, int, int],
    chosen: tuple[int, float, float, int],
    state: np.ndarray,
    knots: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """Rows ``slots`` (empty: 0, 1, ...) of the slab, seen as fp32 and as 16-bit words, with those of ``ids``."""
    dim, dtype, state_at, first = shape
    code, p0, p1 = chosen[0], np.float32(chosen[1]), np.float32(chosen[2])
    values, key = scratch.view(np.float32), np.uint64(chosen[3])
    words, bits = scratch[:DRAWN], scratch[DRAWN:]
    values = values[DRAWN:]
    if code == CONSTANT:
        values[:] = p0
    for i in range(ids.shape[0]):
        at = slots[i] if slots.shape[0] else i
        row, narrow = floats[at], halves[at]
        for column in range(first // 4 * 4, first + dim, DRAWN):
            d, end = max(column - first, 0), min(column - first + DRAWN, dim)
            block = row[d:end] if dtype == _FLOAT32 else values[: end - d]
            if code != CONSTANT:
                _draw(key, np.uint64(ids[i]), column, words)
                _values(code, p0, p1, words[d + first - column :], knots, block)
            elif dtype == _FLOAT32:
                block[:] = p0
            if dtype != _FLOAT32:
                _narrow(values, bits, dtype, narrow[d:end])
        if dtype != _FLOAT32 and dim % 2 == 1:  # the gap before the state
            narrow[dim] = 0
        tail = row[state_at:]
        for j in range(state.shape[0]):
            tail[j] = state[j]
        tail[state.shape[0] :] = 0


_NO_SLOTS = np.empty(0, dtype=np.int64)


def init_rows(
    slab: np.ndarray,
    slots: np.ndarray | None,
    ids: np.ndarray,
    shape: tuple[int, int, int, int],
    chosen: tuple[int, float, float, int],
    state: np.ndarray,
    knots: np.ndarray,
) -> None:
    """Fill rows of ``slab`` (uint8 [capacity, row_bytes]) with initial weights and state, every other byte with 0.

    ``slots`` int64 [n] (None: rows 0 .. n - 1) and ``ids`` int64 [n]; ``shape``: dim, dtype code, byte of the state,
    first column in the rows that ids have; ``chosen``: init code, p0, p1, key as a signed integer; ``state`` fp32;
    ``knots`` int32, ``init.normal_table()``. Releases the interpreter lock; any number of threads may
    fill different rows.
    """
    if ids.shape[0]:
        dim, dtype, state_offset, first = shape
        scratch = np.empty(2 * DRAWN, dtype=np.uint32)
        at = _NO_SLOTS if slots is None else slots
        place = (dim, dtype, state_offset // 4, first)
        _fill(slab.view(np.float32), slab.view(np.uint16), at, ids, place, chosen, state, knots, scratch)


class InitialRows:
    """Initial rows of one table: a pure function of the id.

    The row of ``padding_idx`` has zero weights. Thread-safe.
    """

    def __init__(self, table: TableConfig) -> None:
        code, p0, p1 = table.init.code(table.num_embeddings, table.whole_dim)
        self._shape = table.embedding_dim, DTYPES[table.dtype], table.state_offset, table.first_column
        self._chosen = code, float(p0), float(p1), table_key(table.seed, table.random_name)
        self._state = np.array(table.optimizer.initial_state(table.embedding_dim), dtype=np.float32)
        self._knots = normal_table().numpy()
        self._padding = table.padding_idx
        self._weight_bytes = table.embedding_dim * table.dtype.itemsize

    def fill(self, slab: np.ndarray, slots: np.ndarray | None, ids: np.ndarray) -> None:
        """Rows ``slots`` (int64 [n]; None: 0 .. n - 1) of ``slab`` uint8 [capacity, row_bytes] become those of ``ids``
        int64 [n], all their bytes."""
        init_rows(slab, slots, ids, self._shape, self._chosen, self._state, self._knots)
        if self._padding is not None:
            at = np.flatnonzero(ids == self._padding)
            if len(at):
                slab[at if slots is None else slots[at], : self._weight_bytes] = 0
