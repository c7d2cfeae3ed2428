"""What the exchange costs: payload bytes by lane and peer, seconds in operations, seconds that callers waited; and the
emulated link.

A link is emulated by sleeping, so that overlap can be measured where the ranks share a machine: each rank has one link
for all its lanes. An operation takes it when the last peer has entered, after what the link already carries; it is busy
for the larger of the bytes sent and received (both directions at once) over the bandwidth, and the operation ends
a latency later. Numbers measured so are emulated and say so; a real operation that takes longer than that is counted as
an overrun.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Account", "Ledger", "Link"]


@dataclass(frozen=True)
class Link:
    """An emulated link: bits a second in each direction, and seconds from the last byte sent to its arrival.

    >>> Link(gigabits=10).seconds(1_250_000)
    0.001
    """

    gigabits: float
    latency: float = 50e-6

    def seconds(self, nbytes: int) -> float:
        """How long it is busy with so many bytes."""
        return nbytes * 8 / (self.gigabits * 1e9)


@dataclass
class Account:
    """One lane's sums. Bytes are by peer (the own rank's stay zero); headers are counted apart from payload."""

    world: int
    operations: int = 0
    headers: int = 0
    header_bytes: int = 0  # sent, to all peers
    seconds: float = 0.0  # from begun to done
    waited: float = 0.0  # the main thread in result()
    waited_behind: float = 0.0  # other threads in result()
    overruns: int = 0
    sent: np.ndarray = field(init=False)
    received: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.sent, self.received = np.zeros(self.world, np.int64), np.zeros(self.world, np.int64)

    def values(self) -> dict[str, Any]:
        """As plain numbers and lists."""
        out = {k: v for k, v in vars(self).items() if k != "world"}
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in out.items()}


class Ledger:
    """The accounts of one rank's lanes."""

    def __init__(self, names: Sequence[str], rank: int = 0, world: int = 1, link: Link | None = None) -> None:
        self.rank, self.world, self.link = rank, world, link
        self.accounts = {name: Account(world) for name in names}
        self.trace: list[tuple[str, float, float, int]] | None = None  # a list takes (lane, begun, done, bytes sent)
        self._lock = threading.Lock()
        self._free = 0.0  # when the emulated link is free

    # ---- written by lanes

    def done(
        self, name: str, begun: float, sent: Sequence[int] | np.ndarray, received: Sequence[int] | np.ndarray
    ) -> None:
        """An operation that carried payload has ended."""
        account, now = self.accounts[name], time.monotonic()
        with self._lock:
            account.operations += 1
            account.seconds += now - begun
            mine = account.sent[self.rank], account.received[self.rank]
            account.sent += sent
            account.received += received
            account.sent[self.rank], account.received[self.rank] = mine
        if self.trace is not None:
            self.trace.append((name, begun, now, int(np.sum(sent))))

    def header_done(self, name: str, begun: float, row_bytes: int) -> None:
        """A header of ``row_bytes`` to each peer has ended."""
        account, now = self.accounts[name], time.monotonic()
        with self._lock:
            account.headers += 1
            account.header_bytes += row_bytes * (self.world - 1)
            account.seconds += now - begun
        if self.trace is not None:
            self.trace.append((name, begun, now, row_bytes * (self.world - 1)))

    def waited(self, name: str, seconds: float) -> None:
        """A thread waited for a result of this lane."""
        account = self.accounts[name]
        with self._lock:
            if threading.current_thread() is threading.main_thread():
                account.waited += seconds
            else:
                account.waited_behind += seconds

    def arrival(self, last_entry: float, nbytes: int) -> float:
        """When an operation of ``nbytes`` ends on the emulated link, whose time it takes."""
        assert self.link is not None
        with self._lock:
            self._free = max(self._free, last_entry) + self.link.seconds(nbytes)
            return self._free + self.link.latency

    def overrun(self, name: str) -> None:
        """A real operation took longer than the emulated link would have."""
        with self._lock:
            self.accounts[name].overruns += 1

    # ---- read by people and tests

    def report(self) -> dict[str, Any]:
        """Everything since the beginning, as plain numbers (JSON)."""
        with self._lock:
            lanes = {name: account.values() for name, account in self.accounts.items()}
        return {"rank": self.rank, "world": self.world, "emulated": self._emulated(), "lanes": lanes}

    def mark(self) -> dict[str, Any]:
        """A point to count from with ``since``."""
        return self.report()

    def since(self, mark: dict[str, Any]) -> dict[str, Any]:
        """The report of what happened after ``mark``."""
        now = self.report()
        for name, lane in now["lanes"].items():
            before = mark["lanes"][name]
            for key, value in lane.items():
                if isinstance(value, list):
                    lane[key] = [a - b for a, b in zip(value, before[key], strict=True)]
                else:
                    lane[key] = value - before[key]
        return now

    def sent(self, name: str) -> int:
        """Payload bytes sent to others on a lane since the beginning."""
        return int(self.accounts[name].sent.sum())

    def describe(self) -> str:
        """A table for people."""
        link = self._emulated()
        lines = [f"rank {self.rank} of {self.world}" + (f", emulated link: {link['text']}" if link else "")]
        lines.append(f"{'lane':8} {'ops':>7} {'sent MB':>10} {'received MB':>12} {'seconds':>9} {'waited':>9}")
        for name, lane in self.report()["lanes"].items():
            sent, received = sum(lane["sent"]) / 1e6, sum(lane["received"]) / 1e6
            seconds = f"{lane['seconds']:9.3f} {lane['waited']:9.3f}"
            lines.append(f"{name:8} {lane['operations']:7d} {sent:10.3f} {received:12.3f} {seconds}")
        return "\n".join(lines)

    def _emulated(self) -> dict[str, Any] | None:
        if self.link is None:
            return None
        text = f"{self.link.gigabits:g} Gb/s, {self.link.latency * 1e6:g} us"
        return {"gigabits": self.link.gigabits, "latency": self.link.latency, "text": text}
