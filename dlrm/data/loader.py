"""Loader: batches of a cache's split, gathered ahead by threads, from any exact position.

Batch ``t`` of epoch ``e`` holds positions ``[t * B, (t + 1) * B)`` of the epoch's order, a function of (seed, e);
rank ``r`` of ``w`` gets its contiguous share of that global batch, so shares of all ranks make the same batches for
every world size. Nothing else is remembered: starting anywhere costs nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from dlrm.data.batch import ClickBatch
from dlrm.data.cache import ColumnCache
from dlrm.data.jit import kernel
from dlrm.data.order import SHUFFLES, epoch_order
from embcache.jagged import KeyedJaggedTensor


class Loader:
    """Iterating gives the batches of one epoch; the next iteration gives the next epoch.

    ``batch_size`` is the global batch; ``len(loader)`` counts global batches. ``shuffle``: False/"none", True/"rows",
    or "blocks" (see :mod:`dlrm.data.order`). ``prefetch`` batches are gathered ahead by ``workers`` threads; 0 gathers
    in the caller's thread. A worker's error is raised in the consumer at its batch. Threads end with the iteration,
    also when it is left early.
    """

    def __init__(
        self,
        cache: ColumnCache,
        split: str,
        batch_size: int,
        *,
        shuffle: bool | str = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        prefetch: int = 4,
        workers: int = 1,
    ) -> None:
        if split not in cache.splits:
            raise KeyError(f"no split {split!r}; this cache has {', '.join(cache.splits)}")
        if batch_size < 1 or workers < 1 or prefetch < 0:
            raise ValueError(f"batch_size {batch_size} and workers {workers} must be >= 1, prefetch {prefetch} >= 0")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} outside [0, {world_size})")
        self.cache, self.batch_size, self.seed, self.drop_last = cache, batch_size, seed, drop_last
        self.shuffle = {False: "none", True: "rows"}.get(shuffle, shuffle) if isinstance(shuffle, bool) else shuffle
        if self.shuffle not in SHUFFLES:
            raise ValueError(f"shuffle: expected one of {', '.join(SHUFFLES)}, found {shuffle!r}")
        self.rank, self.world_size, self.prefetch, self.workers = rank, world_size, prefetch, workers
        self._rows = cache.splits[split]
        self._gather = _Gather(cache)
        self.epoch, self.batch = 0, 0

    def __len__(self) -> int:
        """Global batches in an epoch."""
        whole, rest = divmod(len(self._rows), self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def set_position(self, epoch: int, batch: int) -> None:
        """The next iteration starts at this batch of this epoch; the one after at the next epoch's first."""
        if epoch < 0 or not 0 <= batch <= len(self):
            raise ValueError(f"position ({epoch}, {batch}): epoch >= 0 and batch in [0, {len(self)}] expected")
        self.epoch, self.batch = epoch, batch

    def __iter__(self) -> Iterator[ClickBatch]:
        epoch, first = self.epoch, self.batch
        self.epoch, self.batch = epoch + 1, 0
        if self.prefetch == 0:
            return (self.get(epoch, t) for t in range(first, len(self)))
        return _Ahead(self, epoch, first)

    def get(self, epoch: int, t: int) -> ClickBatch:
        """Batch ``t`` of an epoch, this rank's share, without moving the position."""
        start = t * self.batch_size
        n = min(self.batch_size, len(self._rows) - start)
        low, high = n * self.rank // self.world_size, n * (self.rank + 1) // self.world_size
        places = epoch_order(self.shuffle, self.seed, epoch, len(self._rows), start + low, start + high)
        if isinstance(self._rows, range):
            rows = places + self._rows.start
        else:
            rows = np.ascontiguousarray(self._rows[places], np.int64)
        return self._gather(rows)


class _Ahead(Iterator[ClickBatch]):
    """One epoch, gathered ahead. Closing it, or dropping it, ends its threads."""

    def __init__(self, loader: Loader, epoch: int, first: int) -> None:
        self._loader, self._epoch, self._next, self._end = loader, epoch, first, len(loader)
        self._pool = ThreadPoolExecutor(loader.workers, thread_name_prefix="dlrm-loader")
        self._waiting: deque[Future[ClickBatch]] = deque()
        self._finalizer = weakref.finalize(self, _shut, self._pool)
        self._fill()

    def _fill(self) -> None:
        while self._next < self._end and len(self._waiting) < self._loader.prefetch:
            self._waiting.append(self._pool.submit(self._loader.get, self._epoch, self._next))
            self._next += 1

    def __next__(self) -> ClickBatch:
        if not self._waiting:
            self.close()
            raise StopIteration
        try:
            batch = self._waiting.popleft().result()
        except BaseException:
            self.close()
            raise
        self._fill()
        return batch

    def close(self) -> None:
        """Stop gathering and end the threads."""
        self._waiting.clear()
        self._next = self._end
        self._finalizer()


def _shut(pool: ThreadPoolExecutor) -> None:
    pool.shutdown(wait=True, cancel_futures=True)


class _Gather:
    """Rows of a cache -> one ClickBatch; holds only read-only state, so threads share it."""

    def __init__(self, cache: ColumnCache) -> None:
        self._features = list(cache.features)
        self._dense, self._labels, self._ids = (_frozen(a) for a in (cache.dense, cache.labels, cache.ids))
        self._bags = [(_frozen(v), _frozen(o)) for v, o in cache.bags.values()]
        bag_place = {f: k for k, f in enumerate(cache.bags)}
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
        return ClickBatch(dense, KeyedJaggedTensor(self._features, values, offsets=offsets), labels)


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
