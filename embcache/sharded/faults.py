"""Who failed: the ranks tell one another through the store they met in, since a broken connection names nobody.

A rank that stops with an error stores it first. A rank whose collective dies or times out looks for that; where nobody
has said anything it calls the roll: every rank has a thread that answers, whatever else the rank is doing, so those
that stay silent died or hang. Where all answer, the one that has begun the fewest operations keeps the others waiting.
The first that is named is named by all, also by ranks that were not in a collective.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

import torch.distributed as dist

from embcache.errors import RankFailed

__all__ = ["Faults", "watcher"]

POLL = 0.25
ROLL_CALL = 3.0  # a rank that has not answered by then died or hangs


class Faults:
    """One rank's voice and ear; ``store`` is any ``torch.distributed`` store that the ranks share."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._own = store
        self._store = store.clone() if hasattr(store, "clone") else store  # a blocked wait holds its connection
        self.progress: dict[str, int] = {}  # operations begun by lane, kept by the lanes
        self._listeners: list[WeakMethod[Callable[[RankFailed], None]]] = []
        self._closed = threading.Event()
        self._answered = False
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="embcache faults", daemon=True).start()

    def listen(self, listener: Callable[[RankFailed], None]) -> None:
        """Call a bound method from the watching thread when another rank is said to have failed."""
        self._listeners.append(WeakMethod(listener))

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def report(self, error: BaseException) -> None:
        """This rank stops with ``error``: tell the others, unless somebody has been named before."""
        if isinstance(error, RankFailed):
            return
        self._name(self.rank, f"stopped with {type(error).__name__}: {error}"[:2000])

    def resolve(self, lane: str, ranks: Sequence[int], error: BaseException) -> RankFailed:
        """Whom to name when an operation on ``lane`` between ``ranks`` has failed with ``error``."""
        try:
            return self._resolve(lane, ranks, error)
        except Exception as gone:  # the store went with the rank or agent that held it
            return RankFailed(None, f"failed on lane {lane!r} ({error}); the store is gone too ({gone})")

    def _resolve(self, lane: str, ranks: Sequence[int], error: BaseException) -> RankFailed:
        self._call()
        end = time.monotonic() + ROLL_CALL
        while time.monotonic() < end and not self._store.check(["fault/first"]):
            if all(self._store.check([f"fault/alive/{r}"]) for r in ranks):
                break
            time.sleep(0.02)
        found = self._first()
        if found is not None:
            return found
        silent = [r for r in ranks if not self._store.check([f"fault/alive/{r}"])]
        if silent:
            return self._name(silent[0], f"died or hangs (noticed on lane {lane!r}: {error})")
        begun = {r: json.loads(self._store.get(f"fault/alive/{r}")).get(lane, 0) for r in ranks}
        last = min(begun, key=lambda r: (begun[r], r))
        if begun[last] == max(begun.values()):
            return self._name(None, f"failed on lane {lane!r}: {error}")
        behind = f"operation {begun[last] + 1} of lane {lane!r}, others are at {max(begun.values())}"
        return self._name(last, f"has not begun {behind} ({error})")

    def _name(self, rank: int | None, what: str) -> RankFailed:
        self._store.compare_set("fault/first", "", json.dumps([rank, what]))
        self._call()
        found = self._first()
        return found if found is not None else RankFailed(rank, what)

    def _first(self) -> RankFailed | None:
        if not self._store.check(["fault/first"]):
            return None
        rank, what = json.loads(self._store.get("fault/first"))
        return RankFailed(rank, what)

    def _call(self) -> None:
        self._answer()
        self._store.set("fault/call", "1")

    def _answer(self) -> None:
        with self._lock:
            if not self._answered:
                self._store.set(f"fault/alive/{self.rank}", json.dumps(self.progress))
                self._answered = True

    def _watch(self) -> None:
        store = self._own.clone() if hasattr(self._own, "clone") else self._own
        try:
            while not self._closed.wait(POLL):
                if not store.check(["fault/call"]):
                    continue
                self._answer()
                if store.check(["fault/first"]):
                    rank, what = json.loads(store.get("fault/first"))
                    for reference in self._listeners:
                        listener = reference()
                        if rank != self.rank and listener is not None:
                            listener(RankFailed(rank, what))
                    return
        except Exception:  # the store is gone: whoever exchanges something next notices
            return


_WATCHERS: dict[Any, Faults] = {}


def watcher() -> Faults:
    """That of the default group, made when it is first asked for."""
    group = dist.distributed_c10d._get_default_group()
    if group not in _WATCHERS:
        for old in _WATCHERS.values():
            old.close()
        _WATCHERS.clear()
        _WATCHERS[group] = Faults(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
    return _WATCHERS[group]
