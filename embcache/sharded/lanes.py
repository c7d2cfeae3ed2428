"""Lanes: the roads between ranks. Each has a process group and one thread that does its operations in the order in
which they were submitted, so that operations of one lane meet their counterparts whatever the other lanes do.

Everything a lane carries is bytes. On gloo the group's own ``alltoall_base`` is called, past the checks of the public
wrapper, which cost as much as a small exchange does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from embcache.errors import RankFailed
from embcache.kernels.memory import huge_empty
from embcache.sharded.faults import watcher
from embcache.sharded.ledger import Ledger, Link

__all__ = ["NAMES", "Lane", "Lanes", "Pending"]

NAMES = ("ids", "rows", "grads", "dense", "control", "commit")
T = TypeVar("T")


class Pending(Future[T]):
    """The result of something submitted to a lane; waiting for it is counted."""

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self._lane = lane

    def result(self, timeout: float | None = None) -> T:
        if self.done():
            return super().result()
        begun = time.monotonic()
        try:
            return super().result(timeout)
        finally:
            self._lane.ledger.waited(self._lane.name, time.monotonic() - begun)


class Lane:
    """One lane. ``submit`` runs a function on the lane's thread; the operations below may be called there, and anywhere
    else they submit themselves and wait. All ranks must do the same operations in the same order."""

    def __init__(
        self, lanes: Lanes, name: str, group: Any, delays: tuple[int, float] | None, road: str | None = None
    ) -> None:
        self.road = name if road is None else road  # as the roll call knows it; ``name`` is the ledger's account
        self.name, self.rank, self.world, self.ledger = name, lanes.rank, lanes.world, lanes.ledger
        self.group = group
        self._lanes = lanes
        self._backend = None if group is None else group._get_backend(torch.device("cpu"))
        self._options = dist.AllToAllOptions()
        self._queue: queue.SimpleQueue[tuple[Pending[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._queue = queue.SimpleQueue()
        self._current: Pending[Any] | None = None
        self._memory: dict[str, Tensor] = {}
        self._max_delay = 0.0 if delays is None else delays[1]
        seed = [] if delays is None else [delays[0], lanes.rank, NAMES.index(name), *self.road[len(name) :].encode()]
        self._delays = np.random.default_rng(seed)
        self._thread = threading.Thread(target=self._work, name=f"embcache lane {self.road}", daemon=True)
        self._thread.start()

    # ---- the thread

    def submit(self, function: Callable[..., T], *arguments: Any) -> Pending[T]:
        """Run ``function(*arguments)`` on the lane's thread after everything submitted before."""
        if self._lanes.error is not None:
            raise self._lanes.error
        pending: Pending[T] = Pending(self)
        self._queue.put((pending, function, arguments))
        if self._lanes.error is not None:  # the lanes failed meanwhile: nobody will run it
            self._drain(self._lanes.error)
        return pending

    def _here(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run on the lane's thread and wait."""
        if threading.current_thread() is self._thread:
            return function(*arguments)
        return self.submit(function, *arguments).result()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            pending, function, arguments = job
            self._current = pending
            try:
                if self._lanes.error is not None:
                    raise self._lanes.error
                value = function(*arguments)
            except BaseException as error:
                _settle(pending, error=error)
            else:
                _settle(pending, value)
            self._current = None
            del job, pending, function, arguments  # what they hold is not kept until the next one

    def _drain(self, error: BaseException) -> None:
        """Fail what is running (it may be stuck in the group) and what has not begun."""
        current = self._current
        if current is not None and threading.current_thread() is not self._thread:
            _settle(current, error=error)
        while True:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                return
            if job is None:
                self._queue.put(None)
                return
            _settle(job[0], error=error)

    def stop(self) -> None:
        """End the thread after what has been submitted."""
        self._queue.put(None)
        self._thread.join(timeout=5.0 if self._lanes.error is not None else None)

    # ---- operations

    def header(self, rows: Any) -> np.ndarray:
        """int64 [world, n]: row p goes to rank p; row p of the result came from rank p."""
        rows = np.ascontiguousarray(rows, dtype=np.int64)
        if rows.ndim != 2 or rows.shape[0] != self.world:
            raise ValueError(f"a header has shape [{self.world}, n], not {list(rows.shape)}")
        return self._here(self._header, rows)

    def all_to_all(
        self,
        send: tuple[Any, Sequence[int] | np.ndarray] | list[Any],
        sizes: Sequence[int] | np.ndarray,
        out: Tensor | None = None,
    ) -> Tensor:
        """Bytes for every rank: ``send`` is a list of one array or tensor a rank, or (one array, bytes a rank), and
        ``sizes`` the bytes that come from each (known from a header). uint8 [sum(sizes)], by rank; in ``out`` if given.
        The own part is copied across; leave it empty where it is not wanted.
        """
        if isinstance(send, list):
            parts = [as_bytes(part) for part in send]
            split = [part.numel() for part in parts]
            if len(parts) != self.world:
                raise ValueError(f"{len(parts)} parts for {self.world} ranks")
            return self._here(self._all_to_all, parts, split, _integers(sizes), out)
        array, split = as_bytes(send[0]), _integers(send[1])
        return self._here(self._all_to_all, array, split, _integers(sizes), out)

    def all_gather(self, data: Any, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Everybody's bytes, by rank; ``sizes`` where they are known saves a header."""
        return self._here(self._all_gather, as_bytes(data), sizes)

    def broadcast(self, data: Any, root: int = 0) -> Tensor:
        """The root's bytes on every rank (what others give is ignored)."""
        return self._here(self._broadcast, as_bytes(data if self.rank == root else b""), root)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._here(self._header, np.zeros((self.world, 1), np.int64))

    def outbox(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of this lane's own memory to send from: only within a submitted function, until it ends."""
        return self._grown("outbox", nbytes)

    def inbox(self, nbytes: int) -> Tensor:
        """The same to receive into."""
        return self._grown("inbox", nbytes)

    def _grown(self, use: str, nbytes: int) -> Tensor:
        memory = self._memory.get(use)
        if memory is None or memory.numel() < nbytes:
            memory = self._memory[use] = huge_empty(nbytes + nbytes // 4)
        return memory[:nbytes]

    # ---- on the lane's thread

    def _header(self, rows: np.ndarray) -> np.ndarray:
        begun, end = self._enter(rows.shape[1] * 8 * (self.world - 1))
        out = torch.empty(rows.shape, dtype=torch.int64)
        self._group_op(out, torch.from_numpy(rows), [], [])
        self._leave(end)
        self.ledger.header_done(self.name, begun, rows.shape[1] * 8)
        return out.numpy()

    def _all_to_all(
        self, parts: Tensor | list[Tensor], split: list[int], sizes: list[int], out: Tensor | None
    ) -> Tensor:
        if isinstance(parts, list):
            send = self._grown("joined", sum(split))
            if parts:
                torch.cat(parts, out=send)
        else:
            send = parts
        total = sum(sizes)
        if out is None:
            out = torch.empty(total, dtype=torch.uint8)
        sent, received = sum(split) - split[self.rank], total - sizes[self.rank]
        begun, end = self._enter(max(sent, received))
        self._group_op(out[:total], send, sizes, split)
        self._leave(end)
        self.ledger.done(self.name, begun, split, sizes)
        return out[:total]

    def _all_gather(self, data: Tensor, sizes: Sequence[int] | None) -> list[Tensor]:
        if sizes is None:
            sizes = self._header(np.full((self.world, 1), data.numel()))[:, 0].tolist()
        split = [data.numel()] * self.world
        return list(self._all_to_all([data] * self.world, split, list(sizes), None).split(list(sizes)))

    def _broadcast(self, data: Tensor, root: int) -> Tensor:
        rows = np.zeros((self.world, 1), np.int64)
        rows[:] = data.numel()
        sizes = [0] * self.world
        sizes[root] = int(self._header(rows)[root, 0])
        parts = [data] * self.world
        return self._all_to_all(parts, [part.numel() for part in parts], sizes, None)

    def _group_op(self, out: Tensor, send: Tensor, sizes: list[int], split: list[int]) -> None:
        if self._backend is None:
            out.copy_(send)
            return
        try:
            self._backend.alltoall_base(out, send, sizes, split, self._options).wait()
        except RuntimeError as error:
            raise self._lanes.broken(self.road, error) from None

    def _enter(self, nbytes: int) -> tuple[float, tuple[float, str] | None]:
        """(when it began, when it may end): a delay of tests, the progress others may ask for, the emulated link."""
        if self._max_delay:
            time.sleep(self._delays.uniform(0.0, self._max_delay))
        self._lanes.count(self.road)
        begun = time.monotonic()
        if self.ledger.link is None:
            return begun, None
        entries = np.full((self.world, 1), time.monotonic_ns())
        seen = torch.empty_like(torch.from_numpy(entries))
        self._group_op(seen, torch.from_numpy(entries), [], [])
        return begun, (self.ledger.arrival(int(seen.max()) / 1e9, nbytes), self.name)

    def _leave(self, end: tuple[float, str] | None) -> None:
        if end is not None:
            left = end[0] - time.monotonic()
            if left > 0:
                time.sleep(left)
            else:
                self.ledger.overrun(self.name)


class Lanes:
    """The lanes of one group of ranks: ``ids``, ``rows``, ``grads``, ``dense``, ``control``, ``commit``.

    ``mesh`` is a one-dimensional device mesh or a process group; None is the default group, or this process alone
    where there is none. All its ranks make their lanes at the same point. ``seed_delays=(seed, seconds)`` sleeps a
    random time before each operation: results must not depend on it. ``emulate`` is a Link.
    """

    ids: Lane
    rows: Lane
    grads: Lane
    dense: Lane
    control: Lane
    commit: Lane

    def __init__(
        self, mesh: Any = None, emulate: Link | None = None, seed_delays: tuple[int, float] | None = None
    ) -> None:
        base = mesh.get_group() if hasattr(mesh, "get_group") else mesh
        alone = base is None and not (dist.is_available() and dist.is_initialized())
        self.rank, self.world = (0, 1) if alone else (dist.get_rank(base), dist.get_world_size(base))
        self.ranks = [0] if alone else list(dist.get_process_group_ranks(base or dist.group.WORLD))
        self.error: RankFailed | None = None
        self.ledger = Ledger(NAMES, self.rank, self.world, emulate)
        self._faults = None if self.world == 1 else watcher()
        if self._faults is not None:
            self._faults.listen(self.fail)
        self._lock = threading.Lock()
        groups = [None if self.world == 1 else _new_group(self.ranks, name) for name in NAMES]
        self._seed_delays = seed_delays
        self._lanes = [Lane(self, name, group, seed_delays) for name, group in zip(NAMES, groups, strict=True)]
        for lane in self._lanes:
            setattr(self, lane.name, lane)

    def __iter__(self) -> Any:
        return iter(self._lanes)

    def __getitem__(self, name: str) -> Lane:
        return self._lanes[NAMES.index(name)]

    def more(self, name: str) -> Lane:
        """Collective: a further road of the kind ``name`` for a thread of its own, whose operations would otherwise
        cross those of another thread; both share an account of the ledger."""
        road = f"{name}+{sum(lane.name == name for lane in self._lanes)}"
        lane = Lane(self, name, None if self.world == 1 else _new_group(self.ranks, road), self._seed_delays, road)
        self._lanes.append(lane)
        return lane

    def set_timeout(self, limit: timedelta) -> None:
        """From now on an operation that takes longer has failed; of the default group too. Every rank says so at the
        same point."""
        groups = [lane.group for lane in self._lanes if lane.group is not None]
        for group in [*groups, dist.distributed_c10d._get_default_group()] if groups else []:
            group._get_backend(torch.device("cpu")).set_timeout(limit)

    def count(self, name: str) -> None:
        """An operation begins: what the roll call compares."""
        if self._faults is not None:
            self._faults.progress[name] = self._faults.progress.get(name, 0) + 1

    def broken(self, name: str, error: BaseException) -> RankFailed:
        """The group of a lane has failed: find out who did, and fail everything that waits."""
        if self.error is None:
            assert self._faults is not None
            self.fail(self._faults.resolve(name, self.ranks, error))
        assert self.error is not None
        return self.error

    def fail(self, error: RankFailed) -> None:
        """Everything submitted, running or later, raises ``error``."""
        with self._lock:
            if self.error is None:
                self.error = error
        for lane in self._lanes:
            lane._drain(self.error)

    def close(self) -> None:
        """Finish what has been submitted and leave the groups; all ranks."""
        for lane in self._lanes:
            lane.stop()
        if self.error is None:
            for lane in self._lanes:
                if lane.group is not None:
                    dist.destroy_process_group(lane.group)


def as_bytes(data: Any) -> Tensor:
    """uint8 [n] over the memory of a contiguous tensor, array or bytes-like object."""
    if isinstance(data, Tensor):
        return data.detach().reshape(-1).view(torch.uint8)
    if isinstance(data, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


def _integers(values: Sequence[int] | np.ndarray) -> list[int]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _settle(pending: Pending[Any], value: Any = None, error: BaseException | None = None) -> None:
    try:
        if error is None:
            pending.set_result(value)
        else:
            pending.set_exception(error)
    except Exception:  # it was failed from outside meanwhile
        return


def _new_group(ranks: list[int], name: str) -> Any:
    timeout: timedelta = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
    partial = len(ranks) < dist.get_world_size()
    return dist.new_group(
        ranks, timeout=timeout, backend="gloo", use_local_synchronization=partial, group_desc=f"embcache {name}"
    )
