"""Loader: batches of a source's split, gathered ahead by threads, from any exact position.

Batch ``t`` of epoch ``e`` holds positions ``[t * B, (t + 1) * B)`` of the epoch's order, a function of (seed, e);
rank ``r`` of ``w`` gets its contiguous share of that global batch, so shares of all ranks make the same batches for
every world size. Nothing else is remembered: starting anywhere costs nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from dlrm.data.batch import ClickBatch
from dlrm.data.cache import Split
from dlrm.data.order import SHUFFLES, epoch_order


class Source(Protocol):
    """What a Loader reads: a ColumnCache, or a SyntheticLog."""

    @property
    def splits(self) -> dict[str, Split]:
        """Name -> rows."""

    def gather(self, rows: np.ndarray) -> ClickBatch:
        """The batch of these rows (int64 ``[B]``); called from several threads."""


class Loader:
    """Iterating gives the batches of one epoch; the next iteration gives the next epoch.

    ``batch_size`` is the global batch; ``len(loader)`` counts global batches. ``shuffle``: False/"none", True/"rows",
    or "blocks" (see :mod:`dlrm.data.order`). ``prefetch`` batches are gathered ahead by ``workers`` threads; 0 gathers
    in the caller's thread. A worker's error is raised in the consumer at its batch. Threads end with the iteration,
    also when it is left early.
    """

    def __init__(
        self,
        source: Source,
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
        if split not in source.splits:
            raise KeyError(f"no split {split!r}; there are {', '.join(source.splits)}")
        if batch_size < 1 or workers < 1 or prefetch < 0:
            raise ValueError(f"batch_size {batch_size} and workers {workers} must be >= 1, prefetch {prefetch} >= 0")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} outside [0, {world_size})")
        self.source, self.batch_size, self.seed, self.drop_last = source, batch_size, seed, drop_last
        self.shuffle = ("rows" if shuffle else "none") if isinstance(shuffle, bool) else shuffle
        if self.shuffle not in SHUFFLES:
            raise ValueError(f"shuffle: expected one of {', '.join(SHUFFLES)}, found {shuffle!r}")
        self.rank, self.world_size, self.prefetch, self.workers = rank, world_size, prefetch, workers
        self._rows = source.splits[split]
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
        return self.source.gather(rows)


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
