"""Reading the missing rows of several tables: one after the other where they come from memory, side by side where each
waits for a disk, which answers several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

try:
    from resource import RUSAGE_SELF, getrusage
except ImportError:  # a system that does not count page faults: reads stay in turn
    getrusage = None  # type: ignore[assignment]

Part = TypeVar("Part")

READERS = 16
MANY, FEW = (
    1 / 16,
    1 / 64,
)  # pages fetched from a disk for each row: from which on threads help, below which they do not


class Fetching:
    """Runs reads; used by one thread at a time. How they run changes nothing of what they read."""

    def __init__(self) -> None:
        self.parallel = False
        self._pool: ThreadPoolExecutor | None = None

    def run(self, read: Callable[[Sequence[Part]], None], parts: Sequence[Part], rows: int) -> None:
        """``read`` all parts (of ``rows`` rows together), in one call or each in its own. What one of them raises is
        raised when all have ended."""
        before = _faults()
        if self.parallel and len(parts) > 1:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="embcache-read")
            futures = [self._pool.submit(read, [part]) for part in parts]
            wait(futures)
            for future in futures:
                future.result()
        else:
            read(parts)
        self.parallel = _faults() - before > rows * (FEW if self.parallel else MANY)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _faults() -> int:
    """Pages that this process has had to wait for a disk for."""
    return 0 if getrusage is None else getrusage(RUSAGE_SELF).ru_majflt
