"""Counts of ids that have no row yet (``config.Admission``)."""

from __future__ import annotations

import numpy as np

from ..config import Admission
from ..kernels import lifetime
from ..kernels.buckets import BUCKETS, bucket_of


def admission_bytes(admission: Admission) -> int:
    """Bytes of a filter's cells."""
    return BUCKETS * -(-admission.cells // BUCKETS) * (1 if admission.min_count <= 255 else 4)


class AdmissionFilter:
    """Counting Bloom filter of one table. ``cells`` [64, n], uint8 or int32, a row per hash bucket.

    Which ids it admits depends on the multiset of what was counted, not on its order. Not thread-safe.

    >>> known = AdmissionFilter(Admission(min_count=3))
    >>> known.count(np.array([7, -7]), np.array([2, 3]))
    >>> known.admitted(np.array([7, -7, 8])).tolist()
    [False, True, False]
    """

    def __init__(self, admission: Admission) -> None:
        self.min_count = admission.min_count
        kind = np.uint8 if admission.min_count <= 255 else np.int32
        self.cells = np.zeros((BUCKETS, -(-admission.cells // BUCKETS)), dtype=kind)

    def count(self, ids: np.ndarray, counts: np.ndarray) -> None:
        """``ids`` int64 [n] occurred ``counts`` times."""
        lifetime.count(self.cells, bucket_of(ids), ids, counts, self.min_count)

    def admitted(self, ids: np.ndarray) -> np.ndarray:
        """bool [n]: whether the count has reached ``min_count``."""
        out = np.empty(len(ids), dtype=np.int64)
        lifetime.least(self.cells, bucket_of(ids), ids, out)
        return out >= self.min_count

    def clear(self) -> None:
        """Nothing was counted."""
        self.cells.fill(0)
