"""The one transform of dense values, used by every reader: log1p of the value clipped at 0; missing = 0."""

from __future__ import annotations

import numpy as np

from embcache.kernels.jit import inline


@inline
def log1p_clipped(x: float) -> np.float32:
    """``float32(log(1 + max(x, 0)))``, computed in double precision."""
    return np.float32(np.log1p(max(x, 0.0)))
