"""Bytes by address inside Numba kernels: blocks of several mapped files are read by one kernel without an array each.

An address is an int64; the caller keeps what it points into alive. Numbers are read in the machine's byte order, at any
alignment. These can be called from kernels only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from .jit import I64, inline

__all__ = [
    "copy_bytes",
    "i32_at",
    "i64_at",
    "load_i64",
    "load_u16",
    "prefetch",
    "store_i64",
    "u32_at",
    "u64_at",
    "will_need",
    "zero_bytes",
]

_intrinsic: Any = None
with contextlib.suppress(ImportError):  # Numba belongs to the `cpu` extra
    from llvmlite import ir
    from numba import carray
    from numba.core import cgutils, types
    from numba.extending import intrinsic as _intrinsic


def _raw(result: str, *arguments: str) -> Callable[[Callable[..., Any]], Any]:
    """Make ``emit(builder, *values)`` callable from kernels; types by their Numba names."""

    def wrap(emit: Callable[..., Any]) -> Any:
        if _intrinsic is None:
            return emit
        signature = getattr(types, result)(*(getattr(types, a) for a in arguments))

        def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            value = emit(builder, *values)
            return cgutils.get_null_value(ir.LiteralStructType([]).as_pointer()) if value is None else value

        return _typed(signature, codegen, len(arguments))

    return wrap


def _typed(signature: Any, codegen: Any, count: int) -> Any:
    """Numba counts the parameters of the function it is given, so there is one for each number of them."""
    if count == 1:
        return _intrinsic(lambda _context, _a: (signature, codegen))
    if count == 2:
        return _intrinsic(lambda _context, _a, _b: (signature, codegen))
    return _intrinsic(lambda _context, _a, _b, _c: (signature, codegen))


def _pointer(builder: Any, address: Any, bits: int) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


@_raw("int64", "int64")
def load_i64(builder: Any, address: I64) -> Any:
    """The 8 bytes at ``address``."""
    return builder.load(_pointer(builder, address, 64), align=1)


@_raw("int64", "int64")
def load_u16(builder: Any, address: I64) -> Any:
    """The 2 bytes at ``address``, zero-extended."""
    return builder.zext(builder.load(_pointer(builder, address, 16), align=1), ir.IntType(64))


@_raw("none", "int64", "int64")
def store_i64(builder: Any, address: I64, value: I64) -> None:
    """Write 8 bytes."""
    builder.store(value, _pointer(builder, address, 64), align=1)


@_raw("none", "int64", "int64", "int64")
def copy_bytes(builder: Any, target: I64, source: I64, count: I64) -> None:
    """memcpy."""
    cgutils.raw_memcpy(builder, _pointer(builder, target, 8), _pointer(builder, source, 8), count, 1)


@_raw("none", "int64", "int64")
def zero_bytes(builder: Any, target: I64, count: I64) -> None:
    """memset to zero."""
    cgutils.memset(builder, _pointer(builder, target, 8), count, 0)


@_raw("none", "int64")
def prefetch(builder: Any, address: I64) -> None:
    """Ask for the cache line at ``address``, which need not be readable."""
    pointer = _pointer(builder, address, 8)
    word = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, word(0), word(3), word(1)])


@_raw("none", "int64", "int64")
def will_need(builder: Any, address: I64, count: I64) -> None:
    """Ask the system to read the pages of a mapped file ahead; ``address`` is that of a page."""
    word = ir.IntType(32)
    kind = ir.FunctionType(word, [address.type, count.type, word])
    function = cgutils.get_or_insert_function(builder.module, kind, "madvise")
    builder.call(function, [address, count, word(3)])  # MADV_WILLNEED: the same number on Linux and macOS


@_raw("voidptr", "int64")
def _at(builder: Any, address: I64) -> Any:
    return _pointer(builder, address, 8)


@inline
def i32_at(address: I64, count: I64) -> np.ndarray:
    """The int32 array at ``address``; nothing keeps it alive."""
    return carray(_at(address), (count,), np.int32)


@inline
def i64_at(address: I64, count: I64) -> np.ndarray:
    """The int64 array at ``address``."""
    return carray(_at(address), (count,), np.int64)


@inline
def u32_at(address: I64, count: I64) -> np.ndarray:
    """The uint32 array at ``address``."""
    return carray(_at(address), (count,), np.uint32)


@inline
def u64_at(address: I64, count: I64) -> np.ndarray:
    """The uint64 array at ``address``."""
    return carray(_at(address), (count,), np.uint64)
