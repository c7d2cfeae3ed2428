"""One writer at a time in a folder: an advisory lock that ends with its process, however that ends."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import ClassVar
from weakref import WeakSet, WeakValueDictionary

from embcache.errors import StoreLocked

try:
    import fcntl
except ImportError:  # a system without POSIX locks has none of ours
    fcntl = None  # type: ignore[assignment]

__all__ = ["FolderLock"]


class FolderLock:
    """The folder ``path`` is written by this process alone as long as this object lives.

    A process that holds it already gets the same object again. Raises StoreLocked naming the other writer. Processes
    forked from this one (a loader's) let go of it at once, so that it ends with this one whatever they do.
    """

    patience: ClassVar[float] = 0.0
    """Seconds to wait for another writer to end: where this process takes the place of one that was killed."""

    _held: ClassVar[WeakValueDictionary[tuple[int, str], FolderLock]] = WeakValueDictionary()
    _open: ClassVar[WeakSet[FolderLock]] = WeakSet()

    @classmethod
    def take(cls, path: Path) -> FolderLock:
        """The lock on an existing folder."""
        key = (os.getpid(), str(path.resolve()))
        lock = cls._held.get(key)
        if lock is None or not lock.current():
            end = time.monotonic() + cls.patience
            while True:
                try:
                    lock = cls._held[key] = cls(path)
                    break
                except StoreLocked:
                    if time.monotonic() >= end:
                        raise
                    time.sleep(0.05)
        return lock

    def __init__(self, path: Path) -> None:
        self._path = path / "lock"
        self._file = self._path.open("a+", encoding="utf-8")
        self._open.add(self)
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = _parsed(self._file.read())
            self._file.close()
            raise StoreLocked(str(path), owner.get("pid"), owner.get("host")) from None
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        self._file.flush()

    @classmethod
    def forget(cls) -> None:
        """In a forked child: close what the parent has locked, which unlocks nothing there."""
        for lock in list(cls._open):
            lock._file.close()
        cls._held.clear()

    def current(self) -> bool:
        """Whether the file that is locked is still the one in the folder (which may have been removed and remade)."""
        if self._file.closed:
            return False
        return self._path.exists() and os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


def _parsed(text: str) -> dict[str, object]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        return {}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=FolderLock.forget)
