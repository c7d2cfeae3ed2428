"""Rows of memory-mapped arrays into one batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dlrm.data.batch import ClickBatch
from embcache.jagged import KeyedJaggedTensor
from embcache.kernels.jit import kernel


class RowGather:
    """Calling it with int64 rows ``[B]`` gives their ClickBatch; holds only read-only state, so threads share it."""

    def __init__(
        self,
        features: Sequence[str],
        dense: np.ndarray,
        labels: np.ndarray,
        ids: np.ndarray,
        bags: dict[str, tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self._features = list(features)
        self._dense, self._labels, self._ids = (_frozen(a) for a in (dense, labels, ids))
        self._bags = [(_frozen(v), _frozen(o)) for v, o in bags.values()]
        bag_place = {f: k for k, f in enumerate(bags)}
        single_place = {f: k for k, f in enumerate(f for f in self._features if f not in bag_place)}
        self._bag_of = [bag_place.get(f, -1) for f in self._features]
        self._column_of = np.array([single_place.get(f, -1) for f in self._features], np.int64)
        self._dtype = torch.int32 if self._ids.dtype == np.int32 else torch.int64

    def __call__(self, rows: np.ndarray) -> ClickBatch:
        n, features = rows.shape[0], len(self._features)
        dense = torch.empty(n, self._dense.shape[1])
        labels = torch.empty(n)
        offsets = torch.empty(features * n + 1, dtype=torch.int64)
        offsets_np = offsets.numpy()
        if self._bags:
            sizes = np.ones((features, n), np.int64)
            for f, bag in enumerate(self._bag_of):
                if bag >= 0:
                    _bag_sizes(rows, self._bags[bag][1], sizes[f])
            offsets_np[0] = 0
            np.cumsum(sizes, out=offsets_np[1:])
        else:
            offsets_np[:] = np.arange(features * n + 1)
        values = torch.empty(int(offsets_np[-1]), dtype=self._dtype)
        starts = offsets_np[: features * n : n].copy() if n else np.zeros(features, np.int64)
        _gather_rows(rows, self._dense, self._labels, self._ids, self._column_of, starts,
                     dense.numpy(), labels.numpy(), values.numpy())  # fmt: skip
        for f, bag in enumerate(self._bag_of):
            if bag >= 0:
                _gather_bag(rows, *self._bags[bag], values.numpy()[starts[f] :])
        # Made here, so not checked again: torch's checks would start a thread pool in every worker.
        sparse = KeyedJaggedTensor.trusted(self._features, values, None, offsets, (n,) * features)
        return ClickBatch(dense, sparse, labels)


def _frozen(array: np.ndarray) -> np.ndarray:
    # Mapped and in-memory arrays look the same to Numba: one compiled kernel serves both.
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


@kernel
def _gather_rows(
    rows: np.ndarray,
    dense: np.ndarray,
    labels: np.ndarray,
    ids: np.ndarray,
    column_of: np.ndarray,
    starts: np.ndarray,
    out_dense: np.ndarray,
    out_labels: np.ndarray,
    out_values: np.ndarray,
) -> None:
    for i in range(rows.shape[0]):
        row = rows[i]
        out_labels[i] = labels[row]
        for d in range(dense.shape[1]):
            out_dense[i, d] = dense[row, d]
        for f in range(column_of.shape[0]):
            if column_of[f] >= 0:
                out_values[starts[f] + i] = ids[row, column_of[f]]


@kernel
def _bag_sizes(rows: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    for i in range(rows.shape[0]):
        out[i] = offsets[rows[i] + 1] - offsets[rows[i]]


@kernel
def _gather_bag(rows: np.ndarray, values: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    place = 0
    for i in range(rows.shape[0]):
        for k in range(offsets[rows[i]], offsets[rows[i] + 1]):
            out[place] = values[k]
            place += 1
