"""The kernels: C++ where it loads or compiles, plain torch elsewhere, with the same functions and results."""

from __future__ import annotations

from types import ModuleType
from typing import Literal


def get(prefer: Literal["auto", "native", "reference"] = "auto") -> ModuleType:
    """The module of kernels to use.

    "auto": the C++ kernels, or, where they can neither be loaded nor compiled, plain torch after one warning.
    "native" raises RuntimeError instead; "reference" is plain torch.

    >>> get("reference").__name__
    'embcache.kernels.reference'
    """
    if prefer not in ("auto", "native", "reference"):
        raise ValueError(f"kernels.get: prefer = {prefer!r}, must be 'auto', 'native' or 'reference'")
    from . import reference

    if prefer == "reference":
        return reference
    from . import native

    if native.load():
        return native
    if prefer == "native":
        raise RuntimeError("the C++ kernels are not available: see `python -m embcache.doctor`")
    return reference
