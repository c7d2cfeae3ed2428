"""Reading the missing rows of several tables: one after the other where they come from memory, side by side where each
waits for a disk, which answers several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from time import perf_counter

READERS = 16
SLOW, FAST = 10e-6, 3e-6  # seconds a row from which on threads are worth while, and below which they are not any more


class Fetching:
    """Runs reads; used by one thread at a time. How they run changes nothing of what they read."""

    def __init__(self) -> None:
        self.parallel = False
        self._pool: ThreadPoolExecutor | None = None

    def run(self, reads: Sequence[Callable[[], None]], rows: int) -> None:
        """Call every read (of ``rows`` rows together). What one of them raises is raised when all have ended."""
        begin = perf_counter()
        if self.parallel and len(reads) > 1:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="embcache-read")
            futures = [self._pool.submit(read) for read in reads]
            wait(futures)
            for future in futures:
                future.result()
        else:
            for read in reads:
                read()
        self.parallel = perf_counter() - begin > rows * (FAST if self.parallel else SLOW)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
