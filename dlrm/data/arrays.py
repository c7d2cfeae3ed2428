"""Append-only array files whose length and running checksum are part of the committed progress."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np


class ArrayFile:
    """A raw little-endian file that grows at its end.

    ``state`` is (bytes, CRC-32 of them); opening with an earlier state cuts the file back to it.
    """

    def __init__(self, path: Path, dtype: str, state: tuple[int, int] = (0, 0)) -> None:
        self.path, self.dtype = path, np.dtype(dtype).newbyteorder("<")
        self.bytes, self.crc = state
        self._file = path.open("r+b" if path.exists() else "x+b")
        self._file.truncate(self.bytes)
        self._file.seek(self.bytes)

    @property
    def state(self) -> tuple[int, int]:
        """(bytes, CRC-32)."""
        return self.bytes, self.crc

    @property
    def items(self) -> int:
        """Number of array elements."""
        return self.bytes // self.dtype.itemsize

    def append(self, array: np.ndarray) -> None:
        """Add an array's elements in C order."""
        if array.size == 0:
            return
        data = np.ascontiguousarray(array, self.dtype).reshape(-1).view(np.uint8).data
        self._file.write(data)
        self.bytes += data.nbytes
        self.crc = zlib.crc32(data, self.crc)

    def sync(self) -> None:
        """Flush to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
