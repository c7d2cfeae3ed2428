"""Rows of fp32 to and from the bytes that travel: fp32, fp16, bf16, and int8 with a scale and a minimum a row.

One call does many blocks of rows (tables x ranks), described by a line of addresses each. The bits are a function of
the values alone: integer arithmetic for the 16-bit formats (round to nearest even, overflow to infinity, NaN stays
NaN), and for int8 IEEE fp32 operations without contraction.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from .jit import I64, inline, kernel
from .rawmem import _raw, copy_bytes, prefetch

carray: Any = None
with contextlib.suppress(ImportError):  # Numba belongs to the `cpu` extra
    from llvmlite import ir
    from numba import carray

__all__ = ["FIELDS", "decode_bf16", "decode_fp16", "decode_fp32", "decode_ids", "decode_int8"]
__all__ += ["encode_bf16", "encode_fp16", "encode_fp32", "encode_ids", "encode_int8"]

# A block: address of the rows (fp32, C-contiguous), address of the indices of its rows in it (0: the first ones),
# whether those are int64 (else int32), how many, columns, address of its bytes.
ROWS, INDEX, WIDE, COUNT, DIM, DATA = range(6)
FIELDS = 6
AHEAD = 12

_U = np.uint32
_SIGN, _LOW = _U(0x80000000), _U(0x7FFFFFFF)
_QUARTER = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, to nearest even, in the low bits


@_raw("voidptr", "int64")
def _pointer_to(builder: Any, address: I64) -> Any:
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


@_raw("float32", "uint32")
def _as_f32(builder: Any, bits: Any) -> Any:
    return builder.bitcast(bits, ir.FloatType())


@_raw("uint32", "float32")
def _as_u32(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, ir.IntType(32))


@_raw("float32", "int64")
def _load_f32(builder: Any, address: I64) -> Any:
    return builder.load(builder.inttoptr(address, ir.FloatType().as_pointer()), align=1)


@_raw("none", "int64", "float32")
def _store_f32(builder: Any, address: I64, value: Any) -> None:
    builder.store(value, builder.inttoptr(address, ir.FloatType().as_pointer()), align=1)


@inline
def _row(part: np.ndarray, i: I64) -> I64:
    """The address of row ``i`` of a block."""
    if part[INDEX] != 0:
        if part[WIDE] != 0:
            i = carray(_pointer_to(part[INDEX]), (part[COUNT],), np.int64)[i]
        else:
            i = np.int64(carray(_pointer_to(part[INDEX]), (part[COUNT],), np.int32)[i])
    return part[ROWS] + i * part[DIM] * 4


@inline
def _ahead(part: np.ndarray, i: I64) -> None:
    """Rows in random order come from memory while those before them are converted."""
    if part[INDEX] != 0 and i + AHEAD < part[COUNT]:
        address = _row(part, i + AHEAD)
        for line in range(0, part[DIM] * 4, 64):
            prefetch(address + line)


@inline
def _runs(part: np.ndarray) -> tuple[I64, I64]:
    """(runs, values a run): rows that follow one another are one run."""
    if part[INDEX] == 0:
        return np.int64(1), part[COUNT] * part[DIM]
    return part[COUNT], part[DIM]


@inline
def _to_bf16(source: np.ndarray, out: np.ndarray) -> None:
    for k in range(source.shape[0]):
        u = source[k]
        rounded = (u + _U(0x7FFF) + ((u >> _U(16)) & _U(1))) >> _U(16)
        nan = (u >> _U(16)) | _U(0x40)
        out[k] = np.uint16(nan if (u & _LOW) > _U(0x7F800000) else rounded)


@inline
def _from_bf16(source: np.ndarray, out: np.ndarray) -> None:
    for k in range(source.shape[0]):
        out[k] = _U(source[k]) << _U(16)


@inline
def _to_fp16(source: np.ndarray, out: np.ndarray) -> None:
    for k in range(source.shape[0]):
        sign, u = (source[k] & _SIGN) >> _U(16), source[k] & _LOW
        normal = (u - _U(0x38000000) + _U(0xFFF) + ((u >> _U(13)) & _U(1))) >> _U(13)
        # below 2^-14: adding 0.5 leaves the wanted bits at the bottom of the mantissa, rounded to nearest even
        small = _as_u32(_as_f32(u) + np.float32(0.5)) - _U(0x3F000000)
        special = _U(0x7E00) if u > _U(0x7F800000) else _U(0x7C00)
        value = special if u >= _U(0x47800000) else (small if u < _U(0x38800000) else normal)
        out[k] = np.uint16(sign | value)


@inline
def _from_fp16(source: np.ndarray, out: np.ndarray) -> None:
    for k in range(source.shape[0]):
        h = _U(source[k])
        sign, u = (h & _U(0x8000)) << _U(16), h & _U(0x7FFF)
        normal = (u << _U(13)) + _U(0x38000000)
        small = _as_u32(np.float32(np.int32(u)) * np.float32(2.0**-24))
        special = (u << _U(13)) + _U(0x70000000)
        value = special if u >= _U(0x7C00) else (small if u < _U(0x400) else normal)
        out[k] = sign | value


@inline
def _ordered(u: np.uint32) -> np.int32:
    """A float's bits as an integer of the same order (-0 just below +0, infinities and NaN outermost)."""
    s = np.int32(u)
    return np.int32(s ^ ((s >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inline
def _from_ordered(s: np.int32) -> np.float32:
    return _as_f32(_U(s ^ ((s >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@inline
def _to_int8(source: np.ndarray, out: np.ndarray, head: I64) -> None:
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for k in range(source.shape[0]):
        s = _ordered(source[k])
        low = min(low, s)
        high = max(high, s)
    if high >= np.int32(0x7F800000) or low <= np.int32(-0x7F800001):  # a NaN or an infinity
        out[:] = 0
        _store_f32(head, np.float32(np.nan))
        _store_f32(head + 4, np.float32(np.nan))
        return
    least = _from_ordered(low)
    extent = _from_ordered(high) - least
    if low == high:
        extent = np.float32(0.0)
    if np.float32(1e-30) < extent < np.float32(3e38):
        inverse = np.float32(255.0) / extent
        for k in range(source.shape[0]):
            out[k] = np.uint8(_as_u32((_as_f32(source[k]) - least) * inverse + _QUARTER))
    elif extent > np.float32(0.0):  # where fp32 would overflow or lose everything
        wide = np.float64(_from_ordered(high)) - np.float64(least)
        for k in range(source.shape[0]):
            part = (np.float64(_as_f32(source[k])) - np.float64(least)) / wide * 255.0
            out[k] = np.uint8(_as_u32(np.float32(part) + _QUARTER))
        extent = np.float32(0.0)
        _store_f32(head, np.float32(wide / 255.0))
        _store_f32(head + 4, least)
        return
    else:
        out[:] = 0
    _store_f32(head, extent / np.float32(255.0))
    _store_f32(head + 4, least)


@inline
def _from_int8(source: np.ndarray, out: np.ndarray, head: I64) -> None:
    scale, least = _load_f32(head), _load_f32(head + 4)
    if scale == np.float32(0.0):  # exact, also for -0
        for k in range(source.shape[0]):
            out[k] = least
        return
    if scale > np.float32(1e36):  # 255 scales overflow before the minimum is added
        for k in range(source.shape[0]):
            wide = np.float64(source[k]) * np.float64(scale) + np.float64(least)
            out[k] = np.float32(min(wide, 3.4028234663852886e38))
        return
    for k in range(source.shape[0]):
        out[k] = np.float32(source[k]) * scale + least


@kernel
def encode_fp32(parts: np.ndarray) -> None:
    """Copy the rows of every block of ``parts`` int64 [n, FIELDS]."""
    for p in range(parts.shape[0]):
        part = parts[p]
        runs, length = _runs(part)
        for i in range(runs):
            _ahead(part, i)
            copy_bytes(part[DATA] + i * length * 4, _row(part, i), length * 4)


@kernel
def decode_fp32(parts: np.ndarray) -> None:
    """Copy them back."""
    for p in range(parts.shape[0]):
        part = parts[p]
        runs, length = _runs(part)
        for i in range(runs):
            _ahead(part, i)
            copy_bytes(_row(part, i), part[DATA] + i * length * 4, length * 4)


@kernel
def encode_bf16(parts: np.ndarray) -> None:
    """fp32 to bf16; the address of a block's bytes is even."""
    for p in range(parts.shape[0]):
        part = parts[p]
        runs, length = _runs(part)
        for i in range(runs):
            _ahead(part, i)
            source = carray(_pointer_to(_row(part, i)), (length,), np.uint32)
            _to_bf16(source, carray(_pointer_to(part[DATA] + i * length * 2), (length,), np.uint16))


@kernel
def decode_bf16(parts: np.ndarray) -> None:
    """bf16 to fp32."""
    for p in range(parts.shape[0]):
        part = parts[p]
        runs, length = _runs(part)
        for i in range(runs):
            _ahead(part, i)
            source = carray(_pointer_to(part[DATA] + i * length * 2), (length,), np.uint16)
            _from_bf16(source, carray(_pointer_to(_row(part, i)), (length,), np.uint32))


@kernel
def encode_fp16(parts: np.ndarray) -> None:
    """fp32 to fp16; the address of a block's bytes is even."""
    for p in range(parts.shape[0]):
        part = parts[p]
        runs, length = _runs(part)
        for i in range(runs):
            _ahead(part, i)
            source = carray(_pointer_to(_row(part, i)), (length,), np.uint32)
            _to_fp16(source, carray(_pointer_to(part[DATA] + i * length * 2), (length,), np.uint16))


@kernel
def decode_fp16(parts: np.ndarray) -> None:
    """fp16 to fp32."""
    for p in range(parts.shape[0]):
        part = parts[p]
        runs, length = _runs(part)
        for i in range(runs):
            _ahead(part, i)
            source = carray(_pointer_to(part[DATA] + i * length * 2), (length,), np.uint16)
            _from_fp16(source, carray(_pointer_to(_row(part, i)), (length,), np.uint32))


@kernel
def encode_int8(parts: np.ndarray) -> None:
    """fp32 to int8: of a block first scale and minimum of each row, then the bytes of all."""
    for p in range(parts.shape[0]):
        part = parts[p]
        body = part[DATA] + part[COUNT] * 8
        for i in range(part[COUNT]):
            _ahead(part, i)
            source = carray(_pointer_to(_row(part, i)), (part[DIM],), np.uint32)
            out = carray(_pointer_to(body + i * part[DIM]), (part[DIM],), np.uint8)
            _to_int8(source, out, part[DATA] + i * 8)


@kernel
def decode_int8(parts: np.ndarray) -> None:
    """int8 to fp32."""
    for p in range(parts.shape[0]):
        part = parts[p]
        body = part[DATA] + part[COUNT] * 8
        for i in range(part[COUNT]):
            _ahead(part, i)
            source = carray(_pointer_to(body + i * part[DIM]), (part[DIM],), np.uint8)
            _from_int8(source, carray(_pointer_to(_row(part, i)), (part[DIM],), np.float32), part[DATA] + i * 8)


@kernel
def encode_ids(ids: np.ndarray, out: np.ndarray) -> None:
    """int64 ids to uint32 or int64."""
    for i in range(ids.shape[0]):
        out[i] = ids[i]


@kernel
def decode_ids(data: np.ndarray, ids: np.ndarray) -> None:
    """And back."""
    for i in range(data.shape[0]):
        ids[i] = np.int64(data[i])
