"""Numba's ``njit`` for the serial kernels of both packages: they release the interpreter lock and are compiled once.

Serial on purpose: Numba's default threading layer is not safe to enter from two threads, so threads are Python's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

# 64-bit integers inside kernels, where Numba knows what they are and a type checker does not.
I64 = Any
U64 = Any

_njit: Any = None
with contextlib.suppress(ImportError):  # Numba belongs to the `cpu` extra
    from numba import njit as _njit


def kernel(function: F) -> F:
    """Compile ``function`` (nogil, cached on disk); without Numba, calling it says what is missing."""
    if _njit is not None:
        try:
            return _njit(nogil=True, cache=True)(function)
        except RuntimeError:  # no folder that Numba could keep its cache in
            return _njit(nogil=True)(function)

    def missing(*_args: Any, **_kwargs: Any) -> Any:
        raise ImportError(f"{function.__name__} needs Numba: pip install 'embcache[cpu]'")

    return cast(F, missing)


def inline(function: F) -> F:
    """A helper that kernels call: compiled into each of them."""
    return function if _njit is None else _njit(nogil=True, inline="never")(function)


def pasted(function: F) -> F:
    """A helper copied into its callers before compilation, where a call in the innermost loop would cost too much."""
    return function if _njit is None else _njit(nogil=True, inline="always")(function)
