"""Sums for people: rows, bytes and seconds since a tier was opened."""

from __future__ import annotations

import threading

__all__ = ["Counters"]


class Counters:
    """Named sums that any thread may add to.

    >>> counters = Counters("rows", "seconds")
    >>> counters.add(rows=3)
    >>> counters.values
    {'rows': 3.0, 'seconds': 0.0}
    """

    def __init__(self, *names: str) -> None:
        self.values = dict.fromkeys(names, 0.0)
        self._lock = threading.Lock()

    def add(self, **more: float) -> None:
        with self._lock:
            for name, value in more.items():
                self.values[name] += value
