"""Which keys each merged generation changed: what an export of changes needs once the segments are gone.

A file ``changes/<before>-<generation>.keys`` holds, for every table, the keys (uint64, ascending, each once) that the
generation wrote or deleted; no generation between the two changed any. Written by ``merge_rows``, before the merge.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CorruptStore

__all__ = ["Changes"]


class Changes:
    """The files of a folder. Safe from any thread: files only appear whole and disappear."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def _files(self) -> list[tuple[int, int, Path]]:
        """(before, generation, file), oldest first."""
        found = []
        for path in self.folder.glob("*-*.keys"):
            before, _, generation = path.stem.partition("-")
            if before.isdigit() and generation.isdigit():
                found.append((int(generation), int(before), path))
        return [(before, generation, path) for generation, before, path in sorted(found)]

    def since(self, table: int, generation: int, merged: int) -> list[np.ndarray] | None:
        """Key lists of the generations in ``(generation, merged]``; None where one is no longer known."""
        lists, reach = [], merged
        for before, written, path in reversed(self._files()):
            if written > merged:
                continue
            if reach <= generation:
                break
            if written != reach:
                return None
            try:
                lists.append(self._keys(path, table))
            except FileNotFoundError:
                return None
            reach = before
        return lists if reach <= generation else None

    @staticmethod
    def _keys(path: Path, table: int) -> np.ndarray:
        line, _, body = path.read_bytes().partition(b"\n")
        try:
            head: dict[str, Any] = json.loads(line)
            counts = [(int(t), int(n)) for t, n in head["tables"]]
            check = int(head["check"])
        except (ValueError, KeyError, TypeError):
            raise CorruptStore(f"{path} is not a list of keys") from None
        if zlib.crc32(body) != check or len(body) != 8 * sum(n for _, n in counts):
            raise CorruptStore(f"{path}: the checksum does not match")
        at = 0
        for t, n in counts:
            if t == table:
                return np.frombuffer(body, np.uint64, n, at)
            at += 8 * n
        return np.zeros(0, np.uint64)

    def problems(self) -> Iterator[str]:
        """A line for each file that is not what was written."""
        for _, _, path in self._files():
            try:
                self._keys(path, 0)
            except CorruptStore as error:
                yield str(error)
            except FileNotFoundError:  # trimmed meanwhile
                continue

    def trim(self) -> None:
        """Keep the newest files, up to the limit in bytes."""
        total = 0
        for _, _, path in reversed(self._files()):
            total += path.stat().st_size
            if total > self.limit:
                path.unlink(missing_ok=True)

    def sweep(self, merged: int) -> None:
        """Remove what a crash left behind: lists of generations that were not merged."""
        for path in self.folder.glob("*.tmp"):
            path.unlink(missing_ok=True)
        for _, generation, path in self._files():
            if generation > merged:
                path.unlink(missing_ok=True)
