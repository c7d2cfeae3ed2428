"""Which hash bucket a key belongs to: in exports, in filters that are kept per bucket, and between ranks.

``bucket = mix(key) >> 32, scaled to [0, buckets)``, where ``mix`` is the output function of SplitMix64 (Steele, Lea &
Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) at state ``key + 0x9E3779B97F4A7C15``, modulo
2^64. It shares no constant with the hash of the cache's index, so the keys of one bucket spread evenly there. Bucket
``b`` of ``n`` is made of buckets ``2b`` and ``2b + 1`` of ``2n``. File formats depend on the function: it never
changes.
"""

from __future__ import annotations

import numpy as np

from .jit import I64, U64, inline, kernel

__all__ = ["BUCKETS", "MAX_BUCKETS", "bucket", "bucket_of", "bucket_order"]

BUCKETS = 64  # where nobody says otherwise
MAX_BUCKETS = 1 << 16
_GAMMA, _FIRST, _SECOND = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_30, _27, _31, _32 = (np.uint64(n) for n in (30, 27, 31, 32))


@inline
def bucket(key: I64, buckets: U64) -> U64:
    """The bucket of one key, inside kernels."""
    x = np.uint64(key) + _GAMMA
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    x ^= x >> _31
    return ((x >> _32) * buckets) >> _32


@kernel
def _buckets(keys: np.ndarray, buckets: np.uint64, out: np.ndarray) -> None:
    for i in range(keys.shape[0]):
        out[i] = bucket(keys[i], buckets)


def bucket_of(keys: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """int32 [n]: the bucket in ``[0, buckets)`` of each int64 key; pure, without the interpreter lock.

    >>> bucket_of(np.array([0, 1, -1, 2**63 - 1, -(2**63)])).tolist()
    [56, 36, 57, 10, 18]
    """
    if not 1 <= buckets <= MAX_BUCKETS:
        raise ValueError(f"buckets = {buckets}, must be in [1, {MAX_BUCKETS}]")
    keys = np.ascontiguousarray(keys, dtype=np.int64)
    out = np.empty(keys.shape[0], dtype=np.int32)
    _buckets(keys, np.uint64(buckets), out)
    return out


def bucket_order(keys: np.ndarray, buckets: int = BUCKETS) -> tuple[np.ndarray, np.ndarray]:
    """(order int64 [n], starts int64 [buckets + 1]): positions of the keys grouped by bucket, otherwise as they were;
    those of bucket b are ``order[starts[b] : starts[b + 1]]``."""
    numbers = bucket_of(keys, buckets)
    starts = np.zeros(buckets + 1, dtype=np.int64)
    np.cumsum(np.bincount(numbers, minlength=buckets), out=starts[1:])
    return np.argsort(numbers, kind="stable"), starts
