"""What the sections of bench_cache.py share: ids, stores, counters of disk traffic, splits of the time of a step."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout need not be installed

STAGES = ("dedup_probe", "miss_read", "evict_write", "insert")


class PowerLaw:
    """Ids in [0, rows) with P(rank r) ~ r^-alpha (NVIDIA's generator), ranks scattered over the ids.

    >>> law = PowerLaw(1000, 1.05)
    >>> ids = law.draw(np.random.default_rng(0), 5000)
    >>> bool(np.isin(ids, law.hottest(100)).mean() > 0.5)
    True
    """

    def __init__(self, rows: int, alpha: float, scattered: bool = True) -> None:
        self.rows, self.gamma = rows, 1.0 - alpha
        multiplier = 2_654_435_761
        while np.gcd(multiplier, rows) > 1:
            multiplier += 2
        self.multiplier = multiplier if scattered else 1

    def ranks(self, rng: np.random.Generator, n: int) -> np.ndarray:
        u = rng.random(n)
        rank = np.floor((u * (float(self.rows) ** self.gamma - 1.0) + 1.0) ** (1.0 / self.gamma)).astype(np.int64)
        return np.minimum(rank, self.rows) - 1

    def ids_of(self, ranks: np.ndarray) -> np.ndarray:
        return (ranks * self.multiplier) % self.rows

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return self.ids_of(self.ranks(rng, n))

    def hottest(self, k: int) -> np.ndarray:
        """The ids a cache of ``k`` rows that never changes would best hold."""
        return self.ids_of(np.arange(k))


@contextmanager
def folder(base: str, name: str) -> Iterator[Path]:
    """An empty folder for a store, removed afterwards."""
    path = Path(base) / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def chain(ec: Any, path: Path | None, rows: Any, policy: str = "lfu", **lmdb: Any) -> list[Any]:
    """A cache of ``rows`` over LMDB at ``path`` (None: over memory)."""
    below = ec.tiers.Ram() if path is None else ec.tiers.Lmdb(path, **lmdb)
    return [ec.tiers.Ram(rows=rows, policy=policy), below]


def jagged(ec: Any, names: list[str], ids: np.ndarray, batch: int) -> Any:
    """One id a bag, or equally long bags: ids feature-major."""
    import torch

    per_bag = len(ids) // (len(names) * batch)
    lengths = torch.full((len(names) * batch,), per_bag, dtype=torch.int32)
    return ec.KeyedJaggedTensor.from_lengths_sync(names, torch.from_numpy(ids), lengths)


def written_bytes() -> int:
    """Bytes this process and its ended children handed to write calls (Linux; 0 elsewhere)."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return 0
    return int(text.split("wchar:")[1].split()[0])


def anonymous_bytes() -> int:
    """Resident memory that is not file pages."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


_DROP = """
import os, pathlib, sys
for file in pathlib.Path(sys.argv[1]).rglob("*"):
    if file.is_file():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
"""


def drop_pages(path: Path) -> None:
    """Make the system forget the pages of every file below; nobody may have them mapped. In a process of its own:
    opening and closing LMDB's file would drop this process's locks."""
    subprocess.run([sys.executable, "-c", _DROP, str(path)], check=True)


def disk_bytes(path: Path) -> int:
    """Bytes of disk that a folder takes (holes of sparse files do not count)."""
    return sum(f.stat().st_blocks * 512 for f in path.rglob("*") if f.is_file())


class Split:
    """Seconds of the cache's stages, and its counters, between two moments.

    Stages may run on the look-ahead thread: their sum with the rest is then longer than the step.
    """

    def __init__(self, store: Any) -> None:
        self.store, self.before, self.start = store, store.front.stats(), time.perf_counter()

    def end(self, steps: int) -> dict[str, Any]:
        now, seconds = self.store.front.stats(), time.perf_counter() - self.start
        change = {key: value - self.before.get(key, 0) for key, value in now.items() if isinstance(value, int | float)}
        stages = {name: now["seconds"][name] - self.before["seconds"].get(name, 0.0) for name in STAGES}
        return {
            "ms": seconds / steps * 1e3,
            "split_ms": {name: value / steps * 1e3 for name, value in stages.items()},
            "hit_rate": change["hits"] / max(1, change["unique_ids"]),
            "misses_per_step": change["misses"] / steps,
            "evictions_per_step": change["evictions"] / steps,
            "written_back_per_step": change["rows_written_back"] / steps,
        }


def timed(function: Callable[[], object], repeats: int = 1) -> float:
    """Seconds of one call, the fastest of ``repeats``."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best
