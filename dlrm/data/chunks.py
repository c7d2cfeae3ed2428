"""What is known of the committed chunks: where each one's rows, codes and dictionary lie in the working files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.cache import write_atomically
from dlrm.data.parsed import PARTS


class ItemReader:
    """Reads element ranges of a raw file into memory, from any thread (mapping it would count as resident memory)."""

    def __init__(self, path: Path, dtype: np.dtype | str) -> None:
        self._file, self.path, self.dtype = path.open("rb"), path, np.dtype(dtype)

    def __call__(self, start: int, stop: int) -> np.ndarray:
        """Elements ``[start, stop)``."""
        out = np.empty(max(stop - start, 0), self.dtype)
        room, at = memoryview(out.view(np.uint8).data), start * self.dtype.itemsize
        while len(room):
            got = os.preadv(self._file.fileno(), [room], at)
            if got == 0:
                raise OSError(f"{self.path}: ends at byte {at}, inside a committed chunk")
            room, at = room[got:], at + got
        return out

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass
class ChunkIndex:
    """C chunks, F features, K bag features. ``rows`` int64 ``[C + 1]``; ``keys`` int64 ``[C, F + 1]``: where in
    keys.bin each dictionary begins; ``parts`` int64 ``[C, F, PARTS + 1]``; ``bag_items`` int64 ``[K, C + 1]``."""

    rows: np.ndarray
    keys: np.ndarray
    parts: np.ndarray
    bag_items: np.ndarray

    @property
    def count(self) -> int:
        """Number of chunks."""
        return int(self.rows.shape[0] - 1)

    def part(self, chunk: int, feature: int, low: int, high: int) -> tuple[int, int]:
        """Place in keys.bin of parts ``[low, high)`` of a dictionary."""
        base = int(self.keys[chunk, feature])
        return base + int(self.parts[chunk, feature, low]), base + int(self.parts[chunk, feature, high])


class ChunkLog:
    """One small file a chunk, renamed into place: its existence is the commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def _path(self, chunk: int) -> Path:
        return self.folder / f"{chunk:08d}.json"

    def commit(self, chunk: int, state: dict[str, Any]) -> None:
        """Make a chunk part of the progress."""
        write_atomically(self._path(chunk), json.dumps(state).encode())

    def count(self) -> int:
        """Number of chunks committed, without a gap."""
        n = len(list(self.folder.glob("*.json")))
        while n and not self._path(n - 1).exists():
            n -= 1
        return n

    def read(self, chunk: int) -> dict[str, Any]:
        """The state a chunk left."""
        return json.loads(self._path(chunk).read_bytes())

    def index(self, features: int, bags: int) -> ChunkIndex:
        """Places of all chunks."""
        n = self.count()
        out = ChunkIndex(np.zeros(n + 1, np.int64), np.zeros((n, features + 1), np.int64),
                         np.zeros((n, features, PARTS + 1), np.int64), np.zeros((bags, n + 1), np.int64))  # fmt: skip
        at = 0
        for c in range(n):
            state = self.read(c)
            out.rows[c + 1] = state["rows"]
            out.bag_items[:, c + 1] = state["bag_items"]
            if state["parts"]:
                out.parts[c] = state["parts"]
                np.cumsum(out.parts[c, :, PARTS], out=out.keys[c, 1:])
                out.keys[c] += at
                at = int(out.keys[c, -1])
        return out
